"""The event loop of simulated synchronisation: pipelines, their links, and one strategy."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.simulation.links import WorkerFlow
from planner.sync.simulation.observing import Observer
from planner.sync.simulation.slowness import SimulatedFault, Slowdowns
from planner.sync.simulation.training import Training, parts_of
from planner.sync.simulation.transfers import WorkerTransfers
from planner.sync.simulation.world import World

Handler = Callable[..., None]
"""Called with the virtual time, and with arguments of its own."""


class Strategy:
    """The reaction of a strategy to what happens to workers.

    A strategy that does not react to an event inherits the method.

    Args:
        engine: the event loop.

    Attributes:
        delay_s: time from the optimizer step until :meth:`ready`, such as that of a request.
        staleness: the largest so far.
        groups: workers that averaged with each other, in order, by pipeline rank; empty where
            workers do not average.
    """

    delay_s = 0.0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.staleness = 0
        self.groups: list[list[tuple[int, ...]]] = []

    def begun(self, now_s: float, worker: int) -> None:
        """Handle a worker that has begun an iteration."""

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Handle the end of a rank's optimizer step; :meth:`Engine.free` lets it continue."""

    def left(self, now_s: float, worker: int) -> None:
        """Handle a worker that has left."""

    def joined(self, now_s: float, worker: int) -> None:
        """Handle a worker that is back with a peer's weights, and begin its next iteration."""
        self.engine.begin(worker)

    def models(self) -> FloatArray:
        """Return the weights to observe: of present workers, or one row that all share."""
        alive, weights = self.engine.alive, self.engine.training.weights
        return np.asarray(weights[np.array(alive)]) if any(alive) else weights


@dataclass(frozen=True)
class _Queued:
    """A flow of a stream: when its bytes may move at the earliest, and what follows its end."""

    ready_s: float
    flow: WorkerFlow
    then: Handler
    arguments: tuple[Any, ...]


