"""One rank of the parity runs: runs every plan of a folder and compares with a single process.

``torchrun --nproc-per-node N -m benchmarks.executor.parity_worker FOLDER`` reads ``FOLDER/*.json``
and writes ``FOLDER/report/NAME.json`` for each plan that has none yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.executor.single_process import SEED, STEPS, Held, batch_source, compare, joined
from executor.emulation.pace import Pace
from executor.launch.prepare import prepare
from executor.runtime.runtime import StepRecord
from executor.training.optimisation import StepOutcome
from executor.training.state_shards import StateShards
from executor.training.trainer import Trainer, optimisation_of
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
    ranks = [gathered(iteration.held) for iteration in trained(plan, STEPS)]
    if dist.get_rank() == 0:
        ranks = [joined(plan, held) for held in ranks]
    if dist.get_rank() == 0:
        target.parent.mkdir(exist_ok=True)
        report = {"precision": plan.job.precision, **asdict(compare(plan, ranks))}
        target.write_text(json.dumps(report))


def gathered(mine: Any) -> list[Any]:
    """Return the objects of all ranks, on the first."""
    found: list = [None] * dist.get_world_size()
    dist.gather_object(mine, found if dist.get_rank() == 0 else None)
    return found


@dataclass(frozen=True)
class Iteration:
    """One iteration of this rank.

    Attributes:
        held: its state afterwards.
        step_time_s: seconds of the slowest rank.
        record: what this rank did.
    """

    held: Held
    step_time_s: float
    record: StepRecord


def trained(plan: Plan, steps: int, pace: Pace | None = None) -> list[Iteration]:
    """Train by a plan from its first iteration on.

    Args:
        plan: of all ranks of the process group.
        steps: iterations.
        pace: what operations are held to; None: they take their own time.
    """
    prepared = prepare(plan, plan.model.factory, seed=SEED)
    optimisation = optimisation_of(prepared)
    found = Gradients(prepared.parameters, optimisation.shards)
    trainer = Trainer.of_model(
        prepared,
        batch_source(plan, prepared.model),
        seed=SEED,
        optimisation=optimisation,
        optimise=lambda step: found.keep_before(optimisation.step, step),
        timeout=TIMEOUT,
        pace=pace,
    )
    iterations = []
    for step in range(1, steps + 1):
        metrics = trainer.step(step)
        if plan.job.shards_parameters:
            trainer.settle()
        buffers = {n: b.clone() for s in prepared.stages for n, b in s.buffers.items()}
        parameters = {n: p.detach().clone() for n, p in prepared.parameters.items()}
        held = Held(metrics.loss, found.kept, buffers, parameters)
        iterations.append(Iteration(held, metrics.step_time_s, trainer.record))
    trainer.close()
    return iterations


class Gradients:
    """Copies of gradients, taken before the optimizer's step clears them.

    Args:
        parameters: by name.
        shards: of gradients that ranks have the sums of in parts.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shards: StateShards | None = None
    ) -> None:
        self.kept: dict[str, Tensor | None] = {}
        self._parameters = parameters
        self._shards = shards

    def keep_before(self, optimise: Callable[[int], StepOutcome], step: int) -> StepOutcome:
        """Copy the gradients, then let the optimizer step."""
        self.kept = {name: self._own(name, p) for name, p in self._parameters.items()}
        return optimise(step)

    def _own(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """Copy a gradient; of one that ranks have in parts, what others have is not a number."""
        if self._shards is None or name not in self._shards.shared:
            return None if parameter.grad is None else parameter.grad.clone()
        found = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
        if name in self._shards.slices:
            part = self._shards.slices[name]
            part.of(found)[:] = part.parameter.grad
        return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
