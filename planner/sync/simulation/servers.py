"""Parameter servers whose workers do not wait for each other, or only for those far behind.

The first workers are servers too, and each has an even part of the parameters: messages go over the
world's links, but for those of a server to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.groups.events import Event, GroupRequest, Joined, Left
from planner.sync.groups.scheduler import Scheduler
from planner.sync.groups.waves import WaveChanges
from planner.sync.simulation.engine import Engine, Handler, Strategy
from planner.sync.strategies import EagerParameterServerOptions

MOST_KEPT = 10_000
"""Calls whose messages are kept at a time."""
Who = tuple[int, int]
"""A worker and one of its pipeline ranks."""


class Server(Strategy):
    """The parameters and their momentum, and what workers ask of them.

    A gradient changes the parameters by the learning rate over the number of workers, so that as
    many gradients move them as far as one step on their mean. At most one push of a worker's rank
    is under way.

    Args:
        engine: the event loop.
        servers: number of servers; None: one.
    """

    def __init__(self, engine: Engine, servers: int | None) -> None:
        super().__init__(engine)
        self._servers = servers or 1
        self._messages = lru_cache(MOST_KEPT)(engine.world.server_messages)
        learning = engine.training.learning
        self._rate = learning.learning_rate / engine.world.workers
        self._momentum = learning.momentum
        self._weights: FloatArray = engine.training.weights[0].copy()
        self._velocity = np.zeros_like(self._weights)
        self._updates = 0
        self._pushing: set[Who] = set()
        self._waiting: dict[Who, int] = {}
        """Iterations whose push waits for the one before."""

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Push once the last push is over."""
        if (worker, key) in self._pushing:
            self._waiting[worker, key] = self.engine.iteration[worker]
        else:
            self._pushing.add((worker, key))
            self._push(now_s, worker, key)

    def _push(self, now_s: float, worker: int, key: int) -> None:
        raise NotImplementedError

    def _has_pushed(self, now_s: float, worker: int, key: int) -> None:
        """Note the end of a push; begin the one that waits for it."""
        self._pushing.discard((worker, key))
        if self._waiting.pop((worker, key), None) == self.engine.iteration[worker]:
            self.ready(now_s, worker, key)

    def _call(self, now_s: float, who: Who, then: Handler, *arguments: Any, is_push: bool) -> None:
        """Move the parts between the worker and the servers, one after the other.

        The handler has the worker and its rank as its first arguments.
        """
        flows = self._messages(who[0], self._servers, who[1], is_push=is_push)
        self.engine.transfer(now_s, flows, then, *who, *arguments)

    def _apply(self, gradient: FloatArray, key: int, factor: float = 1.0) -> None:
        """Update the parameters of a pipeline rank by a worker's gradient."""
        part = self.engine.parts[key]
        velocity = self._velocity[part]
        velocity *= self._momentum
        velocity += factor * gradient[part]
        self._weights[part] -= self._rate * velocity
        self._updates += key == 0

    def joined(self, now_s: float, worker: int) -> None:
        """Start the worker with the server's parameters."""
        self.engine.training.weights[worker] = self._weights
        super().joined(now_s, worker)

    def models(self) -> FloatArray:
        """Return the server's parameters."""
        return self._weights[None]


class AsynchronousServer(Server):
    """A worker pushes its gradient, which is applied as it arrives, pulls, and continues."""

    def __init__(self, engine: Engine, servers: int | None) -> None:
        super().__init__(engine, servers)
        self._read = [0] * engine.world.workers

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Send the gradient."""
        iteration = self.engine.iteration[worker]
        self._call(now_s, (worker, key), self._come, iteration, is_push=True)

    def _come(self, now_s: float, worker: int, key: int, iteration: int) -> None:
        if self.engine.iteration[worker] == iteration:
            self.staleness = max(self.staleness, self._updates - self._read[worker])
            self._apply(self.engine.training.gradient(worker), key)
            self._call(now_s, (worker, key), self._pulled, iteration, is_push=False)

    def _pulled(self, now_s: float, worker: int, key: int, iteration: int) -> None:
        engine = self.engine
        if engine.iteration[worker] == iteration:
            part = engine.parts[key]
            engine.training.weights[worker, part] = self._weights[part]
            self._read[worker] = self._updates
            engine.free(worker, key, now_s)

    def joined(self, now_s: float, worker: int) -> None:
        """Start the worker with the server's parameters."""
        self._read[worker] = self._updates
        super().joined(now_s, worker)


