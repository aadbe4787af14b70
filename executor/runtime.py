"""The step loop: one rank runs its lowered program of computations and messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.cut import BoundaryTensor, StageModule
from executor.lower import Action, Compute, Message
from executor.stage import StageRunner
from planner.artifacts.operations import Operation

Batch = Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class StepReport:
    """What one rank did in one iteration.

    Attributes:
        loss: sum over this rank's microbatches of their loss / number of microbatches; zero on
            ranks without the last stage.
        busy_s: seconds of forwards and backwards.
    """

    loss: float
    busy_s: float


class PipelineRuntime:
    """Runs the stages of one rank.

    Args:
        stages: this rank's stages.
        program: its lowered program.
        microbatches: of one iteration.
        device: of tensors.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        program: Sequence[Action],
        microbatches: int,
        device: torch.device,
    ) -> None:
        self.runners = {stage.index: StageRunner(stage, microbatches) for stage in stages}
        self.program = program
        self.microbatches = microbatches
        self.device = device
        self._arrived: dict[Operation, tuple[Tensor, ...]] = {}
        self._receiving: dict[Operation, list[Any]] = {}
        self._sending: dict[Operation, list[tuple[Any, Tensor]]] = {}

    def step(self, batch: Batch) -> StepReport:
        """Run one iteration's forwards and backwards; gradients are in the parameters after it.

        Args:
            batch: the entries of a microbatch by name.
        """
        loss = busy_s = 0.0
        for action in self.program:
            match action:
                case Compute(operation):
                    # Waiting for a message is no work: it comes before the clock starts.
                    received = self._await_inputs(operation)
                    begin = time.perf_counter()
                    loss += self._compute(operation, received, batch)
                    busy_s += time.perf_counter() - begin
                case Message("receive", operation, peer):
                    self._receive(operation, peer)
                case Message("send", operation, peer):
                    self._send(operation, peer)
        self._finish_sends(list(self._sending))
        for runner in self.runners.values():
            runner.require_empty()
        return StepReport(loss, busy_s)

    # --- computation -------------------------------------------------------------------------

    def _source(self, operation: Operation) -> Operation | None:
        """The operation of the neighbouring stage whose result this one needs."""
        stage, kind, microbatch = operation
        if kind == "F":
            return Operation(stage - 1, "F", microbatch) if stage else None
        return None if self.runners[stage].is_last else Operation(stage + 1, "B", microbatch)

    def _await_inputs(self, operation: Operation) -> tuple[Tensor, ...]:
        source = self._source(operation)
        if source is None:
            return ()
        for work in self._receiving.pop(source, ()):
            work.wait()
        return self._arrived.pop(source)

    def _compute(self, operation: Operation, received: tuple[Tensor, ...], batch: Batch) -> float:
        """Run the operation, keep its result for the neighbour, return its share of the loss."""
        runner = self.runners[operation.stage]
        if operation.kind == "B":
            # Its gradient is here, so the neighbour has what this stage sent.
            self._finish_sends([Operation(operation.stage, "F", operation.microbatch)])
            self._arrived[operation] = runner.backward(operation.microbatch, received)
            if operation.stage == 0:
                del self._arrived[operation]
            return 0.0
        outputs = runner.forward(operation.microbatch, received, batch(operation.microbatch))
        if runner.is_last:
            return float(outputs[0]) / self.microbatches
        self._arrived[operation] = outputs
        return 0.0

    # --- messages ----------------------------------------------------------------------------

    def _send(self, operation: Operation, peer: int) -> None:
        tensors = self._arrived.pop(operation)
        self._sending[operation] = [
            (dist.isend(tensor, peer), tensor) for tensor in (t.contiguous() for t in tensors)
        ]

    def _receive(self, operation: Operation, peer: int) -> None:
        buffers = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            for tensor in self._expected(operation)
        )
        self._arrived[operation] = buffers
        works = [dist.irecv(buffer, peer) for buffer in buffers]
        self._receiving[operation] = works

    def _expected(self, operation: Operation) -> Sequence[BoundaryTensor]:
        if operation.kind == "F":
            return self.runners[operation.stage + 1].stage.receives
        sends = self.runners[operation.stage - 1].stage.sends
        return [tensor for tensor in sends if tensor.requires_grad]

    def _finish_sends(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            for work, _ in self._sending.pop(operation, ()):
                work.wait()
