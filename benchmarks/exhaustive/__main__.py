"""How often does ``solve`` find the best plan of a tiny problem, and are its bounds right?

Usage: python -m benchmarks.exhaustive [--problems N] [--seed S] [--time-limit S] [--output FILE]
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from benchmarks.exhaustive.instances import tiny_problems
from benchmarks.exhaustive.oracle import optimum_below
from benchmarks.reporting.report import heading, table
from planner import Problem, Result, solve

FOUND = 1e-4
"""A plan within this of the optimum counts as the best one: rounding to ticks costs as much."""


def main() -> None:
    """Compare every problem and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exhaustive", description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=10.0, help="deterministic seconds each")
    parser.add_argument("--output", type=Path, help="write the report to this file")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    worst = 0.0
    for number, problem in enumerate(tiny_problems(options.problems, options.seed)):
        result = solve(problem, time_limit_s=options.time_limit, deterministic=True)
        optimum = optimum_below(problem, result.iteration_time_s)
        counts.update(_verdicts(result, optimum.time_s))
        over = result.iteration_time_s / optimum.time_s - 1
        worst = max(worst, over)
        print(
            f"{number:4d}  {_described(problem)}: {optimum.partitions} partitions, "
            f"{over:.3%} above, gap {result.gap:.2%}",
            flush=True,
        )
    report = _report(options, counts, worst)
    print(report)
    if options.output is not None:
        options.output.write_text(report + "\n")


def _verdicts(result: Result, optimum_s: float) -> list[str]:
    rows = ["problems"]
    if result.iteration_time_s <= optimum_s * (1 + FOUND):
        rows.append("found")
    if result.lower_bound_s > optimum_s * (1 + 1e-6):
        rows.append("bound above")
    if result.status == "optimal":
        rows.append("proved")
        if result.iteration_time_s > optimum_s * (1 + 2 * FOUND):
            rows.append("proved wrongly")
    return rows


def _described(problem: Problem) -> str:
    job = problem.job
    return (
        f"{len(problem.graph.layers)} layers, {len(problem.cluster.devices)} devices, "
        f"{job.microbatches} microbatches, {job.space}"
    )


def _report(options: argparse.Namespace, counts: Counter[str], worst: float) -> str:
    problems = options.problems
    command = f"python -m benchmarks.exhaustive --problems {problems} --seed {options.seed}"
    rows = [
        ["bound above the optimum", counts["bound above"], "0"],
        ["proved optimal", counts["proved"], "-"],
        ["proved and not the optimum", counts["proved wrongly"], "0"],
        ["optimum found", counts["found"], f"at least {0.95 * problems:g}"],
        ["worst plan above the optimum", f"{worst:.2%}", "-"],
    ]
    columns = ["what", f"of {problems} problems", "bar"]
    return f"{heading('Tiny problems, every plan tried', command)}\n{table(columns, rows)}"


if __name__ == "__main__":
    main()
