"""Random trainings on real processes, compared with a single process in plain torch."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import ROOT
from benchmarks.executor.parity_worker import plan_files
from benchmarks.executor.plans import PRECISIONS, RANKS, random_training
from benchmarks.executor.single_process import TOLERANCE
from benchmarks.harness import Result, Row, counted
from planner.plan.plan import Plan

WORKER = "benchmarks.executor.parity_worker"
TRAININGS, SHORT_TRAININGS = 60, 6
ERRORS = ("loss", "tensor", "whole", "buffer", "update", "own")
"""See :class:`benchmarks.executor.single_process.Errors`."""
WITHIN = ("loss", "buffer", "update")
"""These must be within the tolerance; of gradients ``excess`` says it."""


def section(options: argparse.Namespace) -> Result:
    """Random trainings against a single process."""
    count = options.trainings or (SHORT_TRAININGS if options.short else TRAININGS)
    rows = trained(count, options.seed)
    claims = [
        counted(
            f"random trainings that agree with one process to {TOLERANCE[precision]:g}",
            (not row["problems"] for row in rows if row["precision"] == precision),
            "one process, plain torch",
        )
        for precision in PRECISIONS
    ]
    return Result(rows, claims)


def trained(count: int, seed: int) -> list[Row]:
    """Draw trainings and run each in every precision; equal arguments draw equal trainings.

    Args:
        count: of the trainings.
        seed: of all that is drawn.
    """
    generators = [random.Random(f"{seed}/{number}") for number in range(count)]
    ranks = [rng.choice(RANKS) for rng in generators]
    states = [rng.getstate() for rng in generators]
    rows = []
    for together in sorted(set(ranks), reverse=True):
        trainings = {}
        for number in (n for n in range(count) if ranks[n] == together):
            for precision in PRECISIONS:
                generators[number].setstate(states[number])
                plans = random_training(generators[number], together, precision)
                trainings[f"{number:06d}.{precision}"] = plans
        with TemporaryDirectory() as folder:
            rows += _run(trainings, together, Path(folder))
    return sorted(rows, key=lambda row: (row["training"], row["precision"]))


def _run(trainings: Mapping[str, Sequence[Plan]], ranks: int, folder: Path) -> list[Row]:
    """Run trainings of one number of ranks in one launch."""
    for name, plans in trainings.items():
        for plan, file in zip(plans, plan_files(folder, name), strict=False):
            file.parent.mkdir(parents=True, exist_ok=True)
            plan.save(file)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), "-m", WORKER, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    paths = {name: folder / "report" / f"{name}.json" for name in trainings}
    failed = {"problems": [f"did not run: {done.stderr[-500:]}"]}
    reports = {n: json.loads(p.read_text()) if p.exists() else failed for n, p in paths.items()}
    return [_row(name, ranks, report) for name, report in reports.items()]


def _row(name: str, ranks: int, report: Mapping[str, Any]) -> Row:
    """Return the row of a training: its relative errors, and what is beyond the bar."""
    number, _, precision = name.partition(".")
    bar, errors = TOLERANCE[precision], {name: report.get(name) for name in ERRORS}
    problems = list(report["problems"])
    problems += [name for name in WITHIN if errors[name] is not None and not errors[name] <= bar]
    if not report.get("excess", 0.0) <= 1:
        problems.append(f"gradients: {report['excess']:.2g} times what is allowed")
    head = {"training": int(number), "precision": precision, "ranks": ranks}
    return {**head, **errors, "problems": "; ".join(problems)}
