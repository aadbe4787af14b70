"""Asynchronous parameter servers, whose workers do not wait for each other.

The first workers are servers too, and each has an even part of the parameters: messages go over the
world's links, but for those of a server to itself.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.simulation.engine import EventLoop, Then
from planner.sync.strategies import EagerParameterServerOptions

MOST_KEPT = 10_000
"""Calls whose messages are kept at a time."""


class Server:
    """The parameters and their momentum.

    A gradient changes the parameters by the learning rate over the number of workers, so that as
    many gradients move them as far as one step on their mean.
    """

    def __init__(self, engine: EventLoop, servers: int) -> None:
        self._engine, self._servers = engine, servers
        self._messages = lru_cache(MOST_KEPT)(engine.world.server_messages)
        learning = engine.training.learning
        self._rate = learning.learning_rate / engine.world.workers
        self._momentum = learning.momentum
        self.weights: FloatArray = engine.training.weights[0].copy()
        self._velocity = np.zeros_like(self.weights)
        self.updates = 0

    def push(self, now_s: float, worker: int, key: int, then: Then) -> None:
        """Send a gradient to the servers."""
        self._call(now_s, worker, key, then, is_push=True)

    def pull(self, now_s: float, worker: int, key: int, then: Then) -> None:
        """Request the parameters from the servers."""
        self._call(now_s, worker, key, then, is_push=False)

    def _call(self, now_s: float, worker: int, key: int, then: Then, *, is_push: bool) -> None:
        """Move the parts between the worker and the servers, one after the other."""
        world = self._engine.world
        self._engine.sent_bytes += world.ranks[key].parameter_bytes
        flows = self._messages(worker, self._servers, key, is_push=is_push)
        self._engine.transfer(now_s, flows, then)

    def apply(self, gradient: FloatArray, key: int, modulation: float = 1.0) -> None:
        """Update the parameters of a pipeline rank by a worker's gradient."""
        part = self._engine.parts[key]
        velocity = self._velocity[part]
        velocity *= self._momentum
        velocity += modulation * gradient[part]
        self.weights[part] -= self._rate * velocity
        self.updates += key == 0


class AsynchronousServer:
    """A worker pushes its gradient, which is applied as it arrives, pulls, and continues."""

    delay_s = 0.0

    def __init__(self, engine: EventLoop, servers: int) -> None:
        self._engine, self._server = engine, Server(engine, servers)
        self._read = [0] * engine.world.workers
        self.staleness = 0

    def begun(self, worker: int, now_s: float) -> None:
        """Do nothing."""

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Send the gradient."""
        then = (self._come, (worker, key), self._engine.iteration[worker])
        self._server.push(now_s, worker, key, then)

    def _come(self, now_s: float, who: tuple[int, int], iteration: int) -> None:
        worker, key = who
        if self._engine.iteration[worker] != iteration:
            return
        self.staleness = max(self.staleness, self._server.updates - self._read[worker])
        self._server.apply(self._engine.training.gradient(worker), key)
        self._server.pull(now_s, worker, key, (self._pulled, who, iteration))

    def _pulled(self, now_s: float, who: tuple[int, int], iteration: int) -> None:
        engine, (worker, key) = self._engine, who
        if engine.iteration[worker] != iteration:
            return
        part = engine.parts[key]
        engine.training.weights[worker, part] = self._server.weights[part]
        self._read[worker] = self._server.updates
        engine.free(worker, key, now_s)

    def left(self, worker: int, now_s: float) -> None:
        """Do nothing: the server does not depend on the worker."""

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """Start the worker with the server's parameters."""
        self._engine.training.weights[worker] = self._server.weights
        self._read[worker] = self._server.updates

    def models(self) -> FloatArray:
        """Return the server's parameters."""
        return self._server.weights[None]

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """Return no groups, since workers do not average."""
        return []


class EagerServer:
    """PS+ of Jin's thesis (HKU 2023), as reconstructed here.

    When it begins to compute, a worker pulls the parameters for the next iteration; when its
    gradient is done, it pushes and continues with the copy that has arrived. The gradient is
    modulated by its staleness as far as the worker knows it: the updates between the version that
    it was computed on and the newest one that the worker has seen, in a pull or in the answer to a
    push. At most one push and one pull of a worker are in transfer: a worker that is faster than
    its network waits for the push before, and continues with the parameters it has.
    """

    delay_s = 0.0

    def __init__(self, engine: EventLoop, options: EagerParameterServerOptions) -> None:
        self._engine, self._options = engine, options
        self._server = Server(engine, options.servers or 1)
        workers = engine.world.workers
        self._copies = engine.training.weights.copy()
        self._copied, self._used = [0] * workers, [0] * workers
        self._newest = [0] * workers
        self._pulling = [0] * workers
        self._is_pushing = [[False] * len(engine.keys) for _ in range(workers)]
        self._waits = [[0] * len(engine.keys) for _ in range(workers)]
        self.staleness = 0

    def begun(self, worker: int, now_s: float) -> None:
        """Send the pull for the next iteration."""
        self._used[worker] = self._copied[worker]
        if not self._pulling[worker]:
            self._pulling[worker] = len(self._engine.keys)
            for key in self._engine.keys:
                self._server.pull(now_s, worker, key, (self._pulled, worker, None))

    def _pulled(self, now_s: float, worker: int, _: None) -> None:
        self._pulling[worker] -= 1
        if not self._pulling[worker]:
            self._copies[worker] = self._server.weights
            self._copied[worker] = self._server.updates
            self._see(worker)

    def _see(self, worker: int) -> None:
        self._newest[worker] = max(self._newest[worker], self._server.updates)

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Send the gradient, once the last one has arrived."""
        if self._is_pushing[worker][key]:
            self._waits[worker][key] = self._engine.iteration[worker]
        else:
            self._push(now_s, worker, key)

    def _push(self, now_s: float, worker: int, key: int) -> None:
        """Send the gradient, and continue with the copy that has arrived."""
        engine, used = self._engine, self._used[worker]
        newer = self._newest[worker] - used
        factor = self._options.factor(newer, engine.world.workers)
        gradient = engine.training.gradient(worker).copy()
        self._is_pushing[worker][key] = True
        then = (self._come, (worker, key), (gradient, used, factor))
        self._server.push(now_s, worker, key, then)
        part = engine.parts[key]
        engine.training.weights[worker, part] = self._copies[worker, part]
        engine.free(worker, key, now_s)

    def _come(
        self, now_s: float, who: tuple[int, int], what: tuple[FloatArray, int, float]
    ) -> None:
        (worker, key), (gradient, used, factor) = who, what
        self.staleness = max(self.staleness, self._server.updates - used)
        self._server.apply(gradient, key, factor)
        self._see(worker)
        self._is_pushing[worker][key] = False
        iteration, self._waits[worker][key] = self._waits[worker][key], 0
        if iteration and iteration == self._engine.iteration[worker]:
            self._push(now_s, worker, key)

    def left(self, worker: int, now_s: float) -> None:
        """Do nothing: the server does not depend on the worker."""

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """Start the worker with the server's parameters."""
        self._engine.training.weights[worker] = self._server.weights
        self._copies[worker] = self._server.weights
        self._copied[worker] = self._server.updates
        self._see(worker)

    def models(self) -> FloatArray:
        """Return the server's parameters."""
        return self._server.weights[None]

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """Return no groups, since workers do not average."""
        return []
