"""The event loop of decentralized strategies, whose workers have no common iterations."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.simulation.course import Course
from planner.sync.simulation.links import WorkerFlow
from planner.sync.simulation.training import parts_of
from planner.sync.simulation.world import StageReduction, transfers_of

Handler = Callable[[float, Any, Any], None]
Then = tuple[Handler, Any, Any]
"""A handler with its two arguments of its own."""


class Behaviour(Protocol):
    """The reaction of a strategy to the end of a pipeline rank's backward.

    Attributes:
        delay_s: time from the optimizer step until :meth:`ready`, such as that of a request.
        staleness: the largest so far.
    """

    delay_s: float
    staleness: int

    def begun(self, worker: int, now_s: float) -> None:
        """Handle a worker that has begun an iteration."""

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Handle a rank that wants to synchronise.

        It calls :meth:`EventLoop.free` when the rank may continue.

        Args:
            now_s: virtual time.
            worker: the worker.
            key: its pipeline rank.
        """

    def left(self, worker: int, now_s: float) -> None:
        """Handle a worker that has left."""

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """Handle a worker that is back with a peer's weights; its next iteration is this one."""

    def models(self) -> FloatArray:
        """Return the weights to observe: of all workers, or one row that counts."""

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """Return the groups that averaged, in order, by pipeline rank."""


