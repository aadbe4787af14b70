"""One rank of many trainings, one after the other: ``torchrun -m benchmarks.sync.worker FOLDER``.

The folder holds ``jobs.json``, a list of :class:`benchmarks.sync.real.Training` as dictionaries,
and their plans. Each rank writes ``NAME.RANK.json`` with the ends of its steps; the first one adds
the held-out losses of the pipelines' mean model while they trained, and of the model that the
training led to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.sync.model import held_out_loss
from benchmarks.sync.weights import Watched, mean_losses
from executor.checkpoint.read import Checkpoint
from executor.emulation.pace import Pace
from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from executor.training.loop import StepMetrics
from executor.training.training import run_training
from planner.plan.plan import Plan
from planner.tracing.factory import import_factory

_LAST_ONLY = 2**62
"""No step has this number: only the end of the training is saved."""


def main(folder: Path) -> None:
    """Run all of them."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for job in json.loads((folder / "jobs.json").read_text()):
        if rank == 0:
            told = {name: value for name, value in job.items() if value}
            print(f"[{time.strftime('%H:%M:%S')}] {told}", file=sys.stderr, flush=True)
        found = _train(folder, job, rank)
        (folder / f"{job['name']}.{rank}.json").write_text(json.dumps(found))


def _train(folder: Path, job: dict[str, Any], rank: int) -> dict[str, Any]:
    plan = Plan.load(folder / f"{job['plan']}.json")
    data: dict[str, Any] = {
        "steps": job["steps"],
        "seed": job["seed"],
        "data": "benchmarks.sync.model:taught",
        "data_arguments": {"seed": job["seed"]},
        "learning_rate": job["learning_rate"],
        "checkpoint": {"folder": str(folder / f"{job['name']}.saved"), "every": _LAST_ONLY},
    }
    config = TrainingConfig.parse(data, job["name"])
    watched = Watched(job["momentum"])
    slow = {int(name): factor for name, factor in job["slow"].items()}
    run = RunSettings(
        model=plan.model.factory,
        sync=job["sync"],
        pace=Pace(slow, job["sleep_probability"], job["sleep_s"], job["seed"]),
        optimizer=watched.optimizer,
        sync_trace=str(folder / f"{job['name']}.trace") if job["sync_trace"] else None,
    )
    rows: list[tuple[float, float]] = []

    def report(metrics: StepMetrics) -> None:
        end_s = time.time()
        rows.append((end_s, metrics.step_time_s))
        watched.look(end_s)

    run_training(plan, config, run, report)
    watched.save(folder, job["name"], rank)
    found: dict[str, Any] = {"rows": rows}
    if rank == 0:
        assert plan.model.factory is not None
        model = import_factory(plan.model.factory)(**plan.model.arguments)
        pipelines = 1 if job["in_step"] else len(plan.ranks) // len(plan.stages)
        size = len(plan.ranks), len(plan.stages)
        found["looks"] = mean_losses(folder, job["name"], model, size, pipelines)
        found["held_out_loss"] = _loss_of(model, folder / f"{job['name']}.saved")
    return found


def _loss_of(model: nn.Module, folder: Path) -> float:
    checkpoint = Checkpoint.open(folder)
    targets = {f"parameters/{name}": p.data for name, p in model.named_parameters()}
    checkpoint.read_into(targets)
    return held_out_loss(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
