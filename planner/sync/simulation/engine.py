"""The event loop of decentralized strategies, whose workers have no common iterations."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.simulation.course import Course
from planner.sync.simulation.links import WorkerFlow
from planner.sync.simulation.training import parts_of
from planner.sync.simulation.transfers import WorkerTransfers

Handler = Callable[[float, Any, Any], None]
Then = tuple[Handler, Any, Any]
"""A handler with its two arguments of its own."""


class Behaviour:
    """The reaction of a strategy to the end of a pipeline rank's backward.

    A strategy that does not react to an event inherits the method, which does nothing then.

    Args:
        engine: the event loop.

    Attributes:
        delay_s: time from the optimizer step until :meth:`ready`, such as that of a request.
        staleness: the largest so far.
        groups: workers that averaged with each other, in order, by pipeline rank; none where
            workers do not average.
    """

    delay_s = 0.0

    def __init__(self, engine: EventLoop) -> None:
        self._engine = engine
        self.staleness = 0
        self.groups: list[list[tuple[int, ...]]] = []

    def begun(self, worker: int, now_s: float) -> None:
        """Handle a worker that has begun an iteration."""

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Handle a rank that wants to synchronise; :meth:`EventLoop.free` lets it continue."""
        raise NotImplementedError

    def left(self, worker: int, now_s: float) -> None:
        """Handle a worker that has left."""

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """Handle a worker that is back with a peer's weights; its next iteration is this one."""

    def models(self) -> FloatArray:
        """Return the weights to observe: of active workers, or one row that counts."""
        return self._engine.living()


class EventLoop:
    """Runs workers and their behaviour until all iterations are done.

    Args:
        course: the state of the run.

    Attributes:
        course: the state of the run.
        parts: of the weights, by pipeline rank.
        keys: numbers of the pipeline ranks.
        alive: whether a worker is there.
        iteration: the present one of each worker; raised as it leaves, which voids all that is on
            its way to it.
    """

    def __init__(self, course: Course) -> None:
        self.course, self.world, self.training = course, course.world, course.training
        ranks = self.world.ranks
        self.parts = parts_of(tuple(rank.parameter_bytes for rank in ranks))
        self.keys = range(len(ranks))
        self.alive = [True] * self.world.workers
        self.iteration = [0] * self.world.workers
        self._total = 0
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Handler, Any, Any]] = []
        self._order = count()
        self._free_s = [[0.0] * len(ranks) for _ in range(self.world.workers)]
        self._waiting = [0] * self.world.workers
        self._transfers = WorkerTransfers(self.world.routes.capacity_gb_per_s)
        self._looks_s = math.inf
        self._behaviour: Behaviour

    def run(self, behaviour: Behaviour) -> float:
        """Run to the end, once only; return the virtual time of the last iteration's end."""
        self._behaviour, observer = behaviour, self.course.observer
        for fault in self.course.faults:
            self.at(fault.leaves_s, self._leave, fault.worker, None)
            if fault.returns_s < math.inf:
                self.at(fault.returns_s, self._return, fault.worker, None)
        for worker in range(self.world.workers):
            self._begin(worker)
        while self._heap and self._total < self.course.limit:
            now_s, _, handler, first, second = heapq.heappop(self._heap)
            if now_s >= observer.next_s:
                observer.until(now_s, behaviour.models(), self._total)
            self._now_s = now_s
            handler(now_s, first, second)
        observer.observe(self._now_s, behaviour.models(), self._total)
        return self._now_s

    def at(self, time_s: float, handler: Handler, first: Any, second: Any) -> None:
        """Call a handler at a virtual time, with the time and two arguments of its own."""
        heapq.heappush(self._heap, (time_s, next(self._order), handler, first, second))

    def free(self, worker: int, key: int, now_s: float, members: tuple[int, ...] = ()) -> None:
        """Let a pipeline rank run its next iteration; the worker begins it once all ranks may."""
        if self.course.recorder is not None:
            self.course.recorder.free(worker, key, now_s, members)
        self._free_s[worker][key] = now_s
        self._waiting[worker] -= 1
        if not self._waiting[worker]:
            self.course.done[worker] += 1
            self._total += 1
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
        slowdown = self.course.slowdowns.at(worker, iteration)
        free_s, ranks = self._free_s[worker], self.world.ranks
        start_s = max(free_s[key] - ranks[key].first_forward_s * slowdown for key in self.keys)
        self.training.begin(worker, iteration)
        self.course.busy_s += slowdown * self.world.iteration_s
        self._waiting[worker] = len(ranks)
        for key, rank in enumerate(ranks):
            ended_s = start_s + (rank.last_backward_s + rank.optimizer_s) * slowdown
            self.at(ended_s + self._behaviour.delay_s, self._ready, (worker, key), iteration)
            if self.course.recorder is not None:
                self.course.recorder.begin(worker, key, iteration, start_s, ended_s)
        self._behaviour.begun(worker, start_s)

    def _ready(self, now_s: float, who: tuple[int, int], iteration: int) -> None:
        worker, key = who
        if self.iteration[worker] == iteration:
            self._behaviour.ready(now_s, worker, key)

    def transfer(
        self, now_s: float, flows: Sequence[WorkerFlow], sent_bytes: float, then: Then
    ) -> None:
        """Run flows one after the other over the world's links.

        The handler is also called at each mark of the last one.
        """
        self.course.sent_bytes += sent_bytes
        self._go_on(max(now_s, self._now_s), flows, then)

    def _go_on(self, now_s: float, flows: Sequence[WorkerFlow], then: Then) -> None:
        if flows:
            self.at(now_s + flows[0].fixed_s, self._move, flows, then)
        else:
            self.at(now_s, *then)

    def _move(self, now_s: float, flows: Sequence[WorkerFlow], then: Then) -> None:
        self._transfers.begin(now_s, flows[0], (flows[1:], then))
        # Once for all that begin at this moment.
        self._look_at(now_s)

    def _look_at(self, time_s: float) -> None:
        if time_s < self._looks_s:
            self._looks_s = time_s
            self.at(time_s, self._look, None, None)

    def _look(self, now_s: float, _: None, __: None) -> None:
        """Go on with what has been moved; look again when the next flow ends, as is known now."""
        if now_s == self._looks_s:
            self._looks_s = math.inf
        for flows, then in self._transfers.ended(now_s):
            self._go_on(now_s, flows, then)
        self._look_at(self._transfers.next_end_s)

    def lateness_s(self) -> float:
        """Return how late a worker notices that its group's average is there."""
        return self.course.slowdowns.lateness_s()

    def living(self) -> FloatArray:
        """Return the weights of active workers; of all if none is active."""
        weights = self.training.weights
        return np.asarray(weights[np.array(self.alive)]) if any(self.alive) else weights

    def _leave(self, now_s: float, worker: int, _: None) -> None:
        if self.alive[worker]:
            self.alive[worker] = False
            self.iteration[worker] += 1
            self._behaviour.left(worker, now_s)

    def _return(self, now_s: float, worker: int, _: None) -> None:
        if not self.alive[worker]:
            self.training.heal(worker, self.alive)
            self.alive[worker] = True
            self._free_s[worker] = [now_s] * len(self.keys)
            self._behaviour.joined(worker, self.iteration[worker] + 1, now_s)
            self._begin(worker)
