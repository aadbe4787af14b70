"""One rank of the parity runs: runs every plan of a folder and compares with a single process.

``torchrun --nproc-per-node N -m benchmarks.executor.parity_worker FOLDER`` reads ``FOLDER/*.json``
and writes ``FOLDER/report/NAME.json`` for each plan that has none yet.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.executor.single_process import SEED, STEPS, Held, batch_source, compare
from executor.launch.prepare import prepare
from executor.training.trainer import Trainer
from planner.plan.plan import Plan

TIMEOUT = timedelta(seconds=120)


def main(folder: Path) -> None:
    """Run all plans of the folder."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for path in sorted(folder.glob("*.json")):
        target = folder / "report" / path.name
        if not target.exists():
            _run(Plan.load(path), target)
            dist.barrier()
    dist.destroy_process_group()


def _run(plan: Plan, target: Path) -> None:
    ranks = [_gathered(held) for held in run_plan(plan)]
    if dist.get_rank() == 0:
        target.parent.mkdir(exist_ok=True)
        report = {"precision": plan.job.precision, **asdict(compare(plan, ranks))}
        target.write_text(json.dumps(report))


def _gathered(mine: Held) -> list[Held]:
    """Return the objects of all ranks, on the first."""
    found: list = [None] * dist.get_world_size()
    dist.gather_object(mine, found if dist.get_rank() == 0 else None)
    return found


def run_plan(plan: Plan) -> list[Held]:
    """Return this rank's state after each iteration."""
    prepared = prepare(plan, plan.model.factory, seed=SEED)
    source = batch_source(plan, prepared.model)
    trainer = Trainer.of_model(prepared, source, seed=SEED, timeout=TIMEOUT)
    found = []
    for step in STEPS:
        loss = trainer.forward_backward(step)
        gradients = {
            name: None if p.grad is None else p.grad.clone()
            for name, p in trainer.parameters.items()
        }
        buffers = {n: b.clone() for s in prepared.stages for n, b in s.buffers.items()}
        trainer.optimisation.step(step)
        parameters = {name: p.detach().clone() for name, p in trainer.parameters.items()}
        found.append(Held(loss, gradients, buffers, parameters))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
