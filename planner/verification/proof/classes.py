"""Whether any sequence of stages keeps a time: one pass over cuts and devices in use.

The least value of a state is the sum of what has to pass before the next stage's first forward and
of what has to follow its last gradient. A stage keeps the time if its replicas, of which each can
run only so many microbatches in what is left, together run all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.errors import PipeplanError
from planner.verification.proof.figures import BoolArray, FloatArray, IntArray
from planner.verification.proof.memory import Level
from planner.verification.proof.stages import StageFigures, StageTails
from planner.verification.proof.staggered import (
    NUMBERS,
    around_s,
    most_in_order,
    passed_s,
    replicas_by_number,
)
from planner.verification.proof.terms import Term, fewest, round_trips
from planner.verification.proof.tied import StageCase
from planner.verification.proof.vectors import Vectors

MOST_WORK = 6e7
"""Stages of all states, times classes, that are looked at for one time."""


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


class ClassPass:
    """One pass for one time.

    Its table has for each cut and pair of vectors, of which the second is of the stage before the
    cut: the least value; by number, when first microbatches have passed that stage, and what
    follows before the last gradients begin there; and of the last stage that was on one of two
    classes alone the value, and the least bytes of activations and of gradients at all cuts since.

    Args:
        stages: of the problem.
        case: of the plans that are looked at.
        limit_s: to keep.
        back: what counts. If true, on every stage the forwards and the gradients that are on their
            way, then the way of the last gradient back, or what its own stage still has to do.
            Otherwise on every stage all work, its own reduction and step, and no way back. With
            whole backwards the first counts everything.
    """

    def __init__(self, stages: StageFigures, case: StageCase, limit_s: float, back: bool) -> None:
        self._stages, self._vectors, self._case = stages, stages.vectors, case
        self._limit_s, self._back, self._figures = limit_s, back, stages.figures
        self._microbatches = stages.figures.microbatches
        self._used_after = self._vectors.used + self._vectors.stage
        self._seconds, layer = stages.figures.of_interval, stages.figures.of_layer
        self._rest_s = stages.rest_of_all_s(
            layer.forward + (layer.gradient if back else layer.backward)
        )
        self._path_s = stages.way_s if back else stages.forward_s
        most = min(int(stages.held.sum(axis=1).max()), self._microbatches)
        numbers = int(np.searchsorted(NUMBERS, most, side="right"))
        self._past, self._home = slice(1, 1 + numbers), slice(1 + numbers, 1 + 2 * numbers)
        self._since = slice(1 + 2 * numbers, 4 + 2 * numbers)
        shape = self._since.stop, len(stages.rest_s), len(self._vectors.used)
        self._table = np.full(shape, np.inf)

    def refutes(self) -> bool:
        """Return whether the end is not reached within the limit."""
        first = self._vectors.first
        known = np.zeros((len(self._table), len(first)))
        known[self._since] = np.inf
        self._extend(0, first, known[0], known)
        for cut in range(1, self._table.shape[1] - 1):
            self._pass(cut)
        return bool(self._table[0, -1].min() > self._limit_s)

    def _pass(self, cut: int) -> None:
        """Lead every stage that ends at a cut to the stages that begin there."""
        vectors, at = self._vectors, self._stages.at(cut)
        value = self._table[0, cut, vectors.before]
        ways = np.flatnonzero(value + at.channel_s[vectors.between] <= self._limit_s)
        since = self._since_last(cut, vectors.before[ways])
        in_time = self._changed_s(cut, ways, since) <= self._limit_s
        ways, since = ways[in_time], since[:, in_time]
        if not len(ways):
            return
        there, back = at.there_s[vectors.between[ways]], at.back_s[vectors.between[ways]]
        known = self._table[:, cut, vectors.before[ways]]
        arrival = known[0] + (there + back if self._back else there)
        known[self._past] += there
        known[self._home] = known[self._home] + back if self._back else 0.0
        known[self._since] = since
        begins = np.flatnonzero(np.diff(vectors.after[ways], prepend=-1))
        pairs = vectors.after[ways[begins]]
        arrival = np.minimum.reduceat(arrival, begins)
        known = np.minimum.reduceat(known, begins, axis=1)
        alive = arrival + self._rest_s[vectors.used[pairs], cut] <= self._limit_s
        if alive.any():
            self._extend(cut, pairs[alive], arrival[alive], known[:, alive])

    def _since_last(self, cut: int, before: IntArray) -> FloatArray:
        """Return, by way, what is known since the last stage on one of two classes alone."""
        since = self._table[self._since, cut, before]
        alone = ~self._vectors.is_split[before]
        since[0, alone] = self._table[0, cut, before[alone]]
        since[1:, alone] = np.inf
        sent, returned = self._figures.sent_bytes[cut], self._figures.returned_bytes[cut]
        since[1:] = np.minimum(since[1:], [[sent], [returned]])
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

    def _extend(self, cut: int, pairs: IntArray, arrival: FloatArray, known: FloatArray) -> None:
        """Note what is reached by a stage on each pair's second vector, for every end.

        Args:
            cut: where the stages begin.
            pairs: that it is reached with.
            arrival: what has passed and is to follow, with the messages of the cut, by pair.
            known: of the table, with the messages of the cut, by pair.
        """
        stages, tried = self._stages, self._tried(cut, pairs, arrival, known[0])
        place = tried.option, cut, tried.end
        value = self._spent_s(cut, tried, stages.tails) + self._path_s[place]
        rest_s = self._rest_s[self._used_after[tried.pair], tried.end]
        kept = value + rest_s <= self._limit_s
        tried, value = tried.of(kept), value[kept]
        for runs in (self._run_alone, self._run_staggered, self._run_in_order):
            enough = runs(cut, tried, *self._numbered(cut, tried, known)) >= self._microbatches
            tried, value = tried.of(enough), value[enough]
        (come, follow), known = self._numbered(cut, tried, known), known[:, tried.place]
        place, replicas = (tried.option, cut, tried.end), stages.held[tried.option].sum(axis=1)
        known[0] = value
        known[self._past] = passed_s(come, stages.forward_s[place], replicas)
        known[self._home] = passed_s(follow, stages.gradient_s[place], replicas)
        # No two pairs lead to one state by a stage from the same cut.
        state = slice(None), tried.end, tried.pair
        self._table[state] = np.minimum(self._table[state], known)

    def _tried(self, cut: int, pairs: IntArray, arrival: FloatArray, left: FloatArray) -> _Tried:
        """Return all stages that begin at a cut, that devices may hold and that may be in time."""
        stages, option, ends = self._stages, self._vectors.option[pairs], slice(cut + 1, None)
        least_s = arrival[:, None] + self._path_s[option, cut, ends]
        in_time = least_s + self._rest_s[self._used_after[pairs], ends] <= self._limit_s
        row, end = np.nonzero(self._case.fits[option, cut, ends] & in_time)
        option, end, arrival = option[row], cut + 1 + end, arrival[row]
        before = stages.head_s[option, cut] if self._back else arrival
        place = option, cut, end
        end_s = self._case.joint_reduction_s[place] + stages.step_s[place]
        return _Tried(row, pairs[row], option, end, arrival, left[row], before, end_s)

    def _numbered(
        self, cut: int, tried: _Tried, known: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return when first microbatches come to stages, and what follows their last gradients."""
        come, follow = known[self._past, tried.place], known[self._home, tried.place]
        if self._back:
            after_s = self._stages.tails.after_gradient_s[tried.option, cut, tried.end]
            follow = np.maximum(follow, after_s + tried.end_s)
        return come, follow

    def _spent_s(self, cut: int, tried: _Tried, tails: StageTails) -> FloatArray:
        """Return what passes before the first operation and after the last gradient."""
        if not self._back:
            return tried.arrival_s
        after_s = tails.after_gradient_s[tried.option, cut, tried.end] + tried.end_s
        return np.asarray(np.maximum(tried.arrival_s, tried.before_s + after_s))

    # --- what replicas can run --------------------------------------------------------------------

    def _run_alone(self, cut: int, tried: _Tried, *_: FloatArray) -> FloatArray:
        """Return how many microbatches the replicas of each stage can run, each by itself."""
        stages, total = self._stages, np.zeros(len(tried.pair))
        for k, held in enumerate(stages.held[tried.option].T):
            rows = np.flatnonzero(held)
            some = tried.of(rows)
            most, level = self._most(cut, k, some), stages.memory_levels[stages.kinds[k]]
            tight = np.flatnonzero(stages.is_tight[some.option, cut, some.end])
            if level and len(tight):
                most[tight] = np.minimum(most[tight], self._most_in_memory(cut, k, some.of(tight)))
            total[rows] += held[rows] * most
        return total

    def _run_staggered(
        self, cut: int, tried: _Tried, come_s: FloatArray, follow_s: FloatArray
    ) -> FloatArray:
        """Return how many microbatches replicas can run that begin and end one after the other."""
        around, total = around_s(come_s, follow_s), np.zeros(len(tried.pair))
        for k, held in enumerate(self._stages.held[tried.option].T):
            for place, number in enumerate(replicas_by_number(held, len(come_s))):
                rows = np.flatnonzero(number)
                if len(rows):
                    late = tried.of(rows).later(come_s[place, rows], around[place, rows])
                    total[rows] += number[rows] * self._most(cut, k, late)
        return total

    def _run_in_order(
        self, cut: int, tried: _Tried, come_s: FloatArray, follow_s: FloatArray
    ) -> FloatArray:
        """Return how many microbatches replicas run, those of all classes numbered together.

        One of all replicas begins first, one second and so on, and seen from the end so they end.
        Both numbers at once would be wrong: replicas of unlike classes may differ in each.
        """
        all_held, total = self._stages.held[tried.option], np.full(len(tried.pair), np.inf)
        for held in np.unique(all_held[(all_held > 0).sum(axis=1) > 1], axis=0):
            rows = np.flatnonzero((all_held == held).all(axis=1))
            some, come, follow = tried.of(rows), come_s[:, rows], follow_s[:, rows]
            begins = zip(come, come + follow[0], strict=True)
            ends = ((come[0], come[0] + row) for row in follow)
            for order in (begins, ends):
                most = {
                    (int(k), place): self._most(cut, int(k), late)
                    for place, late in enumerate(some.later(*around) for around in order)
                    for k in np.flatnonzero(held)
                }
                total[rows] = np.minimum(total[rows], most_in_order(held, most))
        return total

    def _most(self, cut: int, k: int, tried: _Tried) -> FloatArray:
        """Return how many microbatches a device of a class can run if memory suffices."""
        level = Level(self._microbatches, np.zeros(len(tried.end)))
        most = self._most_in_flight(cut, k, tried, level, self._stages.tails)
        port = Term(self._limit_s - tried.left_s, self._stages.port_s[k, cut, tried.end])
        return np.maximum(np.minimum(most, fewest([port], self._microbatches)), 0.0)

    def _most_in_memory(self, cut: int, k: int, tried: _Tried) -> FloatArray:
        """Return how many microbatches a device of a class can run with what memory takes."""
        most, more = np.zeros(len(tried.end)), np.full(len(tried.end), np.inf)
        for count, again_s in reversed(self._stages.memory_levels[self._stages.kinds[k]]):
            again = again_s[cut, tried.end]
            # A level on which as much runs again as on one with more in flight is no better.
            rows = np.flatnonzero(again < more)
            level, more = Level(count, again[rows]), again
            tails = self._stages.tails_with_reruns
            run = self._most_in_flight(cut, k, tried.of(rows), level, tails)
            most[rows] = np.maximum(most[rows], run)
        return most

    def _most_in_flight(
        self, cut: int, k: int, tried: _Tried, level: Level, tails: StageTails
    ) -> FloatArray:
        """Return how many microbatches a device can run with no more of them in flight."""
        kind = self._stages.kinds[k]
        forward, gradient, backward, *_ = (row[kind, cut, tried.end] for row in self._seconds)
        gradient, backward = gradient + level.again_s, backward + level.again_s
        ahead = self._stages.ahead_s[tried.option, tried.end]
        after = tails.after_backward_s[kind, tried.option, cut, tried.end]
        spare = self._limit_s - tried.before_s - tried.end_s - after
        waits = self._stages.waits_s[0, k, cut], self._stages.waits_s[1, k, tried.end]
        terms = round_trips(spare, forward, backward, ahead, waits)
        if self._back:
            spare = self._limit_s - self._spent_s(cut, tried, tails)
            terms += round_trips(spare, forward, gradient, ahead, waits)
        most = fewest(terms, self._microbatches)
        if level.in_flight < self._microbatches:
            # One after the other in as many rows as are in flight, each for a round trip.
            turns = fewest([Term(spare, forward + ahead + gradient)], self._microbatches)
            most = np.minimum(most, level.in_flight * turns)
        return most
