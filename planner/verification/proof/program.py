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

MARGIN = 1 + 1e-9
"""A time is refuted only if one that is longer by this factor is: rounding refutes nothing."""
MOST_WORK = 6e7
"""Stages of all states, times classes, that are looked at for one time."""

Counted = Literal["way", "work"]
"""What a pass counts.

``way``: on every stage the forwards and the gradients that are on their way, then the way of the
last gradient back, or what its own stage still has to do. ``work``: on every stage all work, and
then its own reduction and step, but no way back. With whole backwards the first counts everything.
"""


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
        left_s: the same without them.
        come_s: when the first microbatches come, by number and pair.
        follow_s: what follows the last gradients that leave, by number and pair.
        since: in rows, of the last stage that was on one of two classes alone: the value, and the
            least bytes of activations and of gradients at all cuts since, by pair.
    """

    pairs: IntArray
    arrival_s: FloatArray
    left_s: FloatArray
    come_s: FloatArray
    follow_s: FloatArray
    since: FloatArray


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

    Args:
        stages: of the problem.
        case: of the plans that are looked at.
        limit_s: to keep.
        counted: what counts.
    """

    def __init__(
        self, stages: ProvedStages, case: StageCase, limit_s: float, counted: Counted
    ) -> None:
        self._stages, self._case, self._limit_s = stages, case, limit_s
        self._back = counted == "way"
        self._rest_s = stages.rest_ways_s if self._back else stages.rest_works_s
        self._path_s = stages.way_s if self._back else stages.forward_s
        self._count = stages.intervals.count
        # A row for each cut, a column for each pair: the stage before the cut is its second one.
        self._table = np.full((self._count, len(stages.vectors.used)), np.inf)
        replicas = int(stages.vectors.rows[stages.vectors.options].sum(axis=1).max())
        most = min(replicas, stages.layers.microbatches)
        self._columns = int(np.searchsorted(NUMBERS, most, side="right"))
        # By number, when first microbatches have passed that stage, and what follows before the
        # last gradients begin there.
        shape = (self._columns, *self._table.shape)
        self._past_s, self._home_s = np.full(shape, np.inf), np.full(shape, np.inf)
        # Of stages on both of two classes; see _Reached.since.
        self._since = np.full((3, *self._table.shape), np.inf)

    def refutes(self) -> bool:
        """Return whether the end is not reached within the limit."""
        for cut in range(self._count - 1):
            reached = self._reached(cut)
            if len(reached.pairs):
                self._extend(cut, reached)
        return bool(self._table[-1].min() > self._limit_s)

    def _reached(self, cut: int) -> _Reached:
        vectors = self._stages.vectors
        columns = self._columns
        if cut == 0:
            nothing = np.zeros(len(vectors.first))
            at_once = np.zeros((columns, len(vectors.first)))
            never = np.full((3, len(vectors.first)), np.inf)
            return _Reached(vectors.first, nothing, nothing, at_once, at_once, never)
        if not len(vectors.later) or not np.isfinite(self._table[cut]).any():
            none, nowhere = np.zeros(0), np.zeros((columns, 0))
            return _Reached(vectors.later[:0], none, none, nowhere, nowhere, np.zeros((3, 0)))
        there, back = self._stages.messages_s(cut)
        value = self._table[cut][vectors.before]
        busy = self._stages.channel_s(cut)[vectors.between]
        since = self._since_last(cut)
        changed = self._changed_s(cut, since)
        ways = np.flatnonzero((value + busy <= self._limit_s) & (changed <= self._limit_s))
        value, since = value[ways], since[:, ways]
        before, between = vectors.before[ways], vectors.between[ways]
        begins = np.flatnonzero(np.diff(vectors.way[ways], prepend=-1))
        pairs = vectors.later[vectors.way[ways[begins]]]

        def least(values: FloatArray) -> FloatArray:
            return np.asarray(np.minimum.reduceat(values, begins, axis=-1))

        messages = there + back if self._back else there
        arrival = least(value + messages[between])
        alive = np.flatnonzero(arrival + self._rest_s[vectors.used[pairs], cut] <= self._limit_s)

        def by_number(table: FloatArray, message: FloatArray) -> FloatArray:
            return least(table[:, cut, before] + message[between])[:, alive]

        come = by_number(self._past_s, there)
        follow = by_number(self._home_s, back) if self._back else np.zeros_like(come)
        arrival, left, since = arrival[alive], least(value)[alive], least(since)[:, alive]
        return _Reached(pairs[alive], arrival, left, come, follow, since)

    def _since_last(self, cut: int) -> FloatArray:
        """Return, by way, what is known since the last stage on one of two classes alone."""
        vectors = self._stages.vectors
        since = self._since[:, cut, vectors.before]
        alone = ~vectors.is_split[vectors.before]
        since[0, alone] = self._table[cut, vectors.before[alone]]
        for row, bytes_ in zip(since[1:], self._stages.crossing_bytes, strict=True):
            row[alone] = np.inf
            np.minimum(row, bytes_[cut], out=row)
        return since

    def _changed_s(self, cut: int, since: FloatArray) -> FloatArray:
        """Return, by way, what passes where all microbatches change the class; 0 elsewhere."""
        vectors = self._stages.vectors
        seconds = np.zeros(len(vectors.before))
        for side in (0, 1) if vectors.changes.any() else ():
            rows = np.flatnonzero(vectors.changes & (vectors.side[vectors.before] == side))
            passed = self._stages.changed_s(cut, (side, 1 - side), since[1:, rows])
            seconds[rows] = since[0, rows] + passed
        return seconds

    def _extend(self, cut: int, reached: _Reached) -> None:
        """Note what is reached by a stage on each pair's second vector, for every end."""
        stages = self._stages
        tried = self._tried(cut, reached)
        path = self._path_s[tried.option, cut, tried.end]
        value = self._spent_s(cut, tried, stages.tails) + path
        rest = self._rest_s[self._used_after(tried.pair), tried.end]
        kept = np.flatnonzero(value + rest <= self._limit_s)
        kept = kept[self._run(cut, tried.of(kept), self._most) >= stages.layers.microbatches]
        kept = kept[self._fits_in_flight(cut, tried.of(kept))]
        some = tried.of(kept)
        come, follow = reached.come_s[:, some.place], self._follow_s(cut, some, reached)
        enough = self._run_staggered(cut, some, come, follow) >= stages.layers.microbatches
        enough[enough] = self._run_in_order(
            cut, some.of(enough), come[:, enough], follow[:, enough]
        )
        kept, some = kept[enough], some.of(enough)
        come, follow = come[:, enough], follow[:, enough]
        # No two pairs lead to one state by a stage from the same cut.
        state = some.end, some.pair
        self._table[state] = np.minimum(self._table[state], value[kept])
        place = slice(None), *state
        self._since[place] = np.minimum(self._since[place], reached.since[:, some.place])
        self._note(cut, some, self._past_s, come, stages.forward_s)
        if self._back:
            self._note(cut, some, self._home_s, follow, stages.gradient_s)

    def _note(
        self, cut: int, tried: _Tried, table: FloatArray, around_s: FloatArray, each_s: FloatArray
    ) -> None:
        """Note when microbatches or, backwards in time, gradients have passed stages."""
        vectors = self._stages.vectors
        replicas = vectors.rows[vectors.stage[tried.pair]].sum(axis=1)
        passed = passed_s(around_s, each_s[tried.option, cut, tried.end], replicas)
        table[:, tried.end, tried.pair] = np.minimum(table[:, tried.end, tried.pair], passed)

    def _follow_s(self, cut: int, tried: _Tried, reached: _Reached) -> FloatArray:
        """Return what follows the last gradients of stages, by number."""
        follow = reached.follow_s[:, tried.place]
        if not self._back:
            return follow
        after = self._stages.tails.after_gradient_s[tried.option, cut, tried.end] + tried.end_s
        return np.asarray(np.maximum(follow, after))

    def _tried(self, cut: int, reached: _Reached) -> _Tried:
        """Return all stages that begin at a cut, that devices may hold and that may be in time."""
        stages, options = self._stages, self._stages.vectors.option[reached.pairs]
        ends = slice(cut + 1, None)
        least = reached.arrival_s[:, None] + self._path_s[options, cut, ends]
        rest = self._rest_s[self._used_after(reached.pairs), ends]
        in_time = least + rest <= self._limit_s
        row, place = np.nonzero(self._case.fits[options, cut, ends] & in_time)
        option, end, arrival = options[row], cut + 1 + place, reached.arrival_s[row]
        before = stages.head_s[option, cut] if self._back else arrival
        joint, step = self._case.joint_reduction_s, stages.step_s
        end_s = joint[option, cut, end] + step[option, cut, end]
        pairs, left = reached.pairs[row], reached.left_s[row]
        return _Tried(row, pairs, option, end, arrival, left, before, end_s)

    def _used_after(self, pairs: IntArray) -> IntArray:
        """Return the vectors used with the stage's own; they are numbered so that numbers add."""
        return np.asarray(self._stages.vectors.used[pairs] + self._stages.vectors.stage[pairs])

    def _spent_s(self, cut: int, tried: _Tried, tails: StageTails) -> FloatArray:
        """Return what passes before the first operation and after the last gradient."""
        if not self._back:
            return tried.arrival_s
        after_s = tails.after_gradient_s[tried.option, cut, tried.end] + tried.end_s
        return np.asarray(np.maximum(tried.arrival_s, tried.before_s + after_s))

    # --- what replicas can run --------------------------------------------------------------------

    def _run(
        self, cut: int, tried: _Tried, most: Callable[[int, int, _Tried], FloatArray]
    ) -> FloatArray:
        """Return how many microbatches the replicas of each stage can run together."""
        vectors = self._stages.vectors
        held = vectors.rows[vectors.stage[tried.pair]]
        total = np.zeros(len(held))
        for k in range(held.shape[1]):
            rows = np.flatnonzero(held[:, k])
            if len(rows):
                total[rows] += held[rows, k] * most(cut, k, tried.of(rows))
        return total

    def _fits_in_flight(self, cut: int, tried: _Tried) -> BoolArray:
        """Return whether replicas run all microbatches with what memory takes."""
        fits = ~self._stages.is_tight[tried.option, cut, tried.end]
        rows = np.flatnonzero(~fits)
        run = self._run(cut, tried.of(rows), self._most_in_memory)
        fits[rows] = run >= self._stages.layers.microbatches
        return np.asarray(fits)

    def _run_staggered(
        self, cut: int, tried: _Tried, come_s: FloatArray, follow_s: FloatArray
    ) -> FloatArray:
        """Return how many microbatches replicas can run that begin and end one after the other."""
        stages = self._stages
        held = stages.vectors.rows[stages.vectors.stage[tried.pair]]
        total, around = np.zeros(len(held)), around_s(come_s, follow_s)
        for k in range(held.shape[1]):
            numbers = replicas_by_number(held[:, k], len(come_s))
            for place, number in enumerate(numbers):
                rows = np.flatnonzero(number)
                if len(rows):
                    late = tried.of(rows).later(come_s[place, rows], around[place, rows])
                    total[rows] += number[rows] * self._most(cut, k, late)
        return total

    def _run_in_order(
        self, cut: int, tried: _Tried, come_s: FloatArray, follow_s: FloatArray
    ) -> BoolArray:
        """Return whether replicas run all microbatches, those of all classes numbered together.

        One of all replicas begins first, one second and so on, and seen from the end so they end.
        Both numbers at once would be wrong: replicas of unlike classes may differ in each.
        """
        stages = self._stages
        all_held = stages.vectors.rows[stages.vectors.stage[tried.pair]]
        runs = np.ones(len(all_held), dtype=bool)
        for held in np.unique(all_held[(all_held > 0).sum(axis=1) > 1], axis=0):
            rows = np.flatnonzero((all_held == held).all(axis=1))
            some, come, follow = tried.of(rows), come_s[:, rows], follow_s[:, rows]
            begins = [(come[n], come[n] + follow[0]) for n in range(len(come))]
            ends = [(come[0], come[0] + follow[n]) for n in range(len(come))]
            for numbered in (begins, ends):
                most = {
                    (int(k), place): self._most(cut, int(k), some.later(*around))
                    for k in np.flatnonzero(held)
                    for place, around in enumerate(numbered)
                }
                runs[rows] &= most_in_order(held, most) >= stages.layers.microbatches
        return runs

    def _most(self, cut: int, k: int, tried: _Tried) -> FloatArray:
        """Return how many microbatches a device of a class can run if memory suffices."""
        stages, count = self._stages, self._stages.layers.microbatches
        rows, tails = np.zeros(len(tried.end)), stages.tails
        most = self._most_in_flight(cut, k, tried, ProvedMemoryLevel(count, rows), tails)
        port = fewest([(self._limit_s - tried.left_s, stages.port_s[k][cut, tried.end])], count)
        return np.asarray(np.maximum(np.minimum(most, port), 0.0))

    def _most_in_memory(self, cut: int, k: int, tried: _Tried) -> FloatArray:
        """Return how many microbatches a device of a class can run with what memory takes."""
        stages = self._stages
        levels = stages.memory_levels[stages.kinds[k]]
        if not levels:
            return np.full(len(tried.end), float(stages.layers.microbatches))
        tails, most = stages.tails_with_reruns, np.zeros(len(tried.end))
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
        stages, kind, place = self._stages, self._stages.kinds[k], (cut, tried.end)
        seconds, all_ = stages.seconds[kind], stages.layers.microbatches
        forward, ahead = seconds.forward[place], stages.ahead_s[tried.option, tried.end]
        gradient, backward = (
            row[place] + level.again_s for row in (seconds.gradient, seconds.backward)
        )
        after = tails.after_backward_s[kind][tried.option, cut, tried.end]
        spare = self._limit_s - tried.before_s - tried.end_s - after
        rules = trips(spare, forward, backward, ahead)
        if self._back:
            spare = self._limit_s - self._spent_s(cut, tried, tails)
            rules += trips(spare, forward, gradient, ahead)
        most = fewest(rules, all_)
        if level.in_flight < all_:
            # One after the other in as many rows as are in flight, each for a round trip.
            rows = fewest([(spare, forward + ahead + gradient)], all_)
            most = np.minimum(most, level.in_flight * rows)
        return np.asarray(most)
