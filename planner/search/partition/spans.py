"""How long a device needs for its microbatches, from the first forward to the last gradient.

A device runs n forwards of ``forward_s`` and n backwards of ``backward_s``, and no gradient comes
back sooner than ``beyond_s`` after its forward has left: what lies behind the stage takes that
long. So no backward starts before the first forward and its way there and back, and all n follow;
and after all n forwards the last microbatch still has to go that way, and its backward follows::

    span(n) = max( n (forward + backward),
                   forward + beyond + n backward,
                   n forward + beyond + backward )

Figures are numbers, or matrices of them for all intervals of a chain at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.search.partition.chain import FloatArray, IntArray

MOST_WORKED_OUT = 4_000_000
"""Figures of a table by count, 32 MB; of more microbatches only some numbers are kept."""
MOST_COUNTS = 64
"""Numbers of microbatches worked out if not all are."""
MOST_STEPS = 12
"""Limits tried one after another before the least is searched for by halving."""
SLACK = 1 + 1e-12
"""By this factor a limit is exceeded by rounding alone."""


class ReplicaSpan(NamedTuple):
    """Seconds of a microbatch on a device.

    Attributes:
        forward_s, backward_s: on the device itself.
        beyond_s: at least, from the end of its forward to the start of its backward.
    """

    forward_s: float
    backward_s: float
    beyond_s: float

    def seconds(self, count: int) -> float:
        """Return the least time of so many microbatches, at least one."""
        forward, backward = self.forward_s, self.backward_s
        return max(
            count * (forward + backward),
            self.beyond_s + max(forward + count * backward, count * forward + backward),
        )

    def most(self, limit_s: float, count: int) -> int:
        """Return how many of ``count`` microbatches a limit leaves time for."""
        if limit_s == math.inf:  # of a stage that has no path to the last one
            return count
        forward, backward = self.forward_s, self.backward_s
        left_s = limit_s - self.beyond_s
        most = _multiples(limit_s, forward + backward, count)
        most = _multiples(left_s - forward, backward, most)
        return _multiples(left_s - backward, forward, most)


def _multiples(seconds: float, each_s: float, count: int) -> int:
    """Return how often some seconds go into others, ``count`` at most."""
    if seconds < 0:
        return 0
    return count if each_s <= 0 else min(count, math.floor(seconds / each_s))


def least_span_s(replicas: Mapping[ReplicaSpan, int], count: int, least_s: float = 0.0) -> float:
    """Return the least maximum of the replicas' spans over all ways to share out microbatches.

    Args:
        replicas: how many take so long.
        count: of the microbatches, at least 1.
        least_s: at most that maximum; a near one saves time.
    """
    if len(replicas) == 1:
        ((span, number),) = replicas.items()
        return span.seconds(-(-count // number))
    if least_s > 0:
        found = _least_from(replicas, count, least_s)
        if found is not None:
            return found
    return min(span.seconds(_least_share(span, replicas, count)) for span in replicas)


def _least_from(replicas: Mapping[ReplicaSpan, int], count: int, limit_s: float) -> float | None:
    """Return the least maximum, one microbatch more at a time; None if it is too far off."""
    for _ in range(MOST_STEPS):
        taken, next_s = 0, math.inf
        for span, number in replicas.items():
            most = span.most(limit_s * SLACK, count)
            taken += number * most
            if most < count:
                next_s = min(next_s, span.seconds(most + 1))
        if taken >= count:
            return limit_s
        limit_s = next_s
    return None


def _least_share(span: ReplicaSpan, replicas: Mapping[ReplicaSpan, int], count: int) -> int:
    """Return the least microbatches of a replica in whose time all replicas together take all."""
    low, high = 1, count
    while low < high:
        middle = (low + high) // 2
        limit_s = span.seconds(middle) * SLACK
        if sum(number * x.most(limit_s, count) for x, number in replicas.items()) >= count:
            high = middle
        else:
            low = middle + 1
    return high


@dataclass(frozen=True)
class SpanTable:
    """Spans of all intervals on a device of a type; matrices by cut and end.

    Attributes:
        forward_s, backward_s: of a microbatch.
        beyond_s: at least, from the end of its forward to the start of its backward.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    beyond_s: FloatArray

    def __getitem__(self, block: tuple[int | slice, slice | IntArray]) -> SpanTable:
        """Return the spans of some of the intervals."""
        return SpanTable(self.forward_s[block], self.backward_s[block], self.beyond_s[block])

    def seconds(self, count: int | IntArray) -> FloatArray:
        """Return the least time of so many microbatches, at least one."""
        forward, backward = self.forward_s, self.backward_s
        longer = np.maximum(forward + count * backward, count * forward + backward)
        return np.asarray(np.maximum(count * (forward + backward), self.beyond_s + longer))

    def most(self, limit_s: FloatArray, count: int) -> FloatArray:
        """Return how many of ``count`` microbatches limits leave time for."""
        forward, backward = self.forward_s, self.backward_s
        left_s = limit_s - self.beyond_s
        most = _whole_multiples(limit_s, forward + backward)
        most = np.minimum(most, _whole_multiples(left_s - forward, backward))
        most = np.minimum(most, _whole_multiples(left_s - backward, forward))
        return np.asarray(np.clip(most, 0, count))


