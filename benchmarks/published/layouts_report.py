"""Published layouts of data, tensor and pipeline parallelism beside our predictions.

Usage:
    python -m benchmarks.published.layouts_report [--gpus N] [--output PATH]
    python -m benchmarks.published.layouts_report --rows FILE [--machine NAME] [--output PATH]

FILE is a CSV file of a reader's own rows, with the columns
blocks,hidden,heads,dp,tp,pp,microbatch,batch,chunks,seconds,gb,calibrates: sizes of a GPT, degrees,
samples of a microbatch and of an iteration; those from chunks on may be left out. Rows in which
calibrates is not empty, up to three, give the second prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.published.layout_calibration import MOST_TO_CALIBRATE, Calibrated, calibrated
from benchmarks.published.layout_rows import MACHINES, layouts, rows_of_file
from benchmarks.published.layouts_3d import Layout
from benchmarks.reporting.report import heading, table, write_table
from planner.errors import PipeplanError

BARS = "with at most 3 rows of a source median 5%, 90th percentile 12%; with none 10% and 20%; "
MEMORY_BARS = (
    "memory 6% and 12%, what was out of memory predicted so; Spearman's correlation of predicted "
    "and measured seconds 0.85"
)


@dataclass(frozen=True)
class Row:
    """A layout beside its predictions.

    Attributes:
        layout: as published.
        seconds: predicted with nothing calibrated.
        calibrated_s: with the figures that rows of the source give; None: nothing calibrates.
        memory_gb: predicted.
        gives: whether it is one of these rows.
    """

    layout: Layout
    seconds: float
    calibrated_s: float | None
    memory_gb: float
    gives: bool

    @property
    def is_timed(self) -> bool:
        """Whether its time was measured."""
        return self.layout.measured_s is not None

    @property
    def is_scored(self) -> bool:
        """Whether it tells anything of predictions with calibrated figures."""
        return self.is_timed and self.calibrated_s is not None and not self.gives

    @property
    def measured_s(self) -> float:
        """Measured seconds, of a row whose time was measured."""
        assert self.layout.measured_s is not None
        return self.layout.measured_s

    def predicted_s(self, *, calibrated: bool) -> float:
        """Return the seconds of one of the predictions, which must be there."""
        seconds = self.calibrated_s if calibrated else self.seconds
        assert seconds is not None
        return seconds

    def error(self, *, calibrated: bool) -> float:
        """Return predicted over measured seconds, less one."""
        return self.predicted_s(calibrated=calibrated) / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured memory, less one."""
        assert self.layout.measured_gb is not None
        return self.memory_gb / self.layout.measured_gb - 1

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.memory_gb <= self.layout.memory_gb

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table."""
        layout = self.layout
        known = "-" if layout.measured_gb is None else f"{layout.measured_gb:.0f}"
        memory = f"{self.memory_gb:.0f}{'' if self.fits else ', does not fit'}"
        measured = "out of memory" if layout.out_of_memory else "-"
        error = again = ""
        if layout.measured_s is not None:
            measured = f"{layout.measured_s:.2f}"
            error = f"{self.error(calibrated=False):+.1%}"
        if self.is_timed and self.calibrated_s is not None:
            again = f"{self.error(calibrated=True):+.1%}" + (" (given)" if self.gives else "")
        calibrated_s = "-" if self.calibrated_s is None else f"{self.calibrated_s:.2f}"
        return (
            layout.name,
            measured,
            f"{self.seconds:.2f}",
            error,
            calibrated_s,
            again,
            known,
            memory,
        )


COLUMNS = (
    "layout: DP/TP/PP/microbatch",
    "measured s",
    "predicted s",
    "error",
    "calibrated s",
    "error",
    "measured GB",
    "predicted GB",
)


def rows_of(source: Sequence[Layout]) -> tuple[list[Row], Calibrated | None]:
    """Return the rows of one source, and the figures that some of them give."""
    giving = [row for row in source if row.calibrates and row.measured_s is not None]
    giving = giving[:MOST_TO_CALIBRATE]
    found = calibrated(giving) if giving else None
    return [_row(layout, found, gives=layout in giving) for layout in source], found


def _row(layout: Layout, found: Calibrated | None, *, gives: bool) -> Row:
    again = None if found is None else layout.predicted_s(found.figures)
    return Row(layout, layout.predicted_s(), again, layout.predicted_gb(), gives)


SUMMARY = ("figure", "rows", "median", "90th percentile", "worst", "Spearman")


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line for each kind of error."""
    timed, scored = [r for r in rows if r.is_timed], [r for r in rows if r.is_scored]
    known = [r for r in rows if r.layout.measured_gb is not None]
    sizes = {
        "seconds, nothing calibrated": (timed, [r.error(calibrated=False) for r in timed]),
        "seconds, calibrated": (scored, [r.error(calibrated=True) for r in scored]),
        "memory": (known, [r.memory_error for r in known]),
    }
    found = []
    for name, (of, errors) in sizes.items():
        if errors:
            e = np.abs(errors)
            ranked = "-" if name == "memory" else _ranked(of, calibrated=name[9:] == "calibrated")
            figures = (median(e), np.quantile(e, 0.9), max(e))
            found.append((name, str(len(e)), *(f"{figure:.1%}" for figure in figures), ranked))
    return found


