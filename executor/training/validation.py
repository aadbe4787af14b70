"""Validation during training: forwards alone, in evaluation mode, on data of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.failure import talking_to
from executor.launch.prepare import Prepared
from executor.runtime.lowering import lower_forwards
from executor.runtime.runtime import PipelineRuntime, Recorder, clock_of
from executor.runtime.worker import TensorSpec, Worker
from executor.stage.runner import StageRunner
from executor.stage.token_mean import tokens_of
from executor.training.connections import Connections
from executor.training.data import BatchOf, DeviceBatches, RandomState, microbatch_seed
from executor.training.dataset import own_draws
from planner.errors import PipeplanError
from planner.plan.programs import Compute

_STEP = 0
"""The step from which the seeds of its microbatches are made; steps of training count from 1."""


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
        prepared: this rank's stages, in evaluation mode too.
        connections: that training uses, while it sends nothing.
        batch_of: returns the batch of step 0 and a microbatch.
        microbatches: of a validation.
        over_tokens: whether the loss is the mean over all tokens.

    Raises:
        PipeplanError: if a stage writes buffers in evaluation mode.
    """

    def __init__(
        self,
        prepared: Prepared,
        connections: Connections,
        batch_of: BatchOf,
        microbatches: int,
        *,
        over_tokens: bool,
    ) -> None:
        self._device = device = prepared.device
        self._counts = connections.is_first_member
        self._recorder = recorder = Recorder(clock_of(device))
        program = lower_forwards(prepared.plan, microbatches)[prepared.place.rank]
        ran = [action.operation for action in program if isinstance(action, Compute)]
        self._workers = {}
        for stage in prepared.evaluation:
            mine = [operation.microbatch for operation in ran if operation.stage == stage.index]
            batches = DeviceBatches(batch_of, stage.model_inputs, mine, device, None)
            runner = StageRunner(
                stage,
                microbatches,
                device=device,
                autocast=prepared.autocast,
                group=connections.group,
            )
            self._workers[stage.index] = ForwardWorker(
                runner, batches, prepared.seed, over_tokens=over_tokens
            )
        self._runtime = PipelineRuntime(
            self._workers, program, lambda _: None, connections.transport, recorder
        )

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
