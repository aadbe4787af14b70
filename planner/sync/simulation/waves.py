"""Simulated wave-synchronous parallelism: HetPipe's server (Park et al., ATC 2020)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cluster.link_table import FloatArray
from planner.sync.groups.events import Event, GroupRequest, Joined, Left, Scheduler
from planner.sync.groups.waves import WaveChanges
from planner.sync.simulation.engine import EventLoop
from planner.sync.simulation.servers import Server


class WaveServer:
    """A worker pushes what its wave changed, and waits and pulls if others are too far behind.

    The scheduler, and what a server holds back, are those of real pipelines. A push goes on behind
    the next wave if the worker's weights include enough waves of all others; at most one is under
    way.

    Args:
        engine: the event loop.
        scheduler: lets workers go on.
        distance: of waves, from 0.
        servers: number of servers.
    """

    def __init__(
        self, engine: EventLoop, scheduler: Scheduler, distance: int, servers: int
    ) -> None:
        self._engine, self._scheduler, self._distance = engine, scheduler, distance
        self._half_s = engine.world.scheduler_round_trip_s / 2
        self._server = Server(engine, servers)
        workers, keys = engine.world.workers, len(engine.keys)
        self._changes = [WaveChanges[FloatArray](distance) for _ in engine.keys]
        self._includes = [[0] * keys for _ in range(workers)]
        self._lacks = [[False] * keys for _ in range(workers)]
        self._is_pushing = [[False] * keys for _ in range(workers)]
        self._waits = [[0] * keys for _ in range(workers)]
        self.delay_s = 0.0
        self.staleness = 0
        self._slowest = 0
        """The slowest worker's wave when it was last looked for."""

    def begun(self, worker: int, now_s: float) -> None:
        """Do nothing."""

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Step, and push once the last push is over."""
        if self._is_pushing[worker][key]:
            self._waits[worker][key] = self._engine.iteration[worker]
        else:
            self._push(now_s, worker, key)

    def _push(self, now_s: float, worker: int, key: int) -> None:
        engine, part = self._engine, self._engine.parts[key]
        training, wave = engine.training, engine.iteration[worker]
        before = training.weights[worker, part].copy()
        training.step(worker, part)
        change = (training.weights[worker, part] - before) / engine.world.workers
        training.weights[worker, part] = before + change
        self._is_pushing[worker][key] = True
        self._lacks[worker][key] = self._includes[worker][key] < wave - self._distance
        self._server.push(now_s, worker, key, (self._come, (worker, key), (wave, change)))
        if not self._lacks[worker][key]:
            engine.free(worker, key, now_s)

    def _come(self, now_s: float, who: tuple[int, int], what: tuple[int, FloatArray]) -> None:
        (worker, key), (wave, change) = who, what
        self._add(key, self._changes[key].push(wave, worker, change))
        self._engine.at(now_s + self._half_s, self._asks, who, wave)

    def _add(self, key: int, changes: Sequence[FloatArray]) -> None:
        """Add changes to the server's weights."""
        for change in changes:
            self._server.weights[self._engine.parts[key]] += change

    def _asks(self, now_s: float, who: tuple[int, int], wave: int) -> None:
        worker, key = who
        if self._engine.alive[worker]:
            self._handle(GroupRequest(worker, key, wave), now_s)

    def _handle(self, event: Event, now_s: float) -> None:
        for group in self._scheduler.handle(event, now_s):
            who = (group.members[0], group.key)
            self._engine.at(now_s + self._half_s, self._goes_on, who, group.iterations[0])

    def _goes_on(self, now_s: float, who: tuple[int, int], wave: int) -> None:
        """The slowest worker is near enough: pull what is lacking, or end the push."""
        engine, (worker, key) = self._engine, who
        if not engine.alive[worker]:
            return
        if wave - self._slowest > self.staleness:
            self._slowest = min(engine.iteration[w] for w in self._alive())
            self.staleness = max(self.staleness, wave - self._slowest)
        if self._lacks[worker][key] and engine.iteration[worker] == wave:
            self._server.pull(now_s, worker, key, (self._pulled, who, wave))
            return
        self._is_pushing[worker][key] = False
        waits, self._waits[worker][key] = self._waits[worker][key], 0
        if waits and waits == engine.iteration[worker]:
            self._push(now_s, worker, key)

    def _pulled(self, now_s: float, who: tuple[int, int], wave: int) -> None:
        engine, (worker, key) = self._engine, who
        if engine.iteration[worker] != wave:
            return
        self._add(key, self._changes[key].pull(wave))
        part = engine.parts[key]
        engine.training.weights[worker, part] = self._server.weights[part]
        included = self._changes[key].included
        self._includes[worker][key] = min(included.get(w, 0) for w in self._alive())
        self._is_pushing[worker][key] = False
        engine.free(worker, key, now_s)

    def _alive(self) -> list[int]:
        return [worker for worker, alive in enumerate(self._engine.alive) if alive]

    def left(self, worker: int, now_s: float) -> None:
        """Let others go on without the worker."""
        keys = len(self._engine.keys)
        self._is_pushing[worker], self._waits[worker] = [False] * keys, [0] * keys
        self._handle(Left(worker), now_s)

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """Start the worker with the server's parameters."""
        self._engine.training.weights[worker] = self._server.weights
        self._includes[worker] = [0] * len(self._engine.keys)
        self._handle(Joined(worker, iteration), now_s)

    def models(self) -> FloatArray:
        """Return the server's parameters."""
        return self._server.weights[None]

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """Return no groups, since workers do not average."""
        return []