class EventLoop:
    """Runs workers and their behaviour until all iterations are done.

    Args:
        course: the state of the run.
    """

    def __init__(self, course: Course) -> None:
        world, training = course.world, course.training
        self.world, self.training = world, training
        self.parts = parts_of(
            tuple(p.parameter_bytes for p in world.ranks), training.problem.dimension
        )
        self.keys = range(len(world.ranks))
        self.alive = [True] * world.workers
        self.iteration = [0] * world.workers
        self.done = [0] * world.workers
        self.total = 0
        self.busy_s = 0.0
        self.sent_bytes = 0.0
        self.now_s = 0.0
        self.recorder = course.recorder
        self._slowdowns, self._observer = course.slowdowns, course.observer
        self._limit, self._faults = course.iterations, course.faults
        self._heap: list[tuple[float, int, Handler, Any, Any]] = []
        self._order = count()
        self._free_s = [[0.0] * len(world.ranks) for _ in range(world.workers)]
        self._waiting = [0] * world.workers
        self._transfers = transfers_of(world)
        self._looks_s = math.inf
        self.behaviour: Behaviour

    def run(self, behaviour: Behaviour) -> float:
        """Run to the end; once only.

        Returns:
            The virtual time of the last iteration's end.
        """
        self.behaviour = behaviour
        for fault in self._faults:
            self.at(fault.leaves_s, self._leave, fault.worker, None)
            if fault.returns_s < float("inf"):
                self.at(fault.returns_s, self._return, fault.worker, None)
        for worker in range(self.world.workers):
            self._begin(worker)
        heap, pop, observer = self._heap, heapq.heappop, self._observer
        while heap and self.total < self._limit:
            now_s, _, handler, first, second = pop(heap)
            if now_s >= observer.next_s:
                observer.until(now_s, behaviour.models(), self.total)
            self.now_s = now_s
            handler(now_s, first, second)
        observer.observe(self.now_s, behaviour.models(), self.total)
        return self.now_s

    def at(self, time_s: float, handler: Handler, first: Any, second: Any) -> None:
        """Call a handler at a virtual time, with the time and two arguments of its own."""
        heapq.heappush(self._heap, (time_s, next(self._order), handler, first, second))

    def free(self, worker: int, key: int, now_s: float, members: tuple[int, ...] = ()) -> None:
        """Let a pipeline rank run its next iteration; the worker begins it once all ranks may."""
        if self.recorder is not None:
            self.recorder.free(worker, key, now_s, members)
        self._free_s[worker][key] = now_s
        self._waiting[worker] -= 1
        if not self._waiting[worker]:
            self.done[worker] += 1
            self.total += 1
            self._begin(worker)

    def free_late(self, worker: int, key: int, now_s: float, members: tuple[int, ...]) -> None:
        """Do so once the worker has noticed that its group's average is there."""
        late_s = self.lateness_s()
        if late_s:
            what = (key, self.iteration[worker], members)
            self.at(now_s + late_s, self._notices, worker, what)
        else:
            self.free(worker, key, now_s, members)

    def _notices(self, now_s: float, worker: int, what: tuple[int, int, tuple[int, ...]]) -> None:
        key, iteration, members = what
        if self.iteration[worker] == iteration:
            self.free(worker, key, now_s, members)

    def _begin(self, worker: int) -> None:
        self.iteration[worker] = iteration = self.iteration[worker] + 1
        slowdown = self._slowdowns.at(worker, iteration)
        free_s, ranks = self._free_s[worker], self.world.ranks
        start_s = max(free_s[key] - ranks[key].first_forward_s * slowdown for key in self.keys)
        self.training.begin(worker, iteration)
        self.busy_s += slowdown * self.world.iteration_s
        self._waiting[worker] = len(ranks)
        delay_s, push = self.behaviour.delay_s, heapq.heappush
        for key in self.keys:
            rank = ranks[key]
            ended_s = start_s + (rank.last_backward_s + rank.optimizer_s) * slowdown
            event = (ended_s + delay_s, next(self._order), self._ready, (worker, key), iteration)
            push(self._heap, event)
            if self.recorder is not None:
                self.recorder.begin(worker, key, iteration, start_s, ended_s)
        self.behaviour.begun(worker, start_s)

    def _ready(self, now_s: float, who: tuple[int, int], iteration: int) -> None:
        worker, key = who
        if self.iteration[worker] == iteration:
            self.behaviour.ready(now_s, worker, key)

    def reduce(self, now_s: float, reduction: StageReduction, then: Then) -> None:
        """Run a collective requested now."""
        self.sent_bytes += reduction.sent_bytes
        self.transfer(now_s, reduction.flows, then)

    def transfer(self, now_s: float, flows: Sequence[WorkerFlow], then: Then) -> None:
        """Run flows one after the other over the world's links.

        The handler is also called at each mark of the last one.
        """
        now_s = max(now_s, self.now_s)
        if flows:
            self.at(now_s + flows[0].fixed_s, self._move, flows, then)
        else:
            self.at(now_s, *then)

    def _move(self, now_s: float, flows: Sequence[WorkerFlow], then: Then) -> None:
        self._transfers.begin(now_s, flows[0], (flows[1:], then))
        if self._looks_s > now_s:
            # Once for all that begin at this moment.
            self._looks_s = now_s
            self.at(now_s, self._look, None, None)

    def _await_transfers(self) -> None:
        """Look again when the next flow ends, as far as is known now."""
        next_s = self._transfers.next_end_s
        if next_s < self._looks_s:
            self._looks_s = next_s
            self.at(next_s, self._look, None, None)

    def _look(self, now_s: float, _: None, __: None) -> None:
        if now_s == self._looks_s:
            self._looks_s = math.inf
        for flows, then in self._transfers.ended(now_s):
            self.transfer(now_s, flows, then)
        self._await_transfers()

    def lateness_s(self) -> float:
        """Return how late a worker notices that its group's average is there."""
        return self._slowdowns.lateness_s()

    def living(self) -> FloatArray:
        """Return the weights of active workers; of all if none is active."""
        weights = self.training.weights
        if all(self.alive) or not any(self.alive):
            return weights
        return np.asarray(weights[np.array(self.alive)])

    def _leave(self, now_s: float, worker: int, _: None) -> None:
        if self.alive[worker]:
            self.alive[worker] = False
            self.iteration[worker] += 1  # Whatever is on its way to it is void.
            self.behaviour.left(worker, now_s)

    def _return(self, now_s: float, worker: int, _: None) -> None:
        if not self.alive[worker]:
            self.training.heal(worker, self.alive)
            self.alive[worker] = True
            self._free_s[worker] = [now_s] * len(self.world.ranks)
            self.behaviour.joined(worker, self.iteration[worker] + 1, now_s)
            self._begin(worker)