class EagerServer(Server):
    """PS+ of Jin's thesis (HKU 2023), as reconstructed here.

    When it begins to compute, a worker pulls the parameters for the next iteration; when its
    gradient is done, it pushes and continues with the copy that has arrived. The gradient is
    modulated by its staleness as far as the worker knows it: the updates between the version that
    it was computed on and the newest one that the worker has seen, in a pull or in the answer to a
    push. At most one push and one pull of a worker are in transfer: a worker that is faster than
    its network waits for the push before, and continues with the parameters it has.
    """

    def __init__(self, engine: Engine, options: EagerParameterServerOptions) -> None:
        super().__init__(engine, options.servers)
        self._options = options
        workers = engine.world.workers
        self._copies = engine.training.weights.copy()
        self._copied, self._used, self._newest = ([0] * workers for _ in range(3))
        """Updates in the last copy, in the weights of the iteration, and that are known of."""
        self._pulling = [0] * workers

    def begun(self, now_s: float, worker: int) -> None:
        """Send the pull for the next iteration."""
        self._used[worker] = self._copied[worker]
        if not self._pulling[worker]:
            self._pulling[worker] = len(self.engine.keys)
            for key in self.engine.keys:
                self._call(now_s, (worker, key), self._pulled, is_push=False)

    def _pulled(self, now_s: float, worker: int, key: int) -> None:
        self._pulling[worker] -= 1
        if not self._pulling[worker]:
            self._copy(worker)

    def _copy(self, worker: int) -> None:
        self._copies[worker] = self._weights
        self._copied[worker] = self._newest[worker] = self._updates

    def _push(self, now_s: float, worker: int, key: int) -> None:
        """Send the gradient, and continue with the copy that has arrived."""
        engine, used = self.engine, self._used[worker]
        factor = self._options.factor(self._newest[worker] - used, engine.world.workers)
        gradient = engine.training.gradient(worker).copy()
        arguments = (gradient, used, factor)
        self._call(now_s, (worker, key), self._come, *arguments, is_push=True)
        part = engine.parts[key]
        engine.training.weights[worker, part] = self._copies[worker, part]
        engine.free(worker, key, now_s)

    def _come(
        self, now_s: float, worker: int, key: int, gradient: FloatArray, used: int, factor: float
    ) -> None:
        self.staleness = max(self.staleness, self._updates - used)
        self._apply(gradient, key, factor)
        self._newest[worker] = self._updates
        self._has_pushed(now_s, worker, key)

    def joined(self, now_s: float, worker: int) -> None:
        """Start the worker with the server's parameters."""
        self._copy(worker)
        super().joined(now_s, worker)


class WaveServer(Server):
    """HetPipe's server (Park et al., ATC 2020): a worker waits if others are too far behind.

    A worker pushes what its wave changed, and waits and pulls if others are too far behind. The
    scheduler, and what a server holds back, are those of real pipelines. A push goes on behind the
    next wave if the worker's weights include enough waves of all others.

    Args:
        engine: the event loop.
        scheduler: lets workers go on.
        distance: of waves, from 0.
        servers: number of servers; None: one.
    """

    def __init__(
        self, engine: Engine, scheduler: Scheduler, distance: int, servers: int | None
    ) -> None:
        super().__init__(engine, servers)
        self._scheduler, self._distance = scheduler, distance
        self._half_s = engine.world.scheduler_round_trip_s / 2
        self._changes = [WaveChanges[FloatArray](distance) for _ in engine.keys]
        self._includes: dict[Who, int] = {}
        """The last wave of all that a worker's weights include."""
        self._lacking: set[Who] = set()
        """Those that pull once the slowest worker is near enough."""
        self._slowest = 0
        """The slowest worker's wave when it was last looked for."""

    def _push(self, now_s: float, worker: int, key: int) -> None:
        """Step, and push."""
        engine, who = self.engine, (worker, key)
        row, wave = engine.training.weights[worker, engine.parts[key]], engine.iteration[worker]
        before = row.copy()
        engine.training.step(worker, engine.parts[key])
        change = (row - before) / engine.world.workers
        row[:] = before + change
        self._call(now_s, who, self._come, wave, change, is_push=True)
        if self._includes.get(who, 0) < wave - self._distance:
            self._lacking.add(who)
        else:
            engine.free(worker, key, now_s)

    def _come(self, now_s: float, worker: int, key: int, wave: int, change: FloatArray) -> None:
        self._add(key, self._changes[key].push(wave, worker, change))
        self.engine.at(now_s + self._half_s, self._asks, (worker, key), wave)

    def _add(self, key: int, changes: Sequence[FloatArray]) -> None:
        """Add changes to the server's weights."""
        for change in changes:
            self._weights[self.engine.parts[key]] += change

    def _asks(self, now_s: float, who: Who, wave: int) -> None:
        if self.engine.alive[who[0]]:
            self._handle(GroupRequest(*who, wave), now_s)

    def _handle(self, event: Event, now_s: float) -> None:
        for group in self._scheduler.handle(event, now_s):
            who = (group.members[0], group.key)
            self.engine.at(now_s + self._half_s, self._goes_on, who, group.iterations[0])

    def _goes_on(self, now_s: float, who: Who, wave: int) -> None:
        """The slowest worker is near enough: pull what is lacking, or end the push."""
        engine, (worker, key) = self.engine, who
        if not engine.alive[worker]:
            return
        if wave - self._slowest > self.staleness:
            self._slowest = min(engine.iteration[w] for w in self._alive())
            self.staleness = max(self.staleness, wave - self._slowest)
        if who in self._lacking and engine.iteration[worker] == wave:
            self._call(now_s, who, self._pulled, wave, is_push=False)
        else:
            self._has_pushed(now_s, worker, key)

    def _pulled(self, now_s: float, worker: int, key: int, wave: int) -> None:
        engine, who = self.engine, (worker, key)
        if engine.iteration[worker] != wave:
            return
        self._add(key, self._changes[key].pull(wave))
        part, included = engine.parts[key], self._changes[key].included
        engine.training.weights[worker, part] = self._weights[part]
        self._includes[who] = min(included.get(w, 0) for w in self._alive())
        self._lacking.discard(who)
        self._pushing.discard(who)
        engine.free(worker, key, now_s)

    def _alive(self) -> list[int]:
        return [worker for worker, alive in enumerate(self.engine.alive) if alive]

    def left(self, now_s: float, worker: int) -> None:
        """Let others go on without the worker."""
        for key in self.engine.keys:
            for known in (self._pushing, self._lacking):
                known.discard((worker, key))
            self._waiting.pop((worker, key), None)
        self._handle(Left(worker), now_s)

    def joined(self, now_s: float, worker: int) -> None:
        """Start the worker with the server's parameters."""
        for key in self.engine.keys:
            self._includes.pop((worker, key), None)
        self._handle(Joined(worker, self.engine.iteration[worker] + 1), now_s)
        super().joined(now_s, worker)
