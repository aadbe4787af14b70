"""Stage partition and device mapping: random clusters and single files.

Usage:
    python -m benchmarks.partition [--rows NAMES] [--output FILE]
    python -m benchmarks.partition --instance FILE [--cluster FILE] [--time-limit S] --json
    python -m benchmarks.partition --short [--json] [--claims FILE]

Without --instance it runs the whole table and writes Markdown. With --instance it
solves one layer graph or importable profile and prints one JSON line. With --short it checks the
same bars on a few instances and prints claims.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import SAMPLE_CLUSTERS
from benchmarks.partition import rows as partition_rows
from benchmarks.partition import short
from benchmarks.partition.best import best_partition
from benchmarks.reporting.claims import add_short_options, is_short, tell
from benchmarks.reporting.report import (
    add_options,
    chosen_sections,
    heading,
    table,
    write_table,
)
from planner import Cluster, Job, LayerGraph, PipeplanError, Problem
from planner.errors import InfeasibleError
from planner.interop.importing.formats import import_file
from planner.interop.importing.imported import ImportOptions
from planner.search.feasibility import explain_infeasible
from planner.search.partition.chain import Chain
from planner.search.solve import check_settings

DEFAULT_CLUSTER = SAMPLE_CLUSTERS / "dapple_testbed.toml"
MICROBATCHES = 32
"""Microbatches of an instance that does not give any job."""


def solve_instance(arguments: argparse.Namespace) -> dict[str, Any]:
    """Solve one file; the objective is the bound on an iteration of the partition."""
    check_settings(arguments.time_limit, 0.0, arguments.seed, arguments.workers)
    path = Path(arguments.instance)
    begin = time.perf_counter()
    problem = _problem(path, arguments)
    try:
        found = best_partition(
            problem,
            time_limit_s=arguments.time_limit,
            workers=arguments.workers,
            seed=arguments.seed,
        )
    except InfeasibleError as error:
        raise explain_infeasible(Chain(problem), is_proved=False) from error
    return {
        "instance": path.name,
        "objective": found.objective_s,
        "lower_bound": found.lower_bound_s,
        "status": found.status,
        "seconds": round(time.perf_counter() - begin, 2),
        "peak_memory_gib": round(peak_memory_gib(), 3),
    }


def _problem(path: Path, arguments: argparse.Namespace) -> Problem:
    cluster = Cluster.load(arguments.cluster or DEFAULT_CLUSTER)
    if path.suffix == ".json":
        graph = LayerGraph.load(path)
        record = graph.record
        job = Job(
            microbatches=MICROBATCHES,
            samples_per_microbatch=record.samples_per_microbatch,
            precision=record.precision,
        )
    else:
        _, imported = import_file(path, options=ImportOptions())
        graph = imported.graph
        job = imported.job.model_copy(update={"microbatches": MICROBATCHES})
    return Problem(graph, cluster, job)


def peak_memory_gib() -> float:
    """Return this process's peak memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_table(arguments: argparse.Namespace) -> str:
    """All rows asked for, as Markdown."""
    names = chosen_sections(arguments.rows, partition_rows.SECTIONS)
    parts = [heading("Stage partition and device mapping", "python -m benchmarks.partition")]
    for name in names:
        section = partition_rows.SECTIONS[name]
        parts.append(f"## {section.title}\n\n{section.note}\n")
        parts.append(table(section.columns, section.run(arguments.workers)))
        print(parts[-2], parts[-1], sep="\n", file=sys.stderr, flush=True)
    return "\n".join(parts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.partition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--instance", help="solve one file and print a line")
    found.add_argument("--cluster", help="cluster file for profiles (default: DAPPLE's testbed)")
    found.add_argument("--json", action="store_true", help="print one JSON line")
    add_options(found, partition_rows.SECTIONS)
    add_short_options(found)
    return found


def main() -> int:
    """Run what the command line asks for."""
    arguments = parser().parse_args()
    if arguments.json and not (arguments.instance or arguments.short):
        parser().error("--json goes with --instance FILE or --short")
    try:
        if is_short(parser(), arguments):
            found = short.entries(arguments.workers)
            tell(found, arguments.claims, as_json=arguments.json)
            return 0
        if arguments.instance:
            solved = solve_instance(arguments)
            cells = table(list(solved), [list(solved.values())])
            print(json.dumps(solved) if arguments.json else cells)
            return 0
        text = run_table(arguments)
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    write_table(text, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
