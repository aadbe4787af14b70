"""Published layouts of data, tensor and pipeline parallelism beside our predictions.

Usage:
    python -m benchmarks.published.layouts_report [--gpus N] [--output PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.published.layouts_3d import Layout, efficiency_of, layouts
from benchmarks.reporting.report import heading, table, write_table

BARS = "with at most 3 rows of a source median 5%, 90th percentile 12%; with none 10% and 20%; "
MEMORY_BARS = "memory 6% and 12%, what was out of memory predicted so"


@dataclass(frozen=True)
class Row:
    """A layout beside its predictions.

    Attributes:
        layout: as published.
        seconds: predicted from the preset alone.
        calibrated_s: with the efficiency that the first row of the source gives; None: out of
            memory.
        memory_gb: predicted; None: nothing is published.
        gives: whether it is that first row.
    """

    layout: Layout
    seconds: float
    calibrated_s: float | None
    memory_gb: float | None
    gives: bool

    def error(self, *, calibrated: bool) -> float:
        """Return predicted over measured seconds, less one."""
        seconds = self.calibrated_s if calibrated else self.seconds
        assert self.layout.measured_s is not None
        assert seconds is not None
        return seconds / self.layout.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured memory, less one."""
        assert self.layout.measured_gb is not None
        assert self.memory_gb is not None
        return self.memory_gb / self.layout.measured_gb - 1

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table."""
        layout, memory = self.layout, "-" if self.memory_gb is None else f"{self.memory_gb:.0f}"
        known = "-" if layout.measured_gb is None else f"{layout.measured_gb:.0f}"
        if layout.measured_s is None:
            fits = self.memory_gb is not None and self.memory_gb <= layout.memory_gb
            return (
                layout.name,
                "out of memory",
                "fits" if fits else "does not fit",
                "",
                "",
                known,
                memory,
            )
        shown = f"{self.error(calibrated=True):+.1%}" + (" (calibration)" if self.gives else "")
        return (
            layout.name,
            f"{layout.measured_s:.2f}",
            f"{self.seconds:.2f}",
            f"{self.error(calibrated=False):+.1%}",
            shown,
            known,
            memory,
        )


COLUMNS = (
    "layout: DP/TP/PP/microbatch",
    "measured s",
    "predicted s",
    "error",
    "with one row",
    "measured GB",
    "predicted GB",
)


def rows_of(source: Sequence[Layout]) -> list[Row]:
    """Return the rows of one source."""
    first = next(layout for layout in source if layout.measured_s is not None)
    efficiency = efficiency_of(first)
    return [_row(layout, efficiency, gives=layout is first) for layout in source]


def _row(layout: Layout, efficiency: float, *, gives: bool) -> Row:
    is_told = layout.measured_s is None or layout.measured_gb is not None
    return Row(
        layout,
        layout.predicted_s() if layout.measured_s is not None else 0.0,
        layout.predicted_s(efficiency) if layout.measured_s is not None else None,
        layout.predicted_gb() if is_told else None,
        gives,
    )


SUMMARY = ("figure", "rows", "median", "90th percentile", "worst")


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line for each kind of error."""
    timed = [row for row in rows if row.layout.measured_s is not None]
    sizes = {
        "seconds, nothing calibrated": [abs(r.error(calibrated=False)) for r in timed],
        "seconds, one row of each source": [
            abs(r.error(calibrated=True)) for r in timed if not r.gives
        ],
        "memory": [abs(r.memory_error) for r in rows if r.layout.measured_gb is not None],
    }
    return [
        (name, str(len(e)), f"{median(e):.1%}", f"{np.quantile(e, 0.9):.1%}", f"{max(e):.1%}")
        for name, e in sizes.items()
        if e
    ]


def report(by_source: Sequence[Sequence[Row]], command: str) -> str:
    """Return the page."""
    everything = [row for rows in by_source for row in rows]
    parts = [
        heading("Published layouts of data, tensor and pipeline parallelism", command),
        "Each is predicted from the sizes of the model and the datasheets of the machine alone: "
        "FLOPs and traffic of each operation, products by their tiles and waves, collectives of "
        "the tensor-parallel group, messages sent in parts, reductions among replicas, "
        "recomputation, the head on the last stage (planner/costs, planner/cluster). One row of "
        "each source, its first, gives the efficiency of matrix products for the second error. "
        f"Bars: {BARS}{MEMORY_BARS}.\n",
        table(SUMMARY, summary(everything)),
    ]
    for rows in by_source:
        parts += [f"## {rows[0].layout.source}\n", f"{rows[0].layout.machine.name}.\n"]
        parts += [table(SUMMARY, summary(rows)), table(COLUMNS, [row.cells for row in rows])]
    return "\n".join(parts)


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.published.layouts_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--gpus", type=int, default=5000, help="leave out layouts of more GPUs")
    found.add_argument("--output", type=Path, help="write the page to this file")
    options = found.parse_args(words)
    by_source: dict[str, list[Layout]] = {}
    for layout in layouts():
        if layout.gpus <= options.gpus:
            by_source.setdefault(layout.source, []).append(layout)
    command = f"python -m benchmarks.published.layouts_report --gpus {options.gpus}"
    write_table(report([rows_of(rows) for rows in by_source.values()], command), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
