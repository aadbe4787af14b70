"""The loop of synchronous strategies: a round is one iteration of all workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from planner.cluster.link_table import FloatArray, IntArray
from planner.sync.simulation.course import Course
from planner.sync.simulation.training import Training


@dataclass(frozen=True)
class Round:
    """One iteration of the active workers; arrays have one entry per worker.

    Attributes:
        workers: their numbers, ascending.
        start_s: starts of their iterations.
        slowdown, next_slowdown: slowdowns of this iteration and the next one.
    """

    workers: tuple[int, ...]
    start_s: FloatArray
    slowdown: FloatArray
    next_slowdown: FloatArray


@dataclass(frozen=True)
class Rounded:
    """The result of a round.

    Attributes:
        next_start_s: start of each worker's next iteration.
        reduced_s: when each rank's gradients were reduced, or each worker had its parameters back,
            by worker and pipeline rank.
        updated_s: when the parameters were updated.
        sent_bytes: bytes sent by all workers.
    """

    next_start_s: FloatArray
    reduced_s: FloatArray
    updated_s: float
    sent_bytes: float


class RoundTiming(Protocol):
    """Computes when the workers of a round may continue; it keeps state between rounds."""

    def run(self, round_: Round) -> Rounded:
        """Run a round; rounds come in order."""


class Update(Protocol):
    """Updates the parameters in a round."""

    staleness: int

    def run(self, training: Training, workers: IntArray, iteration: int) -> None:
        """Update the parameters with the gradients of these workers' iterations."""

    def models(self) -> FloatArray:
        """Return the weights to observe: one row that all workers share."""


@dataclass(frozen=True)
class RoundsRun:
    """The result of a run of rounds.

    Attributes:
        time_s: virtual time.
        done: iterations by worker.
        busy_s: seconds in which workers computed.
        sent_bytes: bytes sent by all workers.
    """

    time_s: float
    done: list[int]
    busy_s: float
    sent_bytes: float


class Rounds:
    """Runs rounds until all iterations are done.

    A worker that leaves is left out from the next round on; one that returns, with the parameters
    of the others, begins with the first round after. A round pauses while no worker is active.

    Args:
        course: the state of the run.
    """

    def __init__(self, course: Course) -> None:
        world = course.world
        self._world, self._slowdowns, self._training = world, course.slowdowns, course.training
        self._observer, self._limit = course.observer, course.iterations
        self._faults, self._recorder = course.faults, course.recorder
        self._start_s = np.zeros(world.workers)
        self._active: tuple[int, ...] = tuple(range(world.workers))
        self._deserted = tuple(self._deserted_spans())

    def run(self, timing: RoundTiming, update: Update) -> RoundsRun:
        """Run to the end; once only."""
        done = np.zeros(self._world.workers, dtype=np.int64)
        busy_s = sent_bytes = now_s = 0.0
        iteration = total = 0
        while total < self._limit:
            iteration += 1
            workers = self._gathered()
            round_ = self._round(workers, iteration)
            rounded = self._paused(round_, timing.run(round_))
            now_s = rounded.updated_s
            self._observer.until(now_s, update.models(), total)
            update.run(self._training, workers, iteration)
            self._record(round_, rounded, iteration)
            self._start_s[workers] = rounded.next_start_s
            done[workers] += 1
            total += len(workers)
            busy_s += float(round_.slowdown.sum()) * self._world.iteration_s
            sent_bytes += rounded.sent_bytes
        self._observer.observe(now_s, update.models(), total)
        return RoundsRun(now_s, done.tolist(), busy_s, sent_bytes)

    def _gathered(self) -> IntArray:
        """Return the workers of the round; if all have left, those that return first."""
        active = self._active
        if self._faults and active:
            now_s = float(self._start_s[list(active)].min())
            active = self._present(now_s)
            before = set(self._active)
            if not active:
                now_s = min(f.returns_s for f in self._faults if f.returns_s > now_s)
                active = self._present(now_s)
                before.clear()  # Everybody is back from being away.
            for worker in set(active) - before:
                self._start_s[worker] = now_s
        self._active = active
        return np.array(active, dtype=np.int64)

    def _present(self, now_s: float) -> tuple[int, ...]:
        gone = {f.worker for f in self._faults if f.leaves_s <= now_s < f.returns_s}
        return tuple(w for w in range(self._world.workers) if w not in gone)

    def _deserted_spans(self) -> Iterator[tuple[float, float]]:
        """Return the intervals without an active worker, in order; two may touch."""
        moments = {moment for f in self._faults for moment in (f.leaves_s, f.returns_s)}
        for from_s, to_s in pairwise(sorted(moments)):
            if not self._present(from_s):
                yield from_s, to_s

    def _paused(self, round_: Round, rounded: Rounded) -> Rounded:
        """Extend the round by the time without an active worker."""
        start_s, end_s = float(round_.start_s.min()), float(rounded.next_start_s.min())
        pause_s = 0.0
        for from_s, to_s in self._deserted:
            if start_s <= from_s < end_s + pause_s:
                pause_s += to_s - from_s
        if not pause_s:
            return rounded
        return replace(
            rounded,
            next_start_s=rounded.next_start_s + pause_s,
            reduced_s=rounded.reduced_s + pause_s,
            updated_s=rounded.updated_s + pause_s,
        )

    def _round(self, workers: IntArray, iteration: int) -> Round:
        return Round(
            self._active,
            self._start_s[workers],
            self._slowdowns.of_all(iteration)[workers],
            self._slowdowns.of_all(iteration + 1)[workers],
        )

    def _record(self, round_: Round, rounded: Rounded, iteration: int) -> None:
        if self._recorder is None:
            return
        for row, worker in enumerate(round_.workers):
            for key, rank in enumerate(self._world.ranks):
                start_s, slowdown = float(round_.start_s[row]), float(round_.slowdown[row])
                ended_s = start_s + rank.last_backward_s * slowdown
                self._recorder.begin(worker, key, iteration, start_s, ended_s)
                end_s = float(rounded.reduced_s[row, key])
                self._recorder.free(worker, key, end_s, round_.workers)
