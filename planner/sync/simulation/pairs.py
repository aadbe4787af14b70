"""AD-PSGD in its bipartite form: half of the workers ask, the other half answers at any time."""

from __future__ import annotations

from planner.artifacts.link_table import FloatArray
from planner.sync.groups.matching import passive_partner
from planner.sync.simulation.engine import Engine
from planner.sync.simulation.world import Reduction


class BipartitePairs:
    """Asynchronous decentralised SGD (Lian et al. 2018, section 4).

    As an iteration begins, workers of even number ask a random one of odd number, and average with
    it behind their computation; one whose answer comes later than its gradient waits for it. A
    worker that is asked answers beside its computation. So gradients are applied to weights that
    have changed since. Cards serve one after the other.

    Args:
        engine: that runs it.
        seed: of the partners.
    """

    delay_s = 0.0

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine, self._seed = engine, seed
        self.sent_bytes = 0.0
        self.staleness = 0
        self._pairs: list[list[tuple[int, ...]]] = [[] for _ in engine.keys]
        self._is_asking = [[False] * len(engine.keys) for _ in range(engine.world.workers)]
        self._has_stepped = [[False] * len(engine.keys) for _ in range(engine.world.workers)]
        self._met: dict[tuple[int, int], tuple[int, ...]] = {}

    def begun(self, worker: int, now_s: float) -> None:
        """Half of the workers ask."""
        engine = self._engine
        self._has_stepped[worker] = [False] * len(engine.keys)
        partner = self._partner(worker) if worker % 2 == 0 else None
        if partner is None or not engine.alive[partner]:
            return
        pair = (min(worker, partner), max(worker, partner))
        for key in engine.keys:
            exchange = self._exchange(pair, key)
            self.sent_bytes += exchange.sent_bytes
            end_s = engine.reserve(now_s, pair, key, exchange)
            self._is_asking[worker][key] = True
            engine.at(end_s, self._end, (worker, partner, key), engine.iteration[worker])

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """The worker steps, and goes on once its average is done."""
        self._engine.training.step(worker, self._engine.parts[key])
        self._has_stepped[worker][key] = True
        if not self._is_asking[worker][key]:
            self._engine.free(worker, key, now_s, self._met.pop((worker, key), ()))

    def _partner(self, worker: int) -> int | None:
        iteration, workers = self._engine.iteration[worker], self._engine.world.workers
        return passive_partner(worker, iteration, workers, self._seed)

    def _exchange(self, pair: tuple[int, int], key: int) -> Reduction:
        """There and back; the answer is on its way while the request still comes in."""
        world = self._engine.world
        link, bytes_ = world.link(pair), world.places[key].parameter_bytes
        moving_s = link.moving_s(bytes_)
        seconds = world.collective_overhead_s + 2 * link.latency_s + moving_s
        return Reduction(seconds, moving_s if world.crosses(pair) else 0.0, 2.0 * bytes_)

    def _end(self, now_s: float, who: tuple[int, int, int], iteration: int) -> None:
        engine, (worker, partner, key) = self._engine, who
        if engine.iteration[worker] != iteration:
            return
        pair = (min(worker, partner), max(worker, partner))
        if engine.alive[partner]:
            weights, part = engine.training.weights, engine.parts[key]
            mean = (weights[worker, part] + weights[partner, part]) / 2
            weights[worker, part] = mean
            weights[partner, part] = mean
            self._pairs[key].append(pair)
            self._met[worker, key] = pair
            apart = abs(engine.iteration[worker] - engine.iteration[partner])
            self.staleness = max(self.staleness, apart)
        self._is_asking[worker][key] = False
        if self._has_stepped[worker][key]:
            engine.free(worker, key, now_s, self._met.pop((worker, key), ()))

    def left(self, worker: int, now_s: float) -> None:
        """Nobody asks it any more, and it waits for no answer."""
        self._is_asking[worker] = [False] * len(self._engine.keys)

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """It is asked again."""

    def models(self) -> FloatArray:
        """The weights of the workers that are there."""
        return self._engine.living()

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """The pairs that averaged."""
        return self._pairs
