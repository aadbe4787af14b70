"""How near the best are orders of microbatches, and how much faster than published ones?

Sections: ``zero_bubble`` has the public instances of --data; ``uneven``, ``loose``, ``chunks`` and
``many`` have uneven stages with communication; ``classics`` compares with published schedules at
equal memory. Times are in microseconds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from itertools import product

from benchmarks.harness import Claim, Result, Section, counted, run
from benchmarks.schedule.instances import chunks, uneven, zero_bubble, zero_bubble_rows
from benchmarks.schedule.solving import Solved, solve

HEURISTIC = "Zero Bubble (ICLR 2024): the authors' search"
PUBLISHED = "GPipe, 1F1B, eager 1F1B, PE, ZB-H1, ZB-H2, ZB-1p/2p: the fastest that fits"
KINDS = (True, False)
"""Whether backwards are whole; otherwise input and weight gradients run apart."""


def zero_bubble_section(options: argparse.Namespace) -> Result:
    """Zero-bubble instances beside the authors' heuristic."""
    claims = ["not slower than the authors' heuristic", "gap under 1 %"]
    if options.data is None:
        return Result([], [Claim(f"public instances: {text}", None, HEURISTIC) for text in claims])
    found = []
    for row in zero_bubble_rows(options.data / "zero_bubble_instances.json")[:: _step(options)]:
        for cap in (1, 2):
            reference = row[f"zero_bubble_heuristic_cap_{cap}p"]["makespan"]
            solved = solve(zero_bubble(row, cap), False, options.time_limit)
            found.append((solved, reference))
    rows = [{**s.row, "heuristic": r, "ours / heuristic": s.best_us / r} for s, r in found]
    # The file's figures are rounded to microseconds.
    fine = [solved.best_us <= reference + 1 for solved, reference in found]
    near = sum(solved.gap < 0.01 for solved, _ in found)
    return Result(
        rows,
        [
            counted(f"public instances: {claims[0]}", fine, HEURISTIC),
            Claim(
                f"public instances: {claims[1]} on at least half",
                near,
                at_least=len(found) / 2,
                unit=f"of {len(found)}",
            ),
        ],
    )


def uneven_section(options: argparse.Namespace) -> Result:
    """One stage a device: 16 stages, 64 microbatches."""
    kinds = list(product((1, 2), ("1f1b", "uniform", "double"), KINDS))
    found = [
        solve(uneven(16, 64, caps, seed, whole=whole), whole, options.time_limit)
        for seed, caps, whole in (kinds[6:8] if options.short else kinds)
    ]
    return _within(found, "one stage a device, 16 x 64: worst gap", 4.0)


def loose_section(options: argparse.Namespace) -> Result:
    """The same with memory for all microbatches."""
    kinds = list(product((1, 2), KINDS))
    found = [
        solve(uneven(16, 64, "loose", seed, whole=whole), whole, options.time_limit)
        for seed, whole in (kinds[1:] if options.short else kinds)
    ]
    proved = (solved.gap <= 1e-6 for solved in found)
    claim = counted("one stage a device, memory for all microbatches: proved optimal", proved)
    return Result([solved.row for solved in found], [claim])


def chunks_section(options: argparse.Namespace) -> Result:
    """Two stages a device, 8 devices."""
    kinds = (("interleaved", True, None), ("interleaved", False, None))
    kinds += (("v", True, None), ("v", True, True), ("v", False, None))
    found = [
        solve(chunks(8, count, kind, 1, whole=whole, tapered=tapered), whole, options.time_limit)
        for count in (16, 32)
        for kind, whole, tapered in kinds
    ][: 1 if options.short else None]
    return _within(found, "two stages a device, 8 devices: worst gap", 7.0)


def many_section(options: argparse.Namespace) -> Result:
    """Many microbatches, one stage a device."""
    kinds = list(product((8, 16, 32), (256, 1024), ("1f1b", "double"), KINDS))
    found = [
        solve(uneven(stages, count, caps, 1, whole=whole), whole, options.time_limit / 2)
        for stages, count, caps, whole in (kinds[8:10] if options.short else kinds)
    ]
    return _within(found, "256 and 1,024 microbatches: worst gap", 1.0)


def classics_section(options: argparse.Namespace) -> Result:
    """The best published schedule over ours at equal memory: 8 stages, 32 microbatches."""
    kinds = list(product((0.3, 1.0, 2.0), (1, 2), ("1f1b", "uniform", "double"), KINDS))
    found = [
        solve(uneven(8, 32, caps, seed, whole=whole, send_ms=ms), whole, options.time_limit / 4)
        for ms, seed, caps, whole in (kinds[24:28] if options.short else kinds)
    ]
    ratios = [s.classic_us / s.best_us for s in found if math.isfinite(s.classic_us)]
    text = f"best published schedule over ours, geometric mean of {len(ratios)}"
    fine = [solved.best_us <= solved.classic_us * (1 + 1e-9) for solved in found]
    mean = statistics.geometric_mean(ratios)
    return Result(
        [solved.row for solved in found],
        [
            Claim(text, mean, PUBLISHED, at_least=1.08),
            counted("schedules not slower than the best published one", fine, PUBLISHED),
        ],
    )


def _within(found: Sequence[Solved], text: str, bar: float) -> Result:
    worst = 100 * max(solved.gap for solved in found)
    return Result([s.row for s in found], [Claim(text, worst, at_most=bar, unit="%")])


def _step(options: argparse.Namespace) -> int:
    return 2 if options.short else 1


SECTIONS: dict[str, Section] = {
    "zero_bubble": zero_bubble_section,
    "uneven": uneven_section,
    "loose": loose_section,
    "chunks": chunks_section,
    "many": many_section,
    "classics": classics_section,
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--time-limit", type=float, default=57.0, metavar="S", help="of most searches, in seconds"
    )


if __name__ == "__main__":
    sys.exit(run("benchmarks.schedule", __doc__, SECTIONS, _options))
