"""One rank of some cases, one after the other: ``worker BATCH``.

BATCH is a JSON file (:class:`Batch`) with cases of as many ranks each as there are processes. The
first rank adds a line to the journal as each case begins and another one as it ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, all_cases
from benchmarks.gpu.probes import PROBES
from executor.distributed.process_group import device_of_this_process
from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from executor.training.training import run_training
from planner.plan.plan import Plan


@dataclass(frozen=True)
class Batch:
    """What one start of processes does.

    Attributes:
        keys: of the cases, in order.
        plans: the file of each case's plan; None of a probe without one.
        journal: to add lines to.
        kind: of the device.
        short: whether these are the cases of the short form.
        gpus: how many there are.
    """

    keys: list[str]
    plans: list[str | None]
    journal: str
    kind: str
    short: bool
    gpus: int


def main(batch: Batch) -> None:
    """Run the cases."""
    cases = {case.key: case for case in all_cases(batch.short, batch.gpus)}
    journal = Path(batch.journal)
    for key, path in zip(batch.keys, batch.plans, strict=True):
        case, plan = cases[key], None if path is None else Plan.load(path)
        _note(journal, {"begin": key})
        begin_s = time.monotonic()
        kind = "cpu" if case.on_cpu else batch.kind
        if case.probe is not None:
            found = PROBES[case.probe](plan, device_of_this_process(kind))
        else:
            assert plan is not None
            found = _trained(case, plan, kind)
        _note(journal, {"end": key, "took_s": time.monotonic() - begin_s, **found})


def _trained(case: Case, plan: Plan, kind: str) -> dict[str, Any]:
    """Train by the plan and return the losses, times and memory."""
    settings = {"steps": case.steps, "data": "random", **case.settings}
    config = TrainingConfig.parse(settings, case.key)
    run = RunSettings(plan.model.factory, device=kind, timeout_s=case.limit_s, **case.options)
    history = run_training(plan, config, run)
    devices = plan.predicted.devices.values()
    return {
        "losses": [row.loss for row in history],
        "step_s": [row.step_time_s for row in history],
        "predicted_s": plan.predicted.iteration_time_s,
        "peak_bytes": max((row.peak_memory_bytes for row in history), default=None),
        "predicted_bytes": max(row.peak_memory_bytes for row in devices),
    }


def _note(journal: Path, row: dict[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0":
        add_line(journal, row)


def add_line(journal: Path, row: dict[str, Any]) -> None:
    """Add a line; it is on the disk when this returns."""
    with journal.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main(Batch(**json.loads(Path(sys.argv[1]).read_text())))