@dataclass(frozen=True)
class MemoryLevel:
    """So many microbatches in flight at most, and what has to be recomputed for them to fit.

    Attributes:
        in_flight: between the start of a forward and the end of its gradient.
        extra_s: least recomputation of a microbatch, by cut and end; infinite if that is not
            enough.
    """

    in_flight: int
    extra_s: FloatArray


@dataclass(frozen=True)
class SpansInMemory:
    """Spans where memory binds, worked out for some numbers of microbatches.

    Of k microbatches in flight at a time each is there for a round trip, and each takes the
    recomputation that makes room for k: the span is the least over k of::

        max( span(n) with backward + extra,  ceil(n / k) (round trip + extra) )

    A number between two of those worked out counts as the lower one.

    Attributes:
        freely: spans without regard to memory.
        counts: numbers of microbatches, ascending from 0.
        by_count: seconds of so many, by cut and end.
    """

    freely: SpanTable
    counts: IntArray
    by_count: FloatArray

    def __getitem__(self, block: tuple[int | slice, slice]) -> SpansInMemory:
        """Return the spans of some of the intervals."""
        return SpansInMemory(self.freely[block], self.counts, self.by_count[(slice(None), *block)])

    def seconds(self, count: int | IntArray) -> FloatArray:
        """Return the least time of so many microbatches, at least one."""
        number = np.searchsorted(self.counts, count, side="right") - 1
        return np.maximum(self._at(number), self.freely.seconds(count))

    def _at(self, number: IntArray) -> FloatArray:
        place = np.indices(self.by_count.shape[1:], sparse=True)
        return np.asarray(self.by_count[(number, *place)])

    def most(self, limit_s: FloatArray, count: int) -> FloatArray:
        """Return how many of ``count`` microbatches limits leave time for."""
        last = int(np.searchsorted(self.counts, count, side="right")) - 1
        number = np.zeros(np.broadcast_shapes(limit_s.shape, self.by_count.shape[1:]), dtype=int)
        for bit in reversed(range(last.bit_length())):
            more = np.minimum(number + (1 << bit), last)
            number = np.where(self._at(more) <= limit_s, more, number)
        below_next = np.append(self.counts[1:], count + 1)[number] - 1
        return np.asarray(np.minimum(below_next, self.freely.most(limit_s, count)))


Spans = SpanTable | SpansInMemory


def spans_in_memory(
    freely: SpanTable, trip_s: FloatArray, levels: Sequence[MemoryLevel], count: int
) -> Spans:
    """Return spans of up to so many microbatches with regard to memory.

    Args:
        freely: spans without regard to it.
        trip_s: from the start of a forward to the end of its gradient, at least.
        levels: by microbatches in flight, the last one for all; none where memory does not bind.
        count: of the microbatches.
    """
    if not levels:
        return freely
    counts = _counts(count, max(MOST_WORKED_OUT // freely.forward_s.size, 2))
    rows = [_seconds_in_memory(freely, trip_s, levels, int(number)) for number in counts[1:]]
    return SpansInMemory(freely, counts, np.array([np.zeros_like(trip_s), *rows]))


def _seconds_in_memory(
    freely: SpanTable, trip_s: FloatArray, levels: Sequence[MemoryLevel], count: int
) -> FloatArray:
    least = np.full_like(trip_s, np.inf)
    for level in levels:
        spans = replace(freely, backward_s=freely.backward_s + level.extra_s)
        rounds_s = -(-count // level.in_flight) * (trip_s + level.extra_s)
        least = np.minimum(least, np.maximum(spans.seconds(count), rounds_s))
    return least


def _counts(count: int, most: int) -> IntArray:
    """Return all numbers up to ``count``, or as many spread evenly over their magnitudes."""
    if count < most:
        return np.arange(count + 1)
    spread = np.geomspace(1, count, min(most, MOST_COUNTS) - 1)
    return np.unique(np.append(0, spread.astype(int)))


def _whole_multiples(seconds: FloatArray, each_s: FloatArray) -> FloatArray:
    """Return how often some seconds go into others; infinite for none, negative if too few."""
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.floor(seconds / each_s)
    return np.where(each_s > 0, most, np.where(seconds >= 0, np.inf, -1.0))


def least_spans_s(tables: Sequence[Spans], counts: Sequence[int], count: int) -> FloatArray:
    """Return the least maximum of the replicas' spans over all ways to share out microbatches.

    Args:
        tables: spans by type.
        counts: replicas of each type.
        count: of the microbatches, at least 1.
    """
    held = [k for k, number in enumerate(counts) if number]
    if len(held) == 1:
        return tables[held[0]].seconds(-(-count // counts[held[0]]))
    best = np.full_like(tables[held[0]].seconds(1), np.inf)
    for k in held:
        low, high = np.ones(best.shape, dtype=int), np.full(best.shape, count)
        for _ in range(count.bit_length() + 1):
            middle = (low + high) // 2
            limit_s = tables[k].seconds(middle) * SLACK
            taken = sum(counts[other] * tables[other].most(limit_s, count) for other in held)
            enough = taken >= count
            high = np.where(enough, middle, high)
            low = np.where(enough, low, np.minimum(middle + 1, high))
        best = np.minimum(best, tables[k].seconds(high))
    return best
