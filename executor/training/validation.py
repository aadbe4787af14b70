"""Validation during training: forwards alone, in evaluation mode, on data of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.failure import talking_to
from executor.runtime.runtime import PipelineRuntime, Recorder, clock_of
from executor.runtime.transport import Transport
from executor.runtime.worker import TensorSpec, Worker
from executor.stage.runner import StageRunner
from executor.stage.token_mean import tokens_of
from executor.training.data import DeviceBatches, RandomState, microbatch_seed
from executor.training.dataset import own_draws
from planner.errors import PipeplanError
from planner.plan.programs import Action, Compute

_STEP = 0
"""Of the seeds of microbatches; those of training count from 1."""


class ForwardWorker(Worker):
    """Runs forwards of a stage in evaluation mode.

    Args:
        runner: of the stage.
        batches: what it reads of them.
        seed: of what it draws even so.
        over_tokens: whether a microbatch counts by its tokens.

    Attributes:
        is_last: whether the stage makes the loss.
        total: sum of the losses times their weights, and of the weights, so far.

    Raises:
        PipeplanError: if the stage writes buffers in evaluation mode, which training reads.
    """

    def __init__(
        self, runner: StageRunner, batches: DeviceBatches, seed: int, *, over_tokens: bool
    ) -> None:
        stage = runner.stage
        written = {name for piece in stage.pieces for name in piece.written_buffers}
        if written or runner.statistics is not None:
            raise PipeplanError(
                f"validation: stage {stage.index} writes {', '.join(sorted(written)) or 'buffers'} "
                "in evaluation mode too, which would change the training; write them only if "
                "self.training, or train without [validation]"
            )
        self.is_last = stage.is_last
        self.total = torch.zeros(2, dtype=torch.float64, device=runner.device)
        self._runner = runner
        self._batches = batches
        self._seed = seed
        self._over_tokens = over_tokens

    def incoming(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the tensors that the previous stage sends for a microbatch."""
        return self._runner.incoming()

    def begin(self, step: int, loss_scale: float) -> None:
        """Begin a validation."""
        self.total.zero_()
        self._batches.begin(step)

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage, or the loss."""
        batch = self._batches.take(microbatch)
        seed = microbatch_seed(self._seed, _STEP, microbatch)
        made = self._runner.forward(microbatch, received, batch, seed)
        self._runner.forget(microbatch)
        if self.is_last:
            self._add(made[0].double(), batch)
        return made

    def _add(self, loss: Tensor, batch: Mapping[str, Tensor]) -> None:
        weight = tokens_of(batch) if self._over_tokens else 1
        if weight:
            self.total += torch.stack([loss * weight, torch.full_like(loss, weight)])


class Validation:
    """This rank's part of validations; it leaves weights, buffers and random numbers as they were.

    Args:
        workers: of this rank's stages in evaluation mode, by their numbers.
        program: of this rank.
        transport: that training sends over, while it sends nothing.
        device: of the rank.
        counts: whether this rank's losses count, and are not another member's of its group too.
    """

    def __init__(
        self,
        workers: Mapping[int, ForwardWorker],
        program: Sequence[Action],
        transport: Transport,
        device: torch.device,
        *,
        counts: bool = True,
    ) -> None:
        self._workers = workers
        self._counts = counts
        self._device = device
        recorder = Recorder(clock_of(device))
        self._recorder = recorder
        self._runtime = PipelineRuntime(workers, program, lambda _: None, transport, recorder)

    def loss(self) -> float:
        """Return the mean loss; all ranks call it, between two iterations."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._recorder.begin()
        with own_draws(), RandomState.borrowed(RandomState.now(self._device)), torch.no_grad():
            for worker in self._workers.values():
                worker.begin(_STEP, 1.0)
            self._runtime.step()
            for worker in self._workers.values() if self._counts else ():
                total += worker.total
        with talking_to("the other ranks, for the validation's mean loss"):
            dist.all_reduce(total)
        loss, weight = total.tolist()
        return loss / weight if weight else float("nan")


def microbatches_of(program: Sequence[Action], stage: int) -> list[int]:
    """Return the microbatches that a stage runs in a program."""
    ran = (row.operation for row in program if isinstance(row, Compute))
    return [operation.microbatch for operation in ran if operation.stage == stage]
