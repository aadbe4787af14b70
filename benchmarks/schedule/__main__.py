"""Microbatch schedules: zero-bubble instances, uneven stages, two a device, many microbatches.

Usage:
    python -m benchmarks.schedule [--data FOLDER] [--rows NAMES] [--output FILE]
    python -m benchmarks.schedule --instance FILE [--time-limit S] --json
    python -m benchmarks.schedule --short [--data FOLDER] [--json] [--claims FILE]

Without --instance it runs the whole table and writes Markdown. FOLDER holds
zero_bubble_instances.json; its section is left out without it. With --instance it solves every
instance of a file of that form, under each cap, and prints a JSON line for
each: times in the unit of the file. With --short it checks the same bars on a few instances and
prints claims.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting.claims import add_short_options, is_short, tell
from benchmarks.reporting.report import (
    NO_DATA,
    add_options,
    chosen_sections,
    data_folder,
    heading,
    table,
    write_table,
)
from benchmarks.schedule import joint as schedule_joint
from benchmarks.schedule import rows as schedule_rows
from benchmarks.schedule import short
from benchmarks.schedule.joint import JointRow
from benchmarks.schedule.rows import (
    CLASSIC_MEAN,
    MANY_GAP,
    PROVED,
    SENDS_MS,
    UNEVEN_MEDIAN,
    UNEVEN_WORST,
    Case,
    Row,
    Settings,
    chunks_gap,
)
from planner import PipeplanError
from planner.search.settings import check_settings

COLUMNS = ("instance", "cap", "ours", "bound", "gap", "best classic / ours", "s", "")
SECTIONS = (
    "zero_bubble",
    "uneven",
    "loose",
    "chunks",
    "many",
    "classics",
    "joint",
    "several",
    "mixed",
)


def as_json(row: Row) -> dict[str, Any]:
    """A row as it is printed for programs."""
    return {
        "instance": row.instance,
        "stages": row.stages,
        "microbatches": row.microbatches,
        "cap": row.cap,
        "value": row.value,
        "lower_bound": row.lower_bound,
        "best_classic": row.best_classic if math.isfinite(row.best_classic) else None,
        "reference": row.reference,
        "seconds": row.seconds,
    }


def cells(row: Row, verdict: str = "") -> list[object]:
    """A row of a table."""
    ratio = row.best_classic / row.value
    return [
        row.instance,
        row.cap,
        f"{row.value:,.0f}",
        f"{row.lower_bound:,.0f}",
        f"{row.gap:.2%}",
        f"{ratio:.3f}" if math.isfinite(ratio) else "none fits",
        row.seconds,
        verdict,
    ]


def against_bar(rows: Iterable[Row], bar: Callable[[Row], float]) -> list[list[object]]:
    """Rows with what gap each may have and whether it is reached."""
    return [
        cells(row, f"{'reached' if row.gap <= bar(row) else 'NOT reached'}, bar {bar(row):.1%}")
        for row in rows
    ]


def zero_bubble_section(path: Path, settings: Settings) -> str:
    """Beside the authors' heuristic."""
    lines, faster, slower, near, total = [], 0, 0, 0, 0
    optimal_reference = 0
    for row in schedule_rows.zero_bubble_file(path, settings):
        reference = row.reference or math.inf
        total += 1
        # Within a microsecond the file's figures are rounded.
        faster += row.value < reference - 1
        slower += row.value > reference + 1
        near += row.gap < 0.01
        optimal_reference += reference <= row.lower_bound + 1
        lines.append([*cells(row)[:-1], f"{row.value / reference:.4f}"])
        _tell(row)
    summary = (
        f"Never slower: {_verdict(slower == 0)} ({slower} of {total} slower). Strictly faster on "
        f"at least half: {_verdict(2 * faster >= total)} ({faster} of {total}; in "
        f"{optimal_reference} the reference is proved optimal, so nothing can be faster). Gap "
        f"under 1% on at least half: {_verdict(2 * near >= total)} ({near} of {total}).\n"
    )
    columns = [*COLUMNS[:-1], "ours / authors' heuristic"]
    return f"{summary}\n{table(columns, lines)}"


