"""Whether any sequence of stages keeps a time: one pass over cuts and devices in use.

The least value of a state is the sum of what has to pass before the next stage's first forward and
of what has to follow its last gradient. A stage keeps the time if its replicas, of which each can
run only so many microbatches in what is left, together run all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from planner.errors import PipeplanError
from planner.verification.proof.layers import BoolArray, FloatArray, IntArray
from planner.verification.proof.memory import ProvedMemoryLevel
from planner.verification.proof.rules import fewest, trips
from planner.verification.proof.stages import ProvedStages, StageTails
from planner.verification.proof.staggered import (
    NUMBERS,
    around_s,
    most_in_order,
    passed_s,
    replicas_by_number,
)
from planner.verification.proof.tied import StageCase
from planner.verification.proof.vectors import Vectors

MOST_WORK = 6e7
"""Stages of all states, times classes, that are looked at for one time."""

Counted = Literal["way", "work"]
"""What a pass counts.

``way``: on every stage the forwards and the gradients that are on their way, then the way of the
last gradient back, or what its own stage still has to do. ``work``: on every stage all work, and
then its own reduction and step, but no way back. With whole backwards the first counts everything.
"""

Numbered = tuple[FloatArray, FloatArray]
"""When first microbatches come to stages, and what follows their last gradients; by number."""


def require_few_states(vectors: Vectors, cuts: int) -> None:
    """Refuse classes for which a pass takes too long.

    Raises:
        PipeplanError: if there are too many stages of states, each on every class.
    """
    classes = vectors.rows.shape[1]
    work = (len(vectors.used) * cuts / 2 * classes + len(vectors.before)) * float(cuts)
    if work > MOST_WORK:
        raise PipeplanError(
            f"certificate: {len(vectors.used)} stages by devices at each of {cuts} cuts are too "
            "many to check"
        )


@dataclass(frozen=True)
class _Reached:
    """Pairs of vectors that a cut is reached with, and a stage's place after it.

    Attributes:
        pairs: their numbers.
        arrival_s: what has passed and is to follow, with the messages of the cut.
        known: by row of the table and pair, see :class:`ProofPass`.
    """

    pairs: IntArray
    arrival_s: FloatArray
    known: FloatArray


@dataclass(frozen=True)
class _Tried:
    """Stages that begin at a cut, of which each may be reached in time; one entry for each.

    Attributes:
        place: where among the pairs that the cut is reached with.
        pair: numbers of devices used before it and of its own.
        option: on which devices.
        end: the cut behind it.
        arrival_s: before its first operation and after its last that the pass counts.
        left_s: the same without the messages at the cut.
        before_s: before its first operation, at least.
        end_s: all-reduces together with other stages, and its optimizer step.
    """

    place: IntArray
    pair: IntArray
    option: IntArray
    end: IntArray
    arrival_s: FloatArray
    left_s: FloatArray
    before_s: FloatArray
    end_s: FloatArray

    def of(self, rows: IntArray | BoolArray) -> _Tried:
        """Return some of them."""
        return _Tried(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def later(self, before_s: FloatArray, around_s: FloatArray) -> _Tried:
        """Return the same for replicas with more before them, and more before and after them."""
        return replace(
            self,
            before_s=np.maximum(self.before_s, before_s),
            arrival_s=np.maximum(self.arrival_s, around_s),
        )


class ProofPass:
    """One pass for one time.

    Its table has for each cut and pair of vectors, of which the second is of the stage before the
    cut: the least value; by number, when first microbatches have passed that stage, and what
    follows before the last gradients begin there; and of the last stage that was on one of two
    classes alone the value, and the least bytes of activations and of gradients at all cuts since.

    Args:
        stages: of the problem.
        case: of the plans that are looked at.
        limit_s: to keep.
        counted: what counts.
    """

    def __init__(
        self, stages: ProvedStages, case: StageCase, limit_s: float, counted: Counted
    ) -> None:
        self._stages, self._vectors, self._case = stages, stages.vectors, case
        self._limit_s, self._back = limit_s, counted == "way"
        self._microbatches = stages.layers.microbatches
        layers = stages.layers
        self._rest_s = stages.rest_of_all_s(layers.gradient_s if self._back else layers.backward_s)
        self._path_s = stages.way_s if self._back else stages.forward_s
        vectors, self._count = stages.vectors, stages.intervals.count
        replicas = int(vectors.rows[vectors.options].sum(axis=1).max())
        most = min(replicas, self._microbatches)
        columns = int(np.searchsorted(NUMBERS, most, side="right"))
        self._past, self._home = slice(1, 1 + columns), slice(1 + columns, 1 + 2 * columns)
        self._since = slice(1 + 2 * columns, 4 + 2 * columns)
        shape = self._since.stop, self._count, len(vectors.used)
        self._table = np.full(shape, np.inf)

    def refutes(self) -> bool:
        """Return whether the end is not reached within the limit."""
        for cut in range(self._count - 1):
            reached = self._reached(cut) if cut else self._at_begin()
            if reached is not None and len(reached.pairs):
                self._extend(cut, reached)
        return bool(self._table[0, -1].min() > self._limit_s)

    def _at_begin(self) -> _Reached:
        known = np.zeros((len(self._table), len(self._vectors.first)))
        known[self._since] = np.inf
        return _Reached(self._vectors.first, known[0], known)

    def _reached(self, cut: int) -> _Reached | None:
        vectors, (there, back) = self._vectors, self._stages.messages_s(cut)
        value = self._table[0, cut, vectors.before]
        busy = self._stages.channel_s(cut)[vectors.between]
        ways = np.flatnonzero(value + busy <= self._limit_s)
        since = self._since_last(cut, vectors.before[ways])
        in_time = self._changed_s(cut, ways, since) <= self._limit_s
        ways, since = ways[in_time], since[:, in_time]
        if not len(ways):
            return None
        there, back = (row[vectors.between[ways]] for row in (there, back))
        known = self._table[:, cut, vectors.before[ways]]
        arrival = known[0] + (there + back if self._back else there)
        known[self._past] += there
        known[self._home] = known[self._home] + back if self._back else 0.0
        known[self._since] = since
        begins = np.flatnonzero(np.diff(vectors.way[ways], prepend=-1))
        pairs = vectors.later[vectors.way[ways[begins]]]
        arrival = np.minimum.reduceat(arrival, begins)
        alive = np.flatnonzero(arrival + self._rest_s[vectors.used[pairs], cut] <= self._limit_s)
        known = np.minimum.reduceat(known, begins, axis=1)[:, alive]
        return _Reached(pairs[alive], arrival[alive], known)

    def _since_last(self, cut: int, before: IntArray) -> FloatArray:
        """Return, by way, what is known since the last stage on one of two classes alone."""
        layers, since = self._stages.layers, self._table[self._since, cut, before]
        alone = ~self._vectors.is_split[before]
        since[0, alone] = self._table[0, cut, before[alone]]
        since[1:, alone] = np.inf
        bytes_ = np.array([layers.sent_bytes[cut], layers.returned_bytes[cut]])
        since[1:] = np.minimum(since[1:], bytes_[:, None])
        return since

    def _changed_s(self, cut: int, ways: IntArray, since: FloatArray) -> FloatArray:
        """Return, by way, what passes where all microbatches change the class; 0 elsewhere."""
        vectors, seconds = self._vectors, np.zeros(len(ways))
        changes, side = vectors.changes[ways], vectors.side[vectors.before[ways]]
        for source in (0, 1) if changes.any() else ():
            rows = np.flatnonzero(changes & (side == source))
            passed = self._stages.changed_s(cut, (source, 1 - source), since[1:, rows])
            seconds[rows] = since[0, rows] + passed
        return seconds

    def _extend(self, cut: int, reached: _Reached) -> None:
        """Note what is reached by a stage on each pair's second vector, for every end."""
        stages, tried = self._stages, self._tried(cut, reached)
        place = tried.option, cut, tried.end
        value = self._spent_s(cut, tried, stages.tails) + self._path_s[place]
        kept = value + self._rest_s[self._used_after(tried.pair), tried.end] <= self._limit_s
        tried, value = tried.of(kept), value[kept]
        for runs in (self._run_alone, self._run_in_flight, self._run_staggered, self._run_in_order):
            enough = runs(cut, tried, reached) >= self._microbatches
            tried, value = tried.of(enough), value[enough]
        known, (come, follow) = reached.known[:, tried.place], self._numbered(cut, tried, reached)
        place = tried.option, cut, tried.end
        replicas = self._replicas(tried).sum(axis=1)
        known[0] = value
        known[self._past] = passed_s(come, stages.forward_s[place], replicas)
        known[self._home] = passed_s(follow, stages.gradient_s[place], replicas)
        # No two pairs lead to one state by a stage from the same cut.
        state = slice(None), tried.end, tried.pair
        self._table[state] = np.minimum(self._table[state], known)

    def _numbered(self, cut: int, tried: _Tried, reached: _Reached) -> Numbered:
        """Return when first microbatches come to stages, and what follows their last gradients."""
        come, follow = (reached.known[rows, tried.place] for rows in (self._past, self._home))
        if not self._back:
            return come, follow
        after = self._stages.tails.after_gradient_s[tried.option, cut, tried.end] + tried.end_s
        return come, np.maximum(follow, after)

    def _tried(self, cut: int, reached: _Reached) -> _Tried:
        """Return all stages that begin at a cut, that devices may hold and that may be in time."""
        stages, option = self._stages, self._vectors.option[reached.pairs]
        ends = slice(cut + 1, None)
        least = reached.arrival_s[:, None] + self._path_s[option, cut, ends]
        rest = self._rest_s[self._used_after(reached.pairs), ends]
        in_time = least + rest <= self._limit_s
        row, end = np.nonzero(self._case.fits[option, cut, ends] & in_time)
        option, end, arrival = option[row], cut + 1 + end, reached.arrival_s[row]
        before = stages.head_s[option, cut] if self._back else arrival
        place = option, cut, end
        end_s = self._case.joint_reduction_s[place] + stages.step_s[place]
        left = reached.known[0, row]
        return _Tried(row, reached.pairs[row], option, end, arrival, left, before, end_s)

    def _used_after(self, pairs: IntArray) -> IntArray:
        """Return the vectors used with the stage's own; they are numbered so that numbers add."""
        return np.asarray(self._vectors.used[pairs] + self._vectors.stage[pairs])

    def _spent_s(self, cut: int, tried: _Tried, tails: StageTails) -> FloatArray:
        """Return what passes before the first operation and after the last gradient."""
        if not self._back:
            return tried.arrival_s
        after_s = tails.after_gradient_s[tried.option, cut, tried.end] + tried.end_s
        return np.asarray(np.maximum(tried.arrival_s, tried.before_s + after_s))

    # --- what replicas can run --------------------------------------------------------------------

    def _replicas(self, tried: _Tried) -> IntArray:
        """Return the replicas of each stage, by class."""
        return np.asarray(self._vectors.rows[self._vectors.stage[tried.pair]])

    def _run(
        self, cut: int, tried: _Tried, most: Callable[[int, int, _Tried], FloatArray]
    ) -> FloatArray:
        """Return how many microbatches the replicas of each stage can run together."""
        total = np.zeros(len(tried.pair))
        for k, held in enumerate(self._replicas(tried).T):
            rows = np.flatnonzero(held)
            if len(rows):
                total[rows] += held[rows] * most(cut, k, tried.of(rows))
        return total

    def _run_alone(self, cut: int, tried: _Tried, _: _Reached) -> FloatArray:
        """Return how many microbatches replicas can run if memory suffices."""
        return self._run(cut, tried, self._most)

    def _run_in_flight(self, cut: int, tried: _Tried, _: _Reached) -> FloatArray:
        """Return how many microbatches replicas can run with what memory takes."""
        total = np.full(len(tried.pair), float(self._microbatches))
        rows = np.flatnonzero(self._stages.is_tight[tried.option, cut, tried.end])
        total[rows] = self._run(cut, tried.of(rows), self._most_in_memory)
        return total

    def _run_staggered(self, cut: int, tried: _Tried, reached: _Reached) -> FloatArray:
        """Return how many microbatches replicas can run that begin and end one after the other."""
        come_s, follow_s = self._numbered(cut, tried, reached)
        around = around_s(come_s, follow_s)
        total = np.zeros(len(tried.pair))
        for k, held in enumerate(self._replicas(tried).T):
            for place, number in enumerate(replicas_by_number(held, len(come_s))):
                rows = np.flatnonzero(number)
                if len(rows):
                    late = tried.of(rows).later(come_s[place, rows], around[place, rows])
                    total[rows] += number[rows] * self._most(cut, k, late)
        return total

    def _run_in_order(self, cut: int, tried: _Tried, reached: _Reached) -> FloatArray:
        """Return how many microbatches replicas run, those of all classes numbered together.

        One of all replicas begins first, one second and so on, and seen from the end so they end.
        Both numbers at once would be wrong: replicas of unlike classes may differ in each.
        """
        all_held, total = self._replicas(tried), np.full(len(tried.pair), np.inf)
        numbered = self._numbered(cut, tried, reached)
        for held in np.unique(all_held[(all_held > 0).sum(axis=1) > 1], axis=0):
            rows = np.flatnonzero((all_held == held).all(axis=1))
            some, (come, follow) = tried.of(rows), (row[:, rows] for row in numbered)
            begins = [(come[n], come[n] + follow[0]) for n in range(len(come))]
            ends = [(come[0], come[0] + follow[n]) for n in range(len(come))]
            for order in (begins, ends):
                most = {
                    (int(k), place): self._most(cut, int(k), some.later(*around))
                    for k in np.flatnonzero(held)
                    for place, around in enumerate(order)
                }
                total[rows] = np.minimum(total[rows], most_in_order(held, most))
        return total

    def _most(self, cut: int, k: int, tried: _Tried) -> FloatArray:
        """Return how many microbatches a device of a class can run if memory suffices."""
        rows, count = np.zeros(len(tried.end)), self._microbatches
        level = ProvedMemoryLevel(count, rows)
        most = self._most_in_flight(cut, k, tried, level, self._stages.tails)
        port_s = self._stages.port_s[k, cut, tried.end]
        port = fewest([(self._limit_s - tried.left_s, port_s)], count)
        return np.asarray(np.maximum(np.minimum(most, port), 0.0))

    def _most_in_memory(self, cut: int, k: int, tried: _Tried) -> FloatArray:
        """Return how many microbatches a device of a class can run with what memory takes."""
        levels = self._stages.memory_levels[self._stages.kinds[k]]
        if not levels:
            return np.full(len(tried.end), float(self._microbatches))
        tails, most = self._stages.tails_with_reruns, np.zeros(len(tried.end))
        more = np.full(len(most), np.inf)
        for count, again_s in reversed(levels):
            again = again_s[cut, tried.end]
            # A level on which as much runs again as on one with more in flight is no better.
            rows = np.flatnonzero(again < more)
            level, more = ProvedMemoryLevel(count, again[rows]), again
            run = self._most_in_flight(cut, k, tried.of(rows), level, tails)
            most[rows] = np.maximum(most[rows], run)
        return most

    def _most_in_flight(
        self, cut: int, k: int, tried: _Tried, level: ProvedMemoryLevel, tails: StageTails
    ) -> FloatArray:
        """Return how many microbatches a device can run with no more of them in flight."""
        stages, kind = self._stages, self._stages.kinds[k]
        rows, place = stages.intervals, (kind, cut, tried.end)
        forward, ahead = rows.forward_s[place], stages.ahead_s[tried.option, tried.end]
        gradient = rows.gradient_s[place] + level.again_s
        backward = rows.backward_s[place] + level.again_s
        after = tails.after_backward_s[kind][tried.option, cut, tried.end]
        spare = self._limit_s - tried.before_s - tried.end_s - after
        rules = trips(spare, forward, backward, ahead)
        if self._back:
            spare = self._limit_s - self._spent_s(cut, tried, tails)
            rules += trips(spare, forward, gradient, ahead)
        most = fewest(rules, self._microbatches)
        if level.in_flight < self._microbatches:
            # One after the other in as many rows as are in flight, each for a round trip.
            turns = fewest([(spare, forward + ahead + gradient)], self._microbatches)
            most = np.minimum(most, level.in_flight * turns)
        return np.asarray(most)
