"""One rank of a plan that is trained on the testbed: results and times of several trainings.

``python -m benchmarks.executor.freedoms_worker PLAN REPORT`` on every rank; the first writes the
report. Each operation computes, then waits until its predicted time is over.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from benchmarks.executor.parity_worker import TIMEOUT, Iteration, gathered, trained
from benchmarks.executor.single_process import compare, error_of_training
from executor.emulation.pace import Pace
from executor.runtime.runtime import StepRecord
from planner.plan.plan import Plan
from planner.plan.programs import Reduce

TRAININGS, STEPS = 3, 8
WARM_UP = 2
"""Iterations of each training that do not count: the first finds out when gradients are there."""


def main(path: Path, report: Path) -> None:
    """Train by the plan several times, and compare every training with a single process."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    plan = Plan.load(path)
    runs = [trained(plan, STEPS, Pace()) for _ in range(TRAININGS)]
    held = [[gathered(iteration.held) for iteration in run] for run in runs]
    overlapped = gathered([sorted(_overlapped(run[WARM_UP:])) for run in runs])
    if dist.get_rank() == 0:
        told = {
            "errors": [asdict(compare(plan, iterations)) for iterations in held],
            "trainings": [error_of_training(plan, iterations) for iterations in held],
            "times_s": [[one.step_time_s for one in run[WARM_UP:]] for run in runs],
            "overlapped": overlapped,
        }
        report.write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _overlapped(iterations: Sequence[Iteration]) -> set[int]:
    """Return the stages whose reduction set off before their last backward here, every time."""
    return set.intersection(*(set(_ahead(one.record)) for one in iterations))


def _ahead(record: StepRecord) -> Iterator[int]:
    for span in record.reductions:
        assert isinstance(span.what, Reduce)
        backwards = [
            other.end_s
            for other in record.operations
            if other.what.stage in span.what.stages and other.what.kind in "BW"
        ]
        if len(span.what.stages) == 1 and backwards and span.start_s < max(backwards):
            yield span.what.stages[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
