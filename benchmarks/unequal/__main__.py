"""Predicted times of microbatches of several lengths, beside padding all to the longest.

Usage:
    python -m benchmarks.unequal [--time-limit S] [--output FILE]
    python -m benchmarks.unequal --short [--time-limit S] [--claims FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import SAMPLE_CLUSTERS
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_short_options,
    details,
    is_short,
    tell,
)
from benchmarks.reporting.report import heading, table, write_table
from models import ZOO
from planner import Cluster, Job, LayerGraph, Problem, solve, trace, verify
from planner.assembly import plan_by_hand
from planner.costs.placement import place, specs_of
from planner.plan.plan import Plan
from planner.units import format_seconds

MODEL = "gpt2_small"
TOKENS = (128, 256, 512, 1024)
HISTOGRAMS = {
    "mostly short": (0.4, 0.3, 0.2, 0.1),
    "even": (0.25, 0.25, 0.25, 0.25),
    "mostly long": (0.1, 0.1, 0.2, 0.6),
}
CLUSTERS = ("single_node", "two_nodes")
SHORT_CASES = 1
LIMIT_S = 20.0
COLUMNS = (
    "cluster",
    "lengths",
    "padded to the longest",
    "the same plan, unpadded: expected, 95th",
    "planned for the lengths: expected, 95th",
    "order",
    "padded over planned",
)
NOTES = (
    f"GPT-2 small, 4 samples a microbatch, 16 microbatches of {', '.join(map(str, TOKENS))} "
    "tokens: mostly short {short}, even, mostly long {long}. Times are predicted, of the job's "
    "first 100 iterations, and `verify` replayed each. Padding takes the time that the longest "
    "takes in every iteration, in the plan that a search for it finds; its stages and orders also "
    "run the microbatches as they are, in the order drawn. Every search has {limit:g} s.\n"
)


@dataclass(frozen=True)
class Row:
    """One cluster and histogram; all times in seconds.

    Attributes:
        cluster: its name.
        lengths: name of the histogram.
        padded_s: of an iteration of microbatches as long as the longest.
        unpadded: the plan for those, run with microbatches as they are.
        planned: the plan for these.
    """

    cluster: str
    lengths: str
    padded_s: float
    unpadded: Plan
    planned: Plan

    @property
    def gain(self) -> float:
        """Padded time over the expected one of the plan for the lengths."""
        return self.padded_s / times_s(self.planned)[0]

    def cells(self) -> list[str]:
        """The row of a table."""
        unpadded, planned = (
            ", ".join(map(format_seconds, times_s(plan))) for plan in (self.unpadded, self.planned)
        )
        lengths = self.planned.job.lengths
        assert lengths is not None
        order = lengths.order.replace("_", " ")
        padded = format_seconds(self.padded_s)
        return [self.cluster, self.lengths, padded, unpadded, planned, order, f"{self.gain:.2f}"]


def times_s(plan: Plan) -> tuple[float, float]:
    """Return the expected time of a plan's iterations and the 95th percentile."""
    found = plan.predicted.lengths
    assert found is not None
    return found.expected_s, found.percentile_95_s


def job_of(shares: tuple[float, ...] = (), order: str = "any") -> Job:
    """Return the job with microbatches of some lengths, or all of the longest."""
    lengths = {"lengths": {"tokens": TOKENS, "shares": shares, "order": order}} if shares else {}
    fields = {"samples_per_microbatch": 4, "microbatches": 16, **lengths}
    return Job.model_validate(fields)


@cache
def traced(shares: tuple[float, ...] = ()) -> LayerGraph:
    """Return the layer graph of the model for such microbatches."""
    return trace(ZOO[MODEL], job_of(shares))


def rows_of(limit_s: float) -> Iterator[Row]:
    """Yield the rows, each once it is known."""
    for cluster_name in CLUSTERS:
        cluster = Cluster.load(SAMPLE_CLUSTERS / f"{cluster_name}.toml")
        padded = solve(Problem(traced(), cluster, job_of()), time_limit_s=limit_s).plan
        for name, shares in HISTOGRAMS.items():
            drawn = Problem(traced(shares), cluster, job_of(shares, "drawn"))
            placed = place(drawn, specs_of(padded.stages), padded.sync)
            unpadded = plan_by_hand(placed, padded.parsed_orders())
            problem = Problem(traced(shares), cluster, job_of(shares))
            planned = solve(problem, time_limit_s=limit_s, warm_starts=[padded]).plan
            assert not verify(unpadded)
            yield Row(cluster_name, name, padded.predicted.iteration_time_s, unpadded, planned)


def entries(limit_s: float) -> Iterator[Entry]:
    """Claims and the table of the first rows."""
    rows = [row for row, _ in zip(rows_of(limit_s), range(SHORT_CASES), strict=False)]
    regime = f"GPT-2 small, {limit_s:g} s a search"
    for row in rows:
        yield Claim(
            claim="iteration padded to the longest, over the expected one of unequal microbatches",
            source="ourselves",
            figure=row.gain,
            regime=f"{row.cluster}, {row.lengths}, {regime}",
        )
    yield details("Unequal microbatches", COLUMNS, [row.cells() for row in rows])
    yield LeftOut(text=f"all but {SHORT_CASES} of {len(CLUSTERS) * len(HISTOGRAMS)} rows")


def main() -> None:
    """Plan, print the report, and write it if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unequal", description=__doc__)
    add_short_options(parser)
    parser.add_argument("--time-limit", type=float, default=LIMIT_S, metavar="S")
    parser.add_argument("--output", type=Path, help="write the report to this file")
    options = parser.parse_args()
    if is_short(parser, options):
        tell(entries(options.time_limit), options.claims)
        return
    rows = []
    for row in rows_of(options.time_limit):
        print(*row.cells(), sep="  ", file=sys.stderr, flush=True)
        rows.append(row.cells())
    words = "" if options.time_limit == LIMIT_S else f" --time-limit {options.time_limit:g}"
    shares = {key: HISTOGRAMS[f"mostly {key}"] for key in ("short", "long")}
    told = {key: ", ".join(f"{share:.0%}" for share in row) for key, row in shares.items()}
    parts = [
        heading("Unequal microbatches", f"python -m benchmarks.unequal{words}"),
        NOTES.format(limit=options.time_limit, **told),
        table(COLUMNS, rows),
    ]
    write_table("\n".join(parts), options.output)


if __name__ == "__main__":
    sys.exit(main())
