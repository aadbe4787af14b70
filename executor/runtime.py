"""The step loop: one rank runs its lowered program of computations, messages and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.failure import talking_to
from executor.lower import Action, Compute, Message, Reduce, message_of
from executor.recorder import Recorder
from executor.transport import Receiving, Sending, Transport
from executor.worker import TensorSpec, Worker
from planner.artifacts.operations import Operation


@dataclass(frozen=True)
class _Receive:
    """A posted receive, and the sends that are over once it has ended."""

    tensors: Sequence[Receiving]
    source: int
    sends_over: Sequence[Operation]


@dataclass(frozen=True)
class _Send:
    """Sends under way."""

    tensors: Sequence[Sending]
    target: int


class PipelineRuntime:
    """Runs the stages of one rank.

    Args:
        workers: this rank's stages by index.
        program: its lowered program.
        reduce: starts the all-reduce of what some stages share.
        transport: of messages.
        recorder: told of all that runs.
        waited: told the marks of the recorder's clock between which an operation waited for its
            input.
    """

    def __init__(
        self,
        workers: Mapping[int, Worker],
        program: Sequence[Action],
        reduce: Callable[[Reduce], None],
        transport: Transport,
        recorder: Recorder,
        waited: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self.workers = workers
        self.program = program
        self.transport = transport
        self.recorder = recorder
        self._reduce = reduce
        self._waited = waited
        # By the operation that makes the tensors: what waits to be used or sent, what is under way.
        self._results: dict[Operation, tuple[Tensor, ...]] = {}
        self._receiving: dict[Operation, _Receive] = {}
        self._sending: dict[Operation, _Send] = {}
        self._losses: list[Tensor] = []

    def step(self) -> float:
        """Run one iteration's forwards and backwards; gradients are in the parameters after it.

        Returns:
            The sum of the losses of this rank's microbatches; zero without the last stage.
        """
        for action in self.program:
            match action:
                case Compute(operation):
                    self._await_input(operation)
                    start = self.recorder.mark()
                    self._compute(operation)
                    self.recorder.note("operations", operation, start)
                case Message("receive"):
                    self._receive(action)
                case Message("send"):
                    self._send(action)
                case Reduce():
                    self._reduce(action)
        self._finish_sends(list(self._sending))
        assert not self._results, f"results that nobody used: {list(self._results)}"
        for worker in self.workers.values():
            worker.require_empty()
        losses, self._losses = self._losses, []
        return float(torch.stack(losses).double().sum()) if losses else 0.0

    # --- computation -------------------------------------------------------------------------

    def _source(self, operation: Operation) -> Operation | None:
        """What of the neighbouring stage this operation needs."""
        stage, kind, microbatch = operation
        if kind == "F":
            return Operation(stage - 1, "F", microbatch) if stage else None
        if kind == "W" or self.workers[stage].is_last:
            return None
        return Operation(stage + 1, "B", microbatch)

    def _await_input(self, operation: Operation) -> None:
        source = self._source(operation)
        receive = None if source is None else self._receiving.pop(source, None)
        if source is not None and receive is not None:
            start = self.recorder.mark()
            with talking_to(f"rank {receive.source}, which was to send {source}"):
                self._results[source] = tuple(tensor.wait() for tensor in receive.tensors)
            end = self.recorder.mark()
            arrived = max((t.arrived_s for t in receive.tensors if t.arrived_s), default=end)
            self.recorder.note("receives", (source, receive.source), start, arrived)
            if self._waited is not None:
                self._waited(start, end)
            self._finish_sends(receive.sends_over)

    def _compute(self, operation: Operation) -> None:
        """Run the operation and keep its result for the neighbour."""
        stage, kind, microbatch = operation
        worker = self.workers[stage]
        source = self._source(operation)
        received = () if source is None else self._results.pop(source)
        if kind == "W":
            worker.weight_gradients(microbatch)
        elif kind == "F":
            outputs = worker.forward(microbatch, received)
            if worker.is_last:
                self._losses.append(outputs[0])
            else:
                self._results[operation] = outputs
        else:
            gradients = worker.backward(microbatch, received)
            if stage > 0:
                self._results[message_of(operation)] = gradients

    # --- messages ----------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        tensors = self._results.pop(message.operation)
        start = self.recorder.mark()
        with talking_to(_receiver(message.peer, message.operation)):
            sends = [self.transport.send(tensor, message.peer) for tensor in tensors]
        self._sending[message.operation] = _Send(sends, message.peer)
        self.recorder.note("sends", (message.operation, message.peer), start)

    def _receive(self, message: Message) -> None:
        specs = self._expected(message.operation)
        with talking_to(f"rank {message.peer}, which was to send {message.operation}"):
            tensors = [self.transport.receive(spec, message.peer) for spec in specs]
        self._receiving[message.operation] = _Receive(tensors, message.peer, message.arrived)

    def _expected(self, operation: Operation) -> Sequence[TensorSpec]:
        if operation.kind == "F":
            return self.workers[operation.stage + 1].incoming
        return self.workers[operation.stage - 1].returning

    def _finish_sends(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            send = self._sending.pop(operation, None)
            if send is not None:
                with talking_to(_receiver(send.target, operation)):
                    for tensor in send.tensors:
                        tensor.wait()


def _receiver(rank: int, operation: Operation) -> str:
    return f"rank {rank}, which was to receive {operation}"