def uneven_section(settings: Settings) -> str:
    """One stage a device."""
    rows = _solved(schedule_rows.one_stage_a_device(), settings)
    gaps = sorted(row.gap for row in rows)
    middle = (gaps[len(gaps) // 2 - 1] + gaps[len(gaps) // 2]) / 2
    summary = (
        f"Median gap {middle:.2%}: {_verdict(middle < UNEVEN_MEDIAN)} (bar {UNEVEN_MEDIAN:.1%}). "
        f"Worst {gaps[-1]:.2%}: {_verdict(gaps[-1] < UNEVEN_WORST)} (bar {UNEVEN_WORST:.0%}).\n"
    )
    return f"{summary}\n{table(COLUMNS, [cells(row) for row in rows])}"


def loose_section(settings: Settings) -> str:
    """Caps that hold all microbatches."""
    return table(
        COLUMNS, against_bar(_solved(schedule_rows.loose_caps(), settings), lambda row: PROVED)
    )


def chunks_section(settings: Settings) -> str:
    """Two stages a device."""
    rows = _solved(schedule_rows.two_stages_a_device(), settings)
    return table(COLUMNS, against_bar(rows, lambda row: chunks_gap(row.microbatches)))


def many_section(settings: Settings) -> str:
    """Many microbatches."""
    rows = _solved(schedule_rows.many_microbatches(), settings)
    return table(COLUMNS, against_bar(rows, lambda row: MANY_GAP))


def classics_section(settings: Settings) -> str:
    """Beside the best published schedule of the same kind of backwards."""
    lines, means = [], []
    for send_ms in SENDS_MS:
        rows = _solved(schedule_rows.against_classics(send_ms), settings)
        mean = schedule_rows.geometric_mean_over_classic(rows)
        slower = sum(row.value > row.best_classic * (1 + 1e-9) for row in rows)
        means.append(
            f"Transfers of {send_ms:g} ms: geometric mean {mean:.3f}, "
            f"{_verdict(mean >= CLASSIC_MEAN)} (bar {CLASSIC_MEAN}), "
            f"slower in {slower} of {len(rows)}."
        )
        lines += [[f"{send_ms:g} ms", *cells(row)[:-1]] for row in rows]
    summary = (
        "Time of the best published schedule over ours, at equal memory. Published are GPipe, "
        "1F1B, eager 1F1B, PE and, with weight gradients apart, ZB-H1, ZB-H2 and ZB-1p/2p as its "
        "authors run it: found for the median stage, replayed on the real ones. Forwards take "
        "0.6 to 1.4 ms.\n\n" + "\n".join(means) + "\n"
    )
    return f"{summary}\n{table(['transfers', *COLUMNS[:-1]], lines)}"


def joint_section(settings: Settings) -> str:
    """Whole plans: partition, devices, replicas and schedule."""
    return _joint_table(schedule_joint.joint_rows(settings))


def several_section(settings: Settings) -> str:
    """Whole plans with several stages a device."""
    return _joint_table(schedule_joint.several_rows(settings))


def mixed_section(settings: Settings) -> str:
    """Whole plans of convolutional networks on clusters of mixed wires."""
    return _joint_table(schedule_joint.mixed_rows(settings))


def _joint_table(rows: Iterable[JointRow]) -> str:
    lines = []
    for row in rows:
        verdict = f"{_verdict(row.gap < row.bar)}, bar {row.bar:.0%}"
        lines.append([*row.cells, verdict])
        print(*lines[-1], sep="  ", file=sys.stderr, flush=True)
    return table(schedule_joint.COLUMNS, lines)


def _solved(cases: Iterable[Case], settings: Settings) -> list[Row]:
    found = []
    for row in schedule_rows.solve_cases(cases, settings):
        _tell(row)
        found.append(row)
    return found


def _tell(row: Row) -> None:
    print(*cells(row)[:-1], sep="  ", file=sys.stderr, flush=True)


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "NOT reached"


def run_table(arguments: argparse.Namespace) -> str:
    """All sections asked for, as Markdown."""
    names = chosen_sections(arguments.rows, SECTIONS)
    settings = Settings(arguments.seed, arguments.workers)
    parts = [heading("Microbatch schedules", "python -m benchmarks.schedule")]
    parts.append(
        "Times in microseconds unless told otherwise; a minute each, 30 s with many microbatches.\n"
    )
    for name in names:
        title, text = _section(name, arguments.data, settings)
        parts.append(f"## {title}\n\n{text}")
    return "\n".join(parts)


def _section(name: str, data: Path | None, settings: Settings) -> tuple[str, str]:
    match name:
        case "zero_bubble" if data is None:
            return "Zero-bubble instances", NO_DATA
        case "zero_bubble":
            path = data / "zero_bubble_instances.json"
            return "Zero-bubble instances", zero_bubble_section(path, settings)
        case "uneven":
            return "One stage a device: 16 x 64, uneven, communication", uneven_section(settings)
        case "loose":
            return "The same with memory for all microbatches: proved?", loose_section(settings)
        case "chunks":
            return "Two stages a device, 8 devices", chunks_section(settings)
        case "many":
            return "Many microbatches", many_section(settings)
        case "classics":
            return "Against published schedules: 8 x 32, uneven", classics_section(settings)
        case "several":
            return "Whole plans with several stages a device", several_section(settings)
        case "mixed":
            return "Whole plans of convolutional networks on mixed wires", mixed_section(settings)
    return "Whole plans: traced models on the sample clusters", joint_section(settings)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.schedule",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--instance", type=Path, help="solve one file and print a line an instance")
    found.add_argument("--json", action="store_true", help="print JSON lines")
    found.add_argument("--data", type=data_folder, help="folder of the public instances")
    add_options(found, SECTIONS)
    add_short_options(found)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    arguments = parser().parse_args(words)
    if arguments.json and not (arguments.instance or arguments.short):
        parser().error("--json goes with --instance FILE or --short")
    try:
        check_settings(arguments.time_limit, 0.0, arguments.seed, arguments.workers)
        if is_short(parser(), arguments):
            settings = Settings(arguments.seed, arguments.workers)
            found = short.entries(arguments.data, settings)
            tell(found, arguments.claims, as_json=arguments.json)
            return 0
        if arguments.instance:
            settings = Settings(arguments.seed, arguments.workers)
            limit_s = arguments.time_limit
            for row in schedule_rows.zero_bubble_file(arguments.instance, settings, limit_s):
                print(json.dumps(as_json(row)) if arguments.json else cells(row), flush=True)
            return 0
        text = run_table(arguments)
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    write_table(text, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
