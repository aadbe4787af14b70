"""Records what a rank did in one iteration, with the moments it began and ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class DeviceClock(Protocol):
    """Marks moments now and tells later when they were."""

    def mark(self) -> Any:
        """This moment."""

    def settle(self) -> None:
        """Wait until all marked moments have passed."""

    def seconds(self, mark: Any) -> float:
        """Return a mark's :func:`time.perf_counter` time; call :meth:`settle` first."""


class HostClock:
    """The CPU's: a call has ended when it returns."""

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing to wait for."""

    def seconds(self, mark: float) -> float:
        """The mark itself."""
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

    def settle(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def seconds(self, mark: torch.cuda.Event | float) -> float:
        """Return seconds by the GPU's own clock; what the CPU saw is in seconds already."""
        if isinstance(mark, float):
            return mark
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1e3


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
        begin_s: of the iteration, on this rank's clock.
        end_s: its end.
    """

    operations: list[Span] = field(default_factory=list)
    sends: list[Span] = field(default_factory=list)
    receives: list[Span] = field(default_factory=list)
    reductions: list[Span] = field(default_factory=list)
    optimizer: list[Span] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of forwards and backwards."""
        return sum(span.end_s - span.start_s for span in self.operations)


class Recorder:
    """Notes marks while an iteration runs; :meth:`record` tells the times afterwards."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self._marks: list[tuple[str, Any, Any, Any]] = []
        self._begin = clock.mark()

    def begin(self) -> None:
        """A new iteration starts."""
        self._marks.clear()
        self._begin = self.clock.mark()

    def mark(self) -> Any:
        """This moment."""
        return self.clock.mark()

    def note(self, kind: str, what: Any, start: Any, end: Any | None = None) -> None:
        """Something of a kind (a list of :class:`StepRecord`) that ends now, or at ``end``."""
        self._marks.append((kind, what, start, self.clock.mark() if end is None else end))

    def record(self) -> StepRecord:
        """The iteration so far; waits for the device."""
        end = self.clock.mark()
        self.clock.settle()
        begin_s = self.clock.seconds(self._begin)
        found = StepRecord(begin_s=begin_s, end_s=self.clock.seconds(end))
        for kind, what, start, stop in self._marks:
            span = Span(what, self.clock.seconds(start), self.clock.seconds(stop))
            getattr(found, kind).append(span)
        return found