def _ranked(rows: Sequence[Row], *, calibrated: bool) -> str:
    """Return the correlation of the ranks of predicted and measured seconds."""
    if len(rows) < 3:
        return "-"
    predicted = [row.calibrated_s if calibrated else row.seconds for row in rows]
    ranks = [np.argsort(np.argsort(x)) for x in (predicted, [r.layout.measured_s for r in rows])]
    return f"{np.corrcoef(ranks)[0, 1]:.2f}"


def fitting(rows: Sequence[Row]) -> str:
    """Return what was out of memory, and what is predicted so."""
    out = [row for row in rows if row.layout.out_of_memory]
    ran = [row for row in rows if row.is_timed]
    return (
        f"Of {len(out)} layouts that were out of memory {sum(not row.fits for row in out)} are "
        f"predicted so, and {sum(not row.fits for row in ran)} of {len(ran)} that ran.\n"
    )


FIRST, LEAST_LAYOUTS = 3, 4
"""So many of the layouts that are predicted to be fastest are tried, if there are more of them."""


def choices(rows: Sequence[Row]) -> Iterator[str]:
    """Yield, for every model and batch with several layouts, what trying our first three costs.

    Those that are predicted to run out of memory are not tried.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        gpt, batch = row.layout.gpt, row.layout.batch
        if row.is_timed:
            name = f"{gpt.blocks} x {gpt.hidden}, {gpt.heads} heads, batch {batch}"
            groups.setdefault(name, []).append(row)
    for name, of in groups.items():
        if len(of) < LEAST_LAYOUTS:
            continue
        best_s = min(row.measured_s for row in of)
        told = [f"{_first_s(of, calibrated=False) / best_s - 1:.1%} with nothing calibrated"]
        if all(row.calibrated_s is not None for row in of):
            told.append(f"{_first_s(of, calibrated=True) / best_s - 1:.1%} calibrated")
        yield (
            f"The best of our first {FIRST} of {len(of)} layouts of {name} takes longer than the "
            f"best of all by {', '.join(told)} (bar 3%).\n"
        )


def _first_s(rows: Sequence[Row], *, calibrated: bool) -> float:
    """Return the least measured seconds of those that are predicted to be fastest."""
    fitting = (row for row in rows if row.fits)
    tried = sorted(fitting, key=lambda row: row.predicted_s(calibrated=calibrated))
    return min(row.measured_s for row in tried[:FIRST])


def report(
    by_source: Sequence[tuple[Sequence[Row], Calibrated | None]], command: str, *, own: bool
) -> str:
    """Return the page.

    Args:
        by_source: rows with the figures that some of them give.
        command: that makes it.
        own: whether they are a reader's own.
    """
    everything = [row for rows, _ in by_source for row in rows]
    parts = [
        heading("Published layouts of data, tensor and pipeline parallelism", command),
        "Each is predicted from the sizes of the model and published figures of the machine alone: "
        "FLOPs and traffic of each operation, products by their tiles and waves, collectives of "
        "the tensor-parallel group, messages, reductions among replicas, recomputation, the head "
        "on the last stage (planner/costs, planner/cluster). The second prediction has the "
        "efficiency of products from up to three rows of a source"
        + ("" if own else ", the first of each microbatch size")
        + ", and the host's time of an operation where they determine it.\n"
        + f"Bars: {BARS}{MEMORY_BARS}.\n",
        table(SUMMARY, summary(everything)) if any(row.is_timed for row in everything) else "",
        fitting(everything),
    ]
    for rows, found in by_source:
        parts += [f"## {rows[0].layout.source}\n", f"{rows[0].layout.machine.name}.\n"]
        if found is not None:
            parts.append(_calibrated(found))
        if any(row.is_timed for row in rows):
            parts.append(table(SUMMARY, summary(rows)))
        parts += choices(rows)
        parts.append(table(COLUMNS, [row.cells for row in rows]))
    return "\n".join(parts)


def _calibrated(found: Calibrated) -> str:
    """Return which figures the rows of a source determine, and their values."""
    efficiency = f"{found.figures.efficiency:.1%} of peak in products of whole waves"
    host = f"{found.figures.host_us:.0f} µs of the host an operation"
    error = f"a fit of it has a standard error of {found.host_error:.1f} times what it was before"
    if found.has_host_time:
        return f"Calibrated: {efficiency}, {host} ({error}).\n"
    if not np.isfinite(found.host_error):
        error = "operations of all of them are equally long"
    return (
        f"Calibrated: {efficiency}. These rows do not determine the host's time ({error}), which "
        f"stays: {host}.\n"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.published.layouts_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--gpus", type=int, default=5000, help="leave out layouts of more GPUs")
    found.add_argument("--rows", type=Path, help="predict the rows of this CSV file")
    found.add_argument(
        "--machine", choices=sorted(MACHINES), default="megatron-deepspeed", help="of these rows"
    )
    found.add_argument("--output", type=Path, help="write the page to this file")
    options = found.parse_args(words)
    command = f"python -m benchmarks.published.layouts_report --gpus {options.gpus}"
    rows = layouts()
    if options.rows is not None:
        command = f"{command} --rows {options.rows.name} --machine {options.machine}"
        try:
            rows = iter(rows_of_file(options.rows, options.machine))
        except PipeplanError as error:
            found.error(str(error))
    by_source: dict[str, list[Layout]] = {}
    for layout in rows:
        if layout.gpus <= options.gpus:
            by_source.setdefault(layout.source, []).append(layout)
    page = report(
        [rows_of(rows) for rows in by_source.values()], command, own=options.rows is not None
    )
    write_table(page, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
