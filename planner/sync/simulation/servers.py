"""Asynchronous parameter servers, whose workers do not wait for each other.

A server receives gradients and sends parameters over one card each way, in the order in which they
come; several servers share the parameters evenly and count as one with that many times the
bandwidth. A worker's own card is one queue for both directions.
"""

from __future__ import annotations

import math

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.simulation.engine import EventLoop
from planner.sync.strategies import EagerParameterServerOptions


class Server:
    """The parameters, their momentum, and both directions of the server's card.

    A gradient changes the parameters by the learning rate over the number of workers, so that as
    many gradients move them as far as one step on their mean.
    """

    def __init__(self, engine: EventLoop, servers: int) -> None:
        self._engine = engine
        world = engine.world
        self.link = world.link((0, world.workers - 1))
        self._servers = servers
        self._in_s = self._out_s = 0.0
        learning = engine.training.learning
        self._rate, self._momentum = learning.learning_rate / world.workers, learning.momentum
        self.weights: FloatArray = engine.training.weights[0].copy()
        self._velocity = np.zeros_like(self.weights)
        self.updates = 0
        self.sent_bytes = 0.0

    def push_s(self, now_s: float, worker: int, key: int) -> float:
        """Return when a gradient that is sent now has arrived."""
        bytes_ = self._engine.world.ranks[key].parameter_bytes
        self._in_s, end_s = self._move(now_s, worker, key, bytes_, self._in_s)
        return end_s

    def pull_s(self, now_s: float, worker: int, key: int) -> float:
        """Return when parameters that are requested now have arrived."""
        bytes_ = self._engine.world.ranks[key].parameter_bytes
        self._out_s, end_s = self._move(now_s, worker, key, bytes_, self._out_s)
        return end_s

    def _move(
        self, now_s: float, worker: int, key: int, bytes_: int, free_s: float
    ) -> tuple[float, float]:
        """Return when the server's direction is free again, and when the message has arrived."""
        self.sent_bytes += bytes_
        moving_s = self.link.moving_s(bytes_)
        served_s = max(now_s, free_s) + moving_s / self._servers
        card_s = self._engine.card_s(now_s, worker, key, moving_s)
        fixed_s = self.link.latency_s + self._engine.world.collective_overhead_s
        return served_s, max(served_s, card_s) + fixed_s

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

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by workers and servers."""
        return self._server.sent_bytes

    def begun(self, worker: int, now_s: float) -> None:
        """Do nothing."""

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Send the gradient."""
        end_s = self._server.push_s(now_s, worker, key)
        self._engine.at(end_s, self._come, (worker, key), self._engine.iteration[worker])

    def _come(self, now_s: float, who: tuple[int, int], iteration: int) -> None:
        worker, key = who
        if self._engine.iteration[worker] != iteration:
            return
        self.staleness = max(self.staleness, self._server.updates - self._read[worker])
        self._server.apply(self._engine.training.gradient(worker), key)
        end_s = self._server.pull_s(now_s, worker, key)
        self._engine.at(end_s, self._pulled, who, iteration)

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
    modulated by its staleness: the number of versions between its parameters and the newest copy
    that the worker has seen, where as many updates as there are workers make a version, less the
    one that pulling ahead always costs. At most one push and one pull of a worker are in transfer:
    a worker that is faster than its network waits for it.
    """

    delay_s = 0.0

    def __init__(self, engine: EventLoop, options: EagerParameterServerOptions) -> None:
        self._engine, self._options = engine, options
        self._server = Server(engine, options.servers or 1)
        workers = engine.world.workers
        self._copies = engine.training.weights.copy()
        self._known, self._used = [0] * workers, [0] * workers
        self._is_pulling = [False] * workers
        self._pushed_s = [[0.0] * len(engine.keys) for _ in range(workers)]
        self.staleness = 0

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by workers and servers."""
        return self._server.sent_bytes

    def begun(self, worker: int, now_s: float) -> None:
        """Send the pull for the next iteration."""
        self._used[worker] = self._known[worker]
        if not self._is_pulling[worker]:
            self._is_pulling[worker] = True
            end_s = max(self._server.pull_s(now_s, worker, key) for key in self._engine.keys)
            self._engine.at(end_s, self._pulled, worker, None)

    def _pulled(self, now_s: float, worker: int, _: None) -> None:
        self._is_pulling[worker] = False
        self._copies[worker] = self._server.weights
        self._known[worker] = self._server.updates

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Send the gradient; the worker continues once the last one has arrived."""
        engine, before_s = self._engine, self._pushed_s[worker][key]
        who, iteration = (worker, key), engine.iteration[worker]
        newer = self._known[worker] - self._used[worker]
        weight = self._modulation(max(0, newer // engine.world.workers - 1))
        gradient = engine.training.gradient(worker).copy()
        end_s = self._server.push_s(now_s, worker, key)
        engine.at(end_s, self._come, (gradient, self._used[worker], weight), key)
        self._pushed_s[worker][key] = end_s
        if before_s > now_s:
            engine.at(before_s, self._go_on, who, iteration)
        else:
            self._go_on(now_s, who, iteration)

    def _modulation(self, staleness: int) -> float:
        match self._options.modulation:
            case "inverse":
                return 1 / (1 + staleness)
            case "exponential":
                return math.exp(-self._options.decay * staleness)
        return 1.0

    def _come(self, now_s: float, what: tuple[FloatArray, int, float], key: int) -> None:
        gradient, used, weight = what
        self.staleness = max(self.staleness, self._server.updates - used)
        self._server.apply(gradient, key, weight)

    def _go_on(self, now_s: float, who: tuple[int, int], iteration: int) -> None:
        engine, (worker, key) = self._engine, who
        if engine.iteration[worker] != iteration:
            return
        part = engine.parts[key]
        engine.training.weights[worker, part] = self._copies[worker, part]
        engine.free(worker, key, now_s)

    def left(self, worker: int, now_s: float) -> None:
        """Do nothing: the server does not depend on the worker."""

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """Start the worker with the server's parameters."""
        self._engine.training.weights[worker] = self._server.weights
        self._copies[worker] = self._server.weights
        self._known[worker] = self._server.updates

    def models(self) -> FloatArray:
        """Return the server's parameters."""
        return self._server.weights[None]

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """Return no groups, since workers do not average."""
        return []
