"""The step loop: one rank runs its lowered program of computations, messages and reductions.

Messages travel between neighbouring stages over whatever the process group can carry. A recorder
notes when each operation, message and reduction began and ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from executor.distributed.failure import talking_to
from executor.runtime.member_messages import MemberMessages, TensorPart, joined
from executor.runtime.transport import Transport, Underway
from executor.runtime.worker import OperationObserver, TensorSpec, Worker
from planner.plan.operations import Operation
from planner.plan.programs import Action, Compute, Message, Reduce, message_of


class HostClock:
    """The CPU's clock: a call has ended when it returns."""

    def mark(self) -> float:
        """Mark this moment."""
        return time.perf_counter()

    def settle(self, begin: float, end: float) -> None:
        """Nothing to wait for."""

    def seconds(self, mark: float) -> float:
        """Return a mark's :func:`time.perf_counter` time; call :meth:`settle` first."""
        return mark


class CudaClock:
    """Events on the current stream of a GPU: what was queued before a mark has ended at it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.mark()
        torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """This place in the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Wait for the place ``end`` in the stream, and count times from ``begin`` on.

        Events tell milliseconds in float32: counted from the beginning of a training of hours they
        would be wrong by tenths.
        """
        end.synchronize()
        self._origin_s, self._origin = self.seconds(begin), begin

    def seconds(self, mark: torch.cuda.Event | float) -> float:
        """Return seconds by the GPU's own clock; what the CPU saw is in seconds already."""
        if isinstance(mark, float):
            return mark
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1e3


DeviceClock = HostClock | CudaClock
"""Marks moments now and tells later when they were."""


def clock_of(device: torch.device) -> DeviceClock:
    """The clock that times work on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Span:
    """Something that took time, in seconds of this rank's clock."""

    what: Any
    start_s: float
    end_s: float


@dataclass
class StepRecord:
    """One rank's iteration, in seconds since its start.

    Attributes:
        operations: computations, by :class:`Operation`.
        sends: messages by their operation and target rank; they start when they are posted.
        receives: messages by their operation and source rank; from the beginning of the wait for
            them to their arrival, or to the end of the wait if nobody watched.
        reductions: all-reduces by their stages; from the start of the first bucket to the end of
            the wait for the last. Buckets that overlap a backward lie apart.
        optimizer: optimizer step.
        collectives: those inside a tensor-parallel group; most lie within operations.
        begin_s: of the iteration, on this rank's clock.
        end_s: its end.
        batch_wait_s: for which the host loaded batches meanwhile: before the first operation for a
            GPU, within forwards on a CPU.
    """

    operations: list[Span] = field(default_factory=list)
    sends: list[Span] = field(default_factory=list)
    receives: list[Span] = field(default_factory=list)
    reductions: list[Span] = field(default_factory=list)
    optimizer: list[Span] = field(default_factory=list)
    collectives: list[Span] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float = 0.0
    batch_wait_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of forwards and backwards."""
        return sum(span.end_s - span.start_s for span in self.operations)


class PendingRecord:
    """One rank's iteration whose moments may not have passed yet.

    Args:
        clock: that made the marks.
        begin: mark of its begin.
        end: mark of its end.
        marks: for each thing that took time the list of :class:`StepRecord` it belongs to, what it
            was, and the marks of its start and end.
        batch_wait_s: for which the host loaded batches.
    """

    def __init__(
        self,
        clock: DeviceClock,
        begin: Any,
        end: Any,
        marks: Sequence[tuple[str, Any, Any, Any]],
        batch_wait_s: float,
    ) -> None:
        self._clock = clock
        self._begin, self._end = begin, end
        self._marks = marks
        self._batch_wait_s = batch_wait_s
        self._found: StepRecord | None = None

    def wait(self) -> StepRecord:
        """Wait until the iteration has ended on the device, and return its times."""
        if self._found is None:
            clock = self._clock
            clock.settle(self._begin, self._end)
            begin_s, end_s = clock.seconds(self._begin), clock.seconds(self._end)
            self._found = StepRecord(begin_s=begin_s, end_s=end_s, batch_wait_s=self._batch_wait_s)
            for kind, what, start, stop in self._marks:
                span = Span(what, clock.seconds(start), clock.seconds(stop))
                getattr(self._found, kind).append(span)
        return self._found


class Recorder:
    """Notes marks while an iteration runs; what :meth:`end` returns tells the times afterwards."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self._marks: list[tuple[str, Any, Any, Any]] = []
        self._begin = clock.mark()

    def begin(self) -> None:
        """A new iteration starts."""
        self._marks = []
        self._begin = self.clock.mark()

    def mark(self) -> Any:
        """This moment."""
        return self.clock.mark()

    def note(self, kind: str, what: Any, start: Any, end: Any | None = None) -> None:
        """Something of a kind (a list of :class:`StepRecord`) that ends now, or at ``end``."""
        self._marks.append((kind, what, start, self.clock.mark() if end is None else end))

    def end(self, batch_wait_s: float = 0.0) -> PendingRecord:
        """The iteration ends here, with so much time for its batches; nothing is waited for."""
        return PendingRecord(self.clock, self._begin, self.clock.mark(), self._marks, batch_wait_s)