class Engine:
    """Runs workers under a strategy until all iterations are done.

    Args:
        world: pipelines and links.
        slowdowns: of iterations.
        training: the problem and the weights.
        observer: observes the weights.
        faults: workers that leave.

    Attributes:
        parts: of the weights, by pipeline rank.
        keys: numbers of the pipeline ranks.
        alive: whether a worker is present.
        iteration: the present one of each worker; raised as it leaves, so that messages to it from
            before no longer match.
        start_s, slowdown: of the present iteration of each worker.
        done: iterations done, by worker.
        busy_s: seconds of computation in all iterations that are done.
        sent_bytes: bytes sent by all workers and servers.
    """

    def __init__(
        self,
        world: World,
        slowdowns: Slowdowns,
        training: Training,
        observer: Observer,
        faults: Sequence[SimulatedFault] = (),
    ) -> None:
        self.world, self.slowdowns, self.training = world, slowdowns, training
        self._observer, self._faults = observer, faults
        ranks = world.ranks
        self.parts = parts_of(tuple(rank.parameter_bytes for rank in ranks))
        self.keys = range(len(ranks))
        self.alive = [True] * world.workers
        self.iteration = [0] * world.workers
        self.start_s: FloatArray = np.zeros(world.workers)
        self.slowdown: FloatArray = np.ones(world.workers)
        self.done = [0] * world.workers
        self.busy_s = self.sent_bytes = 0.0
        self._total = 0
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Handler, tuple[Any, ...]]] = []
        self._order = count()
        self._free_s = [[0.0] * len(ranks) for _ in range(world.workers)]
        self._running = [0] * world.workers
        self._transfers = WorkerTransfers(world.routes.capacity_gb_per_s)
        self._looks_s = math.inf
        self._streams: defaultdict[Hashable, deque[_Queued]] = defaultdict(deque)
        self._strategy: Strategy

    def run(self, strategy: Strategy, iterations: int) -> float:
        """Run until the workers together have done so many iterations; return the virtual time."""
        self._strategy = strategy
        for fault in self._faults:
            self.at(fault.leaves_s, self._leave, fault.worker)
            if fault.returns_s < math.inf:
                self.at(fault.returns_s, self._return, fault.worker)
        for worker in range(self.world.workers):
            self.at(0.0, self._begin_first, worker)
        while self._heap and self._total < iterations:
            now_s, _, handler, arguments = heapq.heappop(self._heap)
            if now_s >= self._observer.next_s:
                self._observer.until(now_s, strategy.models(), self._total)
            self._now_s = now_s
            handler(now_s, *arguments)
        self._observer.observe(self._now_s, strategy.models(), self._total)
        return self._now_s

    def at(self, time_s: float, handler: Handler, *arguments: Any) -> None:
        """Call a handler at a virtual time, or now if that has passed."""
        entry = max(time_s, self._now_s), next(self._order), handler, arguments
        heapq.heappush(self._heap, entry)

    def begin(self, worker: int) -> None:
        """Begin the next iteration as early as each rank is free when its first forward needs it.

        The iteration may so have started before now.
        """
        self.iteration[worker] = iteration = self.iteration[worker] + 1
        slowdown = self.slowdowns.at(worker, iteration)
        free_s, ranks = self._free_s[worker], self.world.ranks
        start_s = max(free_s[key] - ranks[key].first_forward_s * slowdown for key in self.keys)
        self.start_s[worker], self.slowdown[worker] = start_s, slowdown
        self.training.begin(worker, iteration)
        self._running[worker] = len(ranks)
        for key, rank in enumerate(ranks):
            ended_s = start_s + (rank.last_backward_s + rank.optimizer_s) * slowdown
            self.at(ended_s + self._strategy.delay_s, self._ready, worker, key, iteration)
        self._strategy.begun(start_s, worker)

    def _begin_first(self, _: float, worker: int) -> None:
        if self.alive[worker] and not self.iteration[worker]:
            self.begin(worker)

    def _ready(self, now_s: float, worker: int, key: int, iteration: int) -> None:
        if self.iteration[worker] == iteration:
            self._strategy.ready(now_s, worker, key)

    def free(self, worker: int, key: int, free_s: float) -> None:
        """Let a rank run its next iteration; the worker begins it when all its ranks may."""
        self._free_s[worker][key] = free_s
        self._running[worker] -= 1
        if not self._running[worker]:
            self.done[worker] += 1
            self._total += 1
            self.busy_s += float(self.slowdown[worker]) * self.world.iteration_s
            self.begin(worker)

    def _leave(self, now_s: float, worker: int) -> None:
        if self.alive[worker]:
            self.alive[worker] = False
            self.iteration[worker] += 1
            self._strategy.left(now_s, worker)

    def _return(self, now_s: float, worker: int) -> None:
        if not self.alive[worker]:
            self.training.heal(worker, self.alive)
            self.alive[worker] = True
            self._free_s[worker] = [now_s] * len(self.keys)
            self._strategy.joined(now_s, worker)

    def transfer(
        self, now_s: float, flows: Sequence[WorkerFlow], then: Handler, *arguments: Any
    ) -> None:
        """Run flows one after the other, each with its latency; then call the handler."""
        self._next_of(max(now_s, self._now_s), tuple(flows), then, *arguments)

    def _next_of(
        self, now_s: float, flows: tuple[WorkerFlow, ...], then: Handler, *arguments: Any
    ) -> None:
        if flows:
            first, *rest = flows
            following = (tuple(rest), then, *arguments)
            self.at(now_s + first.fixed_s, self._move, first, self._next_of, following)
        else:
            self.at(now_s, then, *arguments)

    def queue(
        self, ready_s: float, stream: Hashable, flow: WorkerFlow, then: Handler, *arguments: Any
    ) -> None:
        """Run a flow once those of its stream before it have ended; then call the handler.

        Its latency may pass while their bytes still move, as that of a collective that has been
        launched.
        """
        waiting = self._streams[stream]
        waiting.append(_Queued(ready_s + flow.fixed_s, flow, then, arguments))
        if len(waiting) == 1:
            self._run_stream(stream)

    def _run_stream(self, stream: Hashable) -> None:
        if self._streams[stream]:
            first = self._streams[stream][0]
            self.at(first.ready_s, self._move, first.flow, self._stream_ended, (stream,))

    def _stream_ended(self, now_s: float, stream: Hashable) -> None:
        ended = self._streams[stream].popleft()
        self._run_stream(stream)
        ended.then(now_s, *ended.arguments)

    def _move(
        self, now_s: float, flow: WorkerFlow, then: Handler, arguments: tuple[Any, ...]
    ) -> None:
        """Begin to move bytes over the links; what crosses none is there at once."""
        self.sent_bytes += flow.sent_bytes
        if not len(flow.links):
            then(now_s, *arguments)
            return
        self._transfers.begin(now_s, flow, (then, arguments))
        # Once for all that begin at this moment.
        self._look_at(now_s)

    def _look_at(self, time_s: float) -> None:
        if time_s < self._looks_s:
            self._looks_s = time_s
            self.at(time_s, self._look)

    def _look(self, now_s: float) -> None:
        """Continue after flows that have ended; look again at the next end that is known now."""
        if now_s == self._looks_s:
            self._looks_s = math.inf
        for then, arguments in self._transfers.ended(now_s):
            then(now_s, *arguments)
        self._look_at(self._transfers.next_end_s)
