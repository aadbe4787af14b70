"""How often does ``solve`` find the best plan of a tiny problem, and are its bounds right?

Usage: python -m benchmarks.exhaustive [--problems N] [--seed S] [--time-limit S] [--output FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.exhaustive.instances import tiny_problems
from benchmarks.exhaustive.oracle import Faster, faster_plan, optimum_below
from benchmarks.reporting.report import heading, table
from planner import Problem, solve

FOUND = 1e-4
"""A plan within this of the optimum counts as the best one: rounding to ticks costs as much."""
FOUND_SHARE = 0.95
"""The bar: share of all problems whose optimum is found."""


@dataclass(frozen=True)
class TinyRow:
    """What ``solve`` says of a problem, beside the optimum.

    Attributes:
        kind: of the space.
        described: the problem in words.
        above: iteration time / optimum - 1; the optimum is of a relaxation.
        faster: iteration time / fastest replay - 1.
        is_certain: whether every schedule that may be faster was replayed.
        bound: lower bound / optimum.
        says_proved: whether the plan is called optimal.
    """

    kind: str
    described: str
    above: float
    faster: float
    is_certain: bool
    bound: float
    says_proved: bool

    @property
    def is_found(self) -> bool:
        """Whether the plan is known to be the best one."""
        return self.is_certain and self.faster <= FOUND

    @property
    def is_open(self) -> bool:
        """Whether there may be a better plan, and none was found."""
        return not self.is_certain and self.faster <= FOUND

    @property
    def is_bound_above(self) -> bool:
        """Whether the bound is wrong."""
        return self.bound > 1 + 1e-6

    @property
    def is_proved_wrongly(self) -> bool:
        """Whether the plan is called optimal and is not."""
        return self.says_proved and self.above > 2 * FOUND


def main() -> None:
    """Compare every problem and print the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exhaustive", description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=0.5, help="deterministic seconds each")
    parser.add_argument("--output", type=Path, help="write the report to this file")
    options = parser.parse_args()
    report = _report(options, list(_rows(options)))
    print(report)
    if options.output is not None:
        options.output.write_text(report + "\n")


def _rows(options: argparse.Namespace) -> Iterator[TinyRow]:
    for number, problem in enumerate(tiny_problems(options.problems, options.seed)):
        result = solve(problem, time_limit_s=options.time_limit, deterministic=True)
        known_s = result.iteration_time_s
        optimum = optimum_below(problem, known_s)
        is_near = known_s <= (1 + FOUND) * optimum.time_s
        faster = Faster(None, is_certain=True) if is_near else faster_plan(problem, known_s)
        row = TinyRow(
            kind=_kind(problem),
            described=f"number {number}, {_described(problem)}",
            above=known_s / optimum.time_s - 1,
            faster=known_s / (faster.time_s or known_s) - 1,
            is_certain=faster.is_certain,
            bound=result.lower_bound_s / optimum.time_s,
            says_proved=result.status == "optimal",
        )
        print(
            f"{row.described}: {optimum.partitions} partitions, {row.above:.3%} above, replayed "
            f"{row.faster:.3%}{'' if row.is_certain else ' or more'}, gap {result.gap:.2%}",
            flush=True,
        )
        yield row


def _kind(problem: Problem) -> str:
    job = problem.job
    stages = "two stages a device" if job.max_stages_per_device > 1 else "one stage a device"
    return f"{stages}, {'with' if job.replication else 'without'} replicas"


def _described(problem: Problem) -> str:
    job = problem.job
    return (
        f"{len(problem.graph.layers)} layers, {len(problem.cluster.devices)} devices, "
        f"{job.microbatches} microbatches, {job.space}"
    )


def _report(options: argparse.Namespace, rows: Sequence[TinyRow]) -> str:
    command = (
        f"python -m benchmarks.exhaustive --problems {options.problems} --seed {options.seed} "
        f"--time-limit {options.time_limit:g}"
    )
    parts = [
        heading("Tiny problems, every plan tried", command),
        "Random problems of up to 6 layers, 3 devices and 4 microbatches. `solve` has "
        f"{options.time_limit:g} deterministic seconds and one thread; the optimum is the best of "
        "all partitions, each scheduled by a model of its own. That model takes links for as fast "
        "as alone; where it is below a plan, the schedules that may be faster are replayed.\n",
        _verdicts(rows),
        _by_kind(rows),
        *_missed(rows),
    ]
    return "\n".join(parts)


def _verdicts(rows: Sequence[TinyRow]) -> str:
    columns = ["what", f"of {len(rows)} problems", "bar"]
    return table(
        columns,
        [
            ["bound above the optimum", sum(row.is_bound_above for row in rows), "0"],
            ["proved optimal", sum(row.says_proved for row in rows), "-"],
            ["proved and not the optimum", sum(row.is_proved_wrongly for row in rows), "0"],
            [
                "optimum found",
                sum(row.is_found for row in rows),
                f"at least {FOUND_SHARE * len(rows):g}",
            ],
            ["a replay is faster", sum(row.faster > FOUND for row in rows), "-"],
            ["too many to replay", sum(row.is_open for row in rows), "-"],
            ["worst plan above a replay", f"{max(row.faster for row in rows):.2%}", "-"],
        ],
    )


def _by_kind(rows: Sequence[TinyRow]) -> str:
    """Return how near plans and bounds are, by kind of space."""
    lines: list[list[object]] = []
    for kind in sorted({row.kind for row in rows}):
        of_kind = [row for row in rows if row.kind == kind]
        bounds = [row.bound for row in of_kind]
        lines.append(
            [
                kind,
                len(of_kind),
                sum(row.is_found for row in of_kind),
                sum(row.says_proved for row in of_kind),
                f"{median(bounds):.3f}",
                f"{min(bounds):.3f}",
            ]
        )
    columns = ["space", "problems", "found", "proved", "bound / optimum, median", "least"]
    return table(columns, lines)


def _missed(rows: Sequence[TinyRow]) -> Iterator[str]:
    """Yield the problems whose best plan was not found, as a list."""
    missed = sorted((row for row in rows if not row.is_found), key=lambda row: -row.above)
    if missed:
        yield "Not found, or not known to be:\n"
        yield "".join(
            f"- {row.faster:.2%} above a replay, at most {row.above:.2%} above the best: "
            f"{row.described}\n"
            for row in missed
        )


if __name__ == "__main__":
    main()
