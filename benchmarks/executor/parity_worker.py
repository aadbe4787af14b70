"""One rank of the parity runs: trains by every plan of a folder, compared with a single process.

``torchrun --nproc-per-node N -m benchmarks.executor.parity_worker FOLDER`` reads ``FOLDER/*.json``
and writes ``FOLDER/report/NAME.json`` for each plan that has none yet. Where there is a plan
``FOLDER/then/NAME.json``, training goes on by that one from a checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.executor.single_process import SEED, STEPS, Held, batch_source, compare, joined
from executor.checkpoint.read import Checkpoint
from executor.emulation.pace import Pace
from executor.launch.config import TrainingConfig
from executor.launch.prepare import prepare
from executor.runtime.runtime import StepRecord
from executor.training.optimisation import StepOutcome
from executor.training.rank_optimisation import optimisation_of
from executor.training.saved_state import SavedState
from executor.training.state_shards import StateShards
from executor.training.trainer import Trainer
from planner.plan.plan import Plan

TIMEOUT = timedelta(seconds=120)


def main(folder: Path) -> None:
    """Run all plans of the folder."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for path in sorted(folder.glob("*.json")):
        target = folder / "report" / path.name
        if not target.exists():
            files = [file for file in plan_files(folder, path.stem) if file.exists()]
            _run([Plan.load(file) for file in files], target)
            dist.barrier()
    dist.destroy_process_group()


def plan_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the files of a training's first plan, and of a second if it has one."""
    return folder / f"{name}.json", folder / "then" / f"{name}.json"


def _run(plans: Sequence[Plan], target: Path) -> None:
    is_first, ranks, saved = dist.get_rank() == 0, [], None
    for plan in plans:
        checkpoints = target.with_suffix(".checkpoints") if len(plans) > 1 else None
        for iteration in trained(plan, STEPS, resume=saved, save=checkpoints):
            held = gathered(iteration.held)
            ranks.append(joined(plan, held) if is_first else held)
        saved = checkpoints
    if is_first:
        target.parent.mkdir(exist_ok=True)
        report = {"precision": plans[0].job.precision, **asdict(compare(plans[0], ranks))}
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


def trained(
    plan: Plan,
    steps: int,
    pace: Pace | None = None,
    *,
    resume: Path | None = None,
    save: Path | None = None,
) -> list[Iteration]:
    """Train by a plan.

    Args:
        plan: of all ranks of the process group.
        steps: iterations.
        pace: what operations are held to; None: they take their own time.
        resume: folder of checkpoints, of which the latest is gone on from; None: from the first
            iteration on.
        save: folder that gets a checkpoint in the end; None: there is none.
    """
    prepared = prepare(plan, plan.model.factory, seed=SEED)
    state = SavedState(prepared, TrainingConfig(seed=SEED))
    optimisation, done = optimisation_of(prepared), 0
    if resume is not None:
        checkpoint = Checkpoint.open(resume)
        done = state.require_fits(checkpoint)
        state.load(checkpoint, optimisation)
    found = Gradients(prepared.parameters, optimisation.shards)
    trainer = Trainer.of_model(
        prepared,
        batch_source(plan, prepared.model),
        optimisation=optimisation,
        optimise=lambda step: found.keep_before(optimisation.step, step),
        timeout=TIMEOUT,
        pace=pace,
    )
    iterations = []
    for step in range(done + 1, done + steps + 1):
        metrics = trainer.step(step)
        if plan.job.shards_parameters:
            trainer.settle()
        buffers = {n: b.clone() for s in prepared.stages for n, b in s.buffers.items()}
        parameters = {n: p.detach().clone() for n, p in prepared.parameters.items()}
        held = Held(metrics.loss, found.kept, buffers, parameters)
        iterations.append(Iteration(held, metrics.step_time_s, trainer.record))
    if save is not None:
        state.save(save, done + steps, trainer.optimisation, 0, None)
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
