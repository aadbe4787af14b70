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


@dataclass(frozen=True)
class _Receive:
    """A posted receive, and the sends that are over once it has ended."""

    works: Sequence[Any]
    sends_over: Sequence[Operation]


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
        # By the operation that makes the tensors: what waits to be used or sent, what is under way.
        self._results: dict[Operation, tuple[Tensor, ...]] = {}
        self._receiving: dict[Operation, _Receive] = {}
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
                    self._await_input(operation)
                    begin = time.perf_counter()
                    loss += self._compute(operation, batch)
                    busy_s += time.perf_counter() - begin
                case Message("receive"):
                    self._receive(action)
                case Message("send"):
                    self._send(action)
        self._finish_sends(list(self._sending))
        assert not self._results, f"results that nobody used: {list(self._results)}"
        for runner in self.runners.values():
            runner.require_empty()
        return StepReport(loss, busy_s)

    # --- computation -------------------------------------------------------------------------

    def _source(self, operation: Operation) -> Operation | None:
        """The operation of the neighbouring stage whose result this one needs."""
        stage, kind, microbatch = operation
        if kind == "F":
            return Operation(stage - 1, "F", microbatch) if stage else None
        is_last = self.runners[stage].stage.is_last
        return None if is_last else Operation(stage + 1, "B", microbatch)

    def _await_input(self, operation: Operation) -> None:
        source = self._source(operation)
        receive = None if source is None else self._receiving.pop(source, None)
        if receive is not None:
            for work in receive.works:
                work.wait()
            self._finish_sends(receive.sends_over)

    def _compute(self, operation: Operation, batch: Batch) -> float:
        """Run the operation, keep its result for the neighbour, return its share of the loss."""
        stage, kind, microbatch = operation
        runner = self.runners[stage]
        source = self._source(operation)
        received = () if source is None else self._results.pop(source)
        if kind == "B":
            gradients = runner.backward(microbatch, received)
            if stage > 0:
                self._results[operation] = gradients
            return 0.0
        entries = batch(microbatch) if runner.stage.model_inputs else {}
        outputs = runner.forward(microbatch, received, entries)
        if runner.stage.is_last:
            return float(outputs[0]) / self.microbatches
        self._results[operation] = outputs
        return 0.0

    # --- messages ----------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        tensors = [tensor.contiguous() for tensor in self._results.pop(message.operation)]
        self._sending[message.operation] = [
            (dist.isend(tensor, message.peer), tensor) for tensor in tensors
        ]

    def _receive(self, message: Message) -> None:
        buffers = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            for tensor in self._expected(message.operation)
        )
        works = [dist.irecv(buffer, message.peer) for buffer in buffers]
        self._results[message.operation] = buffers
        self._receiving[message.operation] = _Receive(works, message.arrived)

    def _expected(self, operation: Operation) -> Sequence[BoundaryTensor]:
        if operation.kind == "F":
            return self.runners[operation.stage + 1].stage.receives
        sends = self.runners[operation.stage - 1].stage.sends
        return [tensor for tensor in sends if tensor.requires_grad]

    def _finish_sends(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            for work, _ in self._sending.pop(operation, ()):
                work.wait()
