"""Validation during training: forwards alone, in evaluation mode, on data of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from executor.distributed.failure import talking_to
from executor.launch.prepare import Prepared
from executor.runtime.lowering import lower_forwards
from executor.runtime.runtime import PipelineRuntime, Recorder, clock_of
from executor.stage.random_numbers import RandomState, own_draws
from executor.stage.runner import StageRunner
from executor.training.batches import BatchOf
from executor.training.connections import Connections
from executor.training.workers import DeviceBatches, ForwardWorker
from planner.plan.programs import Compute

_STEP = 0
"""The step from which the seeds of its microbatches are made; steps of training count from 1."""


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
            batches = DeviceBatches(batch_of, stage.model_inputs, mine, device, ahead=False)
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