@dataclass(frozen=True)
class _Receive:
    """A posted receive, and the sends that are over once it has ended.

    ``parts`` says which parts of the message's tensors it has, where not all of all.
    """

    tensors: Sequence[Underway]
    source: int
    sends_over: Sequence[Operation]
    parts: Sequence[TensorPart] = ()


@dataclass(frozen=True)
class _Send:
    """Sends under way to one rank."""

    tensors: Sequence[Underway]
    target: int


class PipelineRuntime:
    """Runs the stages of one rank.

    Args:
        workers: this rank's stages by index.
        program: its lowered program.
        reduce: starts the all-reduce of what some stages share.
        transport: sends and receives messages.
        recorder: notes the times of operations and messages.
        observers: called around each operation, the first one outermost.
        waited: called with the marks of the recorder's clock between which an operation waited for
            its input.
        messages: divides what goes to tensor-parallel groups of other sizes; None: all is sent
            whole.
    """

    def __init__(
        self,
        workers: Mapping[int, Worker],
        program: Sequence[Action],
        reduce: Callable[[Reduce], None],
        transport: Transport,
        recorder: Recorder,
        observers: Sequence[OperationObserver] = (),
        waited: Callable[[Any, Any], None] | None = None,
        messages: MemberMessages | None = None,
    ) -> None:
        self._messages = messages
        self.workers = workers
        self.program = program
        self.transport = transport
        self.recorder = recorder
        self._reduce = reduce
        self._observers = observers
        self._waited = waited
        # By the operation that makes the tensors: what waits to be used or sent, what is under way.
        self._results: dict[Operation, tuple[Tensor, ...]] = {}
        self._receiving: dict[Operation, list[_Receive]] = {}
        self._sending: dict[Operation, list[_Send]] = {}
        # Of a tensor-parallel group, one member may send a result to several ranks, others to none.
        sent = (row.operation for row in program if _is_send(row))
        ran = [row.operation for row in program if isinstance(row, Compute)]
        self._targets = Counter(sent)
        needed = {self._source(operation) for operation in ran}
        self._unused = {message_of(operation) for operation in ran} - needed - self._targets.keys()
        self._losses: list[Tensor] = []

    def step(self) -> Tensor:
        """Run one iteration's forwards and backwards; gradients are in the parameters after it.

        Returns:
            The sum of the losses of this rank's microbatches, a float64 scalar on its device; zero
            without the last stage.
        """
        for action in self.program:
            match action:
                case Compute(operation):
                    self._await_input(operation)
                    self._drop_sent()
                    start = self.recorder.mark()
                    for observer in self._observers:
                        observer.before(operation)
                    self._compute(operation)
                    for observer in reversed(self._observers):
                        observer.after(operation)
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
            worker.end()
        losses, self._losses = self._losses, []
        if not losses:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(losses).double().sum()

    # --- computation -------------------------------------------------------------------------

    def _source(self, operation: Operation) -> Operation | None:
        """Return the operation of the neighbouring stage whose result this one needs, if any."""
        stage, kind, microbatch = operation
        if kind == "F":
            return Operation(stage - 1, "F", microbatch) if stage else None
        if kind == "W" or self.workers[stage].is_last:
            return None
        return Operation(stage + 1, "B", microbatch)

    def _await_input(self, operation: Operation) -> None:
        source = self._source(operation)
        received = [] if source is None else self._receiving.pop(source, [])
        if source is None or not received:
            return
        tensors: list[Tensor] = []
        for receive in received:
            start = self.recorder.mark()
            with talking_to(f"rank {receive.source}, which was to send {source}"):
                tensors += map(self.transport.received, receive.tensors)
            end = self.recorder.mark()
            # They arrive in order, so the last one's arrival is that of all.
            arrived = receive.tensors[-1].arrived if receive.tensors else None
            self.recorder.note("receives", (source, receive.source), start, arrived or end)
            if self._waited is not None:
                self._waited(start, end)
        parts = [part for receive in received for part in receive.parts]
        self._results[source] = (
            tuple(tensors) if self._messages is None else joined(zip(parts, tensors, strict=True))
        )
        for receive in received:
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
            elif operation not in self._unused:
                self._results[operation] = outputs
        else:
            gradients = worker.backward(microbatch, received)
            made = Operation(stage, "B", microbatch)
            if stage > 0 and made not in self._unused:
                self._results[made] = gradients

    # --- messages ----------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        tensors: Sequence[Tensor] = self._results[message.operation]
        start = self.recorder.mark()
        if self._messages is not None:
            tensors = self._messages.sent(message.operation, tensors, message.peer)
        with talking_to(_receiver(message.peer, message.operation)):
            sends = [self.transport.send(tensor, message.peer) for tensor in tensors]
        under_way = self._sending.setdefault(message.operation, [])
        under_way.append(_Send(sends, message.peer))
        if len(under_way) >= self._targets[message.operation]:
            del self._results[message.operation]
        self.recorder.note("sends", (message.operation, message.peer), start)

    def _receive(self, message: Message) -> None:
        specs = self._expected(message.operation)
        parts: list[TensorPart] = []
        if self._messages is not None:
            rows = self._messages.expected(message.operation, specs, message.peer)
            parts, specs = [part for part, _ in rows], [spec for _, spec in rows]
        with talking_to(f"rank {message.peer}, which was to send {message.operation}"):
            tensors = [self.transport.receive(spec, message.peer) for spec in specs]
        received = _Receive(tensors, message.peer, message.arrived, parts)
        self._receiving.setdefault(message.operation, []).append(received)

    def _expected(self, operation: Operation) -> Sequence[TensorSpec]:
        if operation.kind == "F":
            return self.workers[operation.stage + 1].incoming(operation.microbatch)
        return self.workers[operation.stage - 1].returning(operation.microbatch)

    def _drop_sent(self) -> None:
        """Let go of the tensors that all their targets have."""
        over = [
            operation
            for operation, sends in self._sending.items()
            if operation not in self._results
            and all(tensor.is_over for send in sends for tensor in send.tensors)
        ]
        self._finish_sends(over)

    def _finish_sends(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            for send in self._sending.pop(operation, ()):
                with talking_to(_receiver(send.target, operation)):
                    for tensor in send.tensors:
                        tensor.wait()


def _is_send(action: Action) -> TypeGuard[Message]:
    return isinstance(action, Message) and action.direction == "send"


def _receiver(rank: int, operation: Operation) -> str:
    return f"rank {rank}, which was to receive {operation}"
