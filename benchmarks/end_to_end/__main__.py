"""Tracing times, import times, and the gaps of plans for the sample clusters.

Usage:
    python -m benchmarks.end_to_end [--time-limit S] [--output FILE]
    python -m benchmarks.end_to_end --short [--json] [--claims FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.end_to_end import run as full
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
from benchmarks.reporting.report import heading, table

MODELS = ("models.gpt:gpt2_small", "models.llama:llama2_7b", "models.resnet:resnet50")
CLUSTERS = ("single_node", "irregular")
OURS = "ourselves"


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


def main() -> None:
    """Print the report, and write it if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=__doc__)
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
    imports = import_times_s()
    parts = [
        heading("From a model to a plan", "python -m benchmarks.end_to_end"),
        f"`import planner`: median {statistics.median(imports):.3f} s, worst {max(imports):.3f} s "
        "of 9 fresh processes.\n",
        "## Tracing, one sample a microbatch\n",
        table(TRACE_COLUMNS, trace_rows()),
        f"## GPT-2 small on the sample clusters, {options.time_limit:g} s\n",
        table(PLAN_COLUMNS, plan_rows(options.time_limit)),
    ]
    text = "\n".join(parts)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
