"""The loop for strategies whose workers march in step: a round is one iteration of everybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.artifacts.link_table import FloatArray, IntArray
from planner.sync.simulation.course import Course
from planner.sync.simulation.training import Training


@dataclass(frozen=True)
class Round:
    """One iteration of the workers that are there; one entry a worker.

    Attributes:
        workers: their numbers, ascending.
        start_s: of their iterations.
        stretch, next_stretch: of this iteration and the one after.
    """

    workers: tuple[int, ...]
    start_s: FloatArray
    stretch: FloatArray
    next_stretch: FloatArray


@dataclass(frozen=True)
class Rounded:
    """What became of a round.

    Attributes:
        next_start_s: of each worker's next iteration.
        reduced_s: when each place's gradients were reduced, or each worker had its parameters
            back, by worker and place.
        updated_s: when the parameters moved.
        sent_bytes: by all workers.
    """

    next_start_s: FloatArray
    reduced_s: FloatArray
    updated_s: float
    sent_bytes: float


class Timing(Protocol):
    """When the workers of a round may go on; it keeps what outlasts a round."""

    def run(self, round_: Round) -> Rounded:
        """Play a round; rounds come in order."""


class Update(Protocol):
    """How a round moves the parameters."""

    staleness: int

    def run(self, training: Training, workers: IntArray, iteration: int) -> None:
        """Move them by the gradients of these workers' iterations."""

    def models(self) -> FloatArray:
        """What is looked at: one row, that all workers share."""


@dataclass(frozen=True)
class RoundsRun:
    """What a run of rounds took.

    Attributes:
        time_s: virtual.
        done: iterations by worker.
        busy_s: seconds in which workers computed.
        sent_bytes: by all workers.
    """

    time_s: float
    done: list[int]
    busy_s: float
    sent_bytes: float


class Rounds:
    """Runs rounds until so many iterations are done.

    A worker that leaves is left out from the next round on; one that returns, with the parameters
    of the others, begins with the first round after.

    Args:
        course: what it goes through.
    """

    def __init__(self, course: Course) -> None:
        world = course.world
        self._world, self._stretches, self._training = world, course.stretches, course.training
        self._observer, self._limit = course.observer, course.iterations
        self._faults, self._recorder = course.faults, course.recorder
        self._start_s = np.zeros(world.workers)
        self._there: tuple[int, ...] = tuple(range(world.workers))

    def run(self, timing: Timing, update: Update) -> RoundsRun:
        """Run to the end; once only."""
        done = np.zeros(self._world.workers, dtype=np.int64)
        busy_s = sent_bytes = now_s = 0.0
        iteration = total = 0
        while total < self._limit:
            iteration += 1
            workers = self._gathered()
            round_ = self._round(workers, iteration)
            rounded = timing.run(round_)
            now_s = rounded.updated_s
            self._observer.until(now_s, update.models(), total)
            update.run(self._training, workers, iteration)
            self._record(round_, rounded, iteration)
            self._start_s[workers] = rounded.next_start_s
            done[workers] += 1
            total += len(workers)
            busy_s += float(round_.stretch.sum()) * self._world.iteration_s
            sent_bytes += rounded.sent_bytes
        self._observer.look(now_s, update.models(), total)
        return RoundsRun(now_s, done.tolist(), busy_s, sent_bytes)

    def _gathered(self) -> IntArray:
        """Who takes part; if all have left, those that return first."""
        there = self._there
        if self._faults and there:
            now_s = float(self._start_s[list(there)].min())
            there = self._present(now_s)
            if not there:
                now_s = min(f.returns_s for f in self._faults if f.returns_s > now_s)
                there = self._present(now_s)
            for worker in set(there) - set(self._there):
                self._start_s[worker] = now_s
        self._there = there
        return np.array(there, dtype=np.int64)

    def _present(self, now_s: float) -> tuple[int, ...]:
        gone = {f.worker for f in self._faults if f.leaves_s <= now_s < f.returns_s}
        return tuple(w for w in range(self._world.workers) if w not in gone)

    def _round(self, workers: IntArray, iteration: int) -> Round:
        return Round(
            self._there,
            self._start_s[workers],
            self._stretches.of_all(iteration)[workers],
            self._stretches.of_all(iteration + 1)[workers],
        )

    def _record(self, round_: Round, rounded: Rounded, iteration: int) -> None:
        if self._recorder is None:
            return
        for row, worker in enumerate(round_.workers):
            for key, place in enumerate(self._world.places):
                start_s, stretch = float(round_.start_s[row]), float(round_.stretch[row])
                ended_s = start_s + place.last_backward_s * stretch
                self._recorder.begin(worker, key, iteration, start_s, ended_s)
                end_s = float(rounded.reduced_s[row, key])
                self._recorder.free(worker, key, end_s, round_.workers)
