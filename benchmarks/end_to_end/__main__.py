"""Tracing times, import times, gaps of plans for the sample clusters, and Llama 2 70B on many GPUs.

Usage:
    python -m benchmarks.end_to_end [--rows trace,plans,large] [--time-limit S] [--output FILE]
    python -m benchmarks.end_to_end --short [--json] [--claims FILE]

The short form leaves out models, clusters and the rows of many GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.end_to_end import run as full
from benchmarks.end_to_end.large import COLUMNS as LARGE_COLUMNS
from benchmarks.end_to_end.large import large_rows
from benchmarks.end_to_end.run import (
    PLAN_COLUMNS,
    TRACE_COLUMNS,
    import_times_s,
    plan_rows,
    trace_rows,
)
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_short_options,
    details,
    is_short,
    met,
    tell,
)
from benchmarks.reporting.report import chosen_sections, heading, table
from planner import PipeplanError

MODELS = ("models.gpt:gpt2_small", "models.llama:llama2_7b", "models.resnet:resnet50")
CLUSTERS = ("single_node", "irregular")
OURS = "ourselves"
LARGE_LIMIT_S = 90.0
SECTIONS = ("trace", "plans", "large")


def entries(time_limit_s: float) -> Iterator[Entry]:
    """Claims and tables.

    Args:
        time_limit_s: of each plan.
    """
    imports = full.import_times_s()
    yield Claim(
        claim="`import planner`, median",
        source=OURS,
        figure=statistics.median(imports),
        unit="s",
        regime=f"{len(imports)} fresh processes",
    )
    yield details("Tracing, one sample a microbatch", full.TRACE_COLUMNS, full.trace_rows(MODELS))
    rows = full.plan_rows(time_limit_s, CLUSTERS)
    kept = sum(row[-1] == full.HOLDS for row in rows)
    claim = "plans that the independent checker finds to hold"
    yield met(claim, OURS, kept, len(rows), regime=f"GPT-2 small, {time_limit_s:g} s a plan")
    yield details(f"GPT-2 small, {time_limit_s:g} s", full.PLAN_COLUMNS, rows)
    left = [name for name in full.CLUSTERS if name not in CLUSTERS]
    yield LeftOut(text=f"{len(full.MODELS) - len(MODELS)} of {len(full.MODELS)} models")
    yield LeftOut(text="the plan for " + ", ".join(left))
    yield LeftOut(text="Llama 2 70B on 64 and 1,024 GPUs")


def _tracing() -> Iterator[str]:
    imports = import_times_s()
    yield (
        f"`import planner`: median {statistics.median(imports):.3f} s, worst {max(imports):.3f} s "
        "of 9 fresh processes.\n"
    )
    yield "## Tracing, one sample a microbatch\n"
    yield table(TRACE_COLUMNS, trace_rows())


def _plans(time_limit_s: float) -> Iterator[str]:
    yield f"## GPT-2 small on the sample clusters, {time_limit_s:g} s\n"
    yield table(PLAN_COLUMNS, plan_rows(time_limit_s))


def _large() -> Iterator[str]:
    yield "## Llama 2 70B on 64 and 1,024 GPUs\n"
    yield (
        "`pipeplan trace`, `plan` and `verify` on nodes of eight A100-80GB with InfiniBand-HDR, "
        "one after the other, each in a process of its own: seconds of wall time and the most "
        "memory that it held; the seconds that cores were at work are of all three. One sample a "
        "microbatch, float16, AdamW, one stage a device; stages on single devices, or on groups "
        "of any size in which values are shared by positions "
        f'(`tensor_parallel = "any"`). The search is told to end after {LARGE_LIMIT_S:g} s.\n'
    )
    yield table(LARGE_COLUMNS, [row.cells for row in large_rows(LARGE_LIMIT_S)])


def main() -> None:
    """Print the report, and write it if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=__doc__)
    parser.add_argument("--rows", help="sections to run: " + ", ".join(SECTIONS))
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true", help="with --short: print JSON lines")
    add_short_options(parser)
    options = parser.parse_args()
    if options.json and not options.short:
        parser.error("--json goes with --short")
    if is_short(parser, options):
        tell(entries(options.time_limit), options.claims, as_json=options.json)
        return
    parts = {"trace": _tracing, "plans": partial(_plans, options.time_limit), "large": _large}
    try:
        names = chosen_sections(options.rows, SECTIONS)
        lines = [line for name in names for line in parts[name]()]
    except PipeplanError as error:
        parser.error("; ".join(error.problems))
    text = "\n".join([heading("From a model to a plan", "python -m benchmarks.end_to_end"), *lines])
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
