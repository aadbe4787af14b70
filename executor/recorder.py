"""What a rank did in one iteration, with the moments it began and ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from executor.clock import Clock


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
            the wait for the last. Buckets that start behind a backward lie apart.
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

    def __init__(self, clock: Clock) -> None:
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
