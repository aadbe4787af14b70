"""Earliest starts: by what a device must run before an operation, and by what that waits for.

Microbatches are equal, so each kind of operation may be taken to run in their order. Then much of
what a device runs before an operation is known; it cannot start before the device could have done
that, each part of it as early as it could start itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Times = list[list[float]]
"""By stage and microbatch, in seconds."""


@dataclass(frozen=True)
class Chains:
    """A microbatch passes the stages one way and then back, the last one twice in a row.

    Forwards on the way there and gradients back; seen from the end of the iteration, gradients on
    the way there and forwards back.

    Attributes:
        there, back: seconds of the operations, by stage.
        send, send_back: seconds to the next stage and back from it, by stage.
        lead: before each operation on the way there the device runs one of so many seconds.
        lead_from: which no stage can start before.
        limit: the most microbatches between their start there and their end back, by stage.
        beside: by stage, the stages on the same device, its own among them, in order.
        microbatches: their number.
    """

    there: Sequence[float]
    back: Sequence[float]
    send: Sequence[float]
    send_back: Sequence[float]
    lead: Sequence[float]
    lead_from: Sequence[float]
    limit: Sequence[int]
    beside: Mapping[int, Sequence[int]]
    microbatches: int

    def earliest(self) -> tuple[Times, Times]:
        """Of the operations there and of those back. Needs stages without replicas."""
        count = len(self.there)
        there: Times = [[] for _ in range(count)]
        back: Times = [[] for _ in range(count)]
        before_there = [_Prefix() for _ in range(count)]
        before_back = [_Prefix() for _ in range(count)]
        for microbatch in range(self.microbatches):
            for stage in range(count):
                prefix = before_there[stage]
                self._add_before_there(prefix, stage, microbatch, there, back)
                arrival = self.lead_from[stage] + self.lead[stage]
                if stage:
                    sent = there[stage - 1][microbatch] + self.there[stage - 1]
                    arrival = max(arrival, sent + self.send[stage - 1])
                there[stage].append(max(arrival, prefix.end))
            for stage in reversed(range(count)):
                prefix = before_back[stage]
                self._add_before_back(prefix, stage, microbatch, there, back)
                arrival = there[stage][microbatch] + self.there[stage]
                if stage + 1 < count:
                    sent = back[stage + 1][microbatch] + self.back[stage + 1]
                    arrival = max(arrival, sent + self.send_back[stage])
                back[stage].append(max(arrival, prefix.end))
        return there, back

    def _add_before_there(
        self, prefix: _Prefix, stage: int, microbatch: int, there: Times, back: Times
    ) -> None:
        """What more runs before this microbatch's way there than before the last one's."""
        if self.lead[stage]:
            prefix.add_early(self.lead_from[stage], self.lead[stage])
        if microbatch:
            prefix.add(there[stage][microbatch - 1], self.there[stage])
        ended = microbatch - self.limit[stage]
        for other in self.beside[stage]:
            if other < stage:
                prefix.add(there[other][microbatch], self.there[other])
            elif ended >= 0:
                prefix.add(back[other][ended], self.back[other])
                if other > stage:
                    prefix.add(there[other][ended], self.there[other])

    def _add_before_back(
        self, prefix: _Prefix, stage: int, microbatch: int, there: Times, back: Times
    ) -> None:
        for other in self.beside[stage]:
            prefix.add(there[other][microbatch], self.there[other])
            if self.lead[other]:
                prefix.add_early(self.lead_from[other], self.lead[other])
            if other > stage:
                prefix.add(back[other][microbatch], self.back[other])
        if microbatch:
            prefix.add(back[stage][microbatch - 1], self.back[stage])


class _Prefix:
    """A growing set of operations on one device, and when it could have done them all."""

    def __init__(self) -> None:
        self._releases: list[float] = []
        self._durations: list[float] = []
        self._ends: list[float] = []
        self._total = 0.0
        self._early = 0.0
        self._early_from = math.inf

    @property
    def end(self) -> float:
        """When the last could end, each as soon as it is released; 0 of none."""
        ends = [self._ends[-1]] if self._ends else []
        if self._early:
            # Those released at once, and whatever is not released before them.
            first = min([self._early_from, *self._releases[:1]])
            ends.append(first + self._early + self._total)
        return max(ends, default=0.0)

    def add(self, release_s: float, duration_s: float) -> None:
        """One more; releases mostly come in order, so that little has to be counted again."""
        place = bisect_right(self._releases, release_s)
        self._releases.insert(place, release_s)
        self._durations.insert(place, duration_s)
        self._total += duration_s
        del self._ends[place:]
        end = self._ends[-1] if self._ends else 0.0
        for index in range(place, len(self._releases)):
            end = max(end, self._releases[index]) + self._durations[index]
            self._ends.append(end)

    def add_early(self, release_s: float, duration_s: float) -> None:
        """One that is released before most of the others: counted with all of them at once."""
        self._early_from = min(self._early_from, release_s)
        self._early += duration_s
