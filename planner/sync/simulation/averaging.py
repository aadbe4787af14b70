"""Simulated averaging of weights: in groups by the real schedulers, and in AD-PSGD's pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.groups.events import Event, Finished, Group, GroupRequest, Joined, Left, Tick
from planner.sync.groups.matching import passive_partner
from planner.sync.groups.scheduler import Scheduler
from planner.sync.simulation.engine import Engine, Strategy

MOST_KEPT = 10_000
"""Groups whose all-reduces are kept at a time."""


class GroupAveraging(Strategy):
    """Every worker does its optimizer step, then averages its weights with its group.

    The optimizer's state is not averaged. A member that has left in the meantime is left out; the
    others average without it.

    Args:
        engine: the event loop.
        scheduler: of groups, that of real runs.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        super().__init__(engine)
        self._scheduler = scheduler
        self._half_s = self.delay_s = engine.world.scheduler_round_trip_s / 2
        self.groups = [[] for _ in engine.keys]
        self._all_reduce = lru_cache(MOST_KEPT)(engine.world.group_all_reduce)
        self._armed_s = inf

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Pass the request to the scheduler."""
        engine = self.engine
        engine.training.step(worker, engine.parts[key])
        self.handle(now_s, GroupRequest(worker, key, engine.iteration[worker]))

    def left(self, now_s: float, worker: int) -> None:
        """Inform the scheduler at once."""
        self.handle(now_s, Left(worker))

    def joined(self, now_s: float, worker: int) -> None:
        """Inform the scheduler before the worker's first request."""
        self.handle(now_s, Joined(worker, self.engine.iteration[worker] + 1))
        super().joined(now_s, worker)

    def handle(self, now_s: float, event: Event) -> None:
        """Begin the groups that the scheduler decides on, half a round trip later."""
        for group in self._scheduler.handle(event, now_s):
            self._move(now_s + self._half_s, group, 0)
        self._arm(now_s)

    def _arm(self, now_s: float) -> None:
        deadline_s = self._scheduler.deadline_s
        if deadline_s is not None and deadline_s < self._armed_s:
            self._armed_s = deadline_s
            self.engine.at(deadline_s, self._tick)

    def _tick(self, now_s: float) -> None:
        self._armed_s = inf
        deadline_s = self._scheduler.deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            self.handle(now_s, Tick())
        else:
            self._arm(now_s)

    def _move(self, now_s: float, group: Group, part: int) -> None:
        flow, _ = self._all_reduce(group.members, group.key)[part]
        self.engine.transfer(now_s, (flow,), self._moved, group, part)

    def _moved(self, now_s: float, group: Group, part: int) -> None:
        """Let those continue that are done, of the members that still take part.

        They average as soon as the first has the mean.
        """
        pairs = zip(group.members, group.iterations, strict=True)
        rows = [worker for worker, asked in pairs if self.takes_part(worker, group.key, asked)]
        if not part and len(rows) > 1:
            self.average(group.key, rows)
            self.groups[group.key].append(tuple(rows))
            behind = max(group.iterations) - min(group.iterations)
            self.staleness = max(self.staleness, behind)
        parts = self._all_reduce(group.members, group.key)
        if part + 1 < len(parts):
            self._move(now_s, group, part + 1)
        done = set(parts[part][1])
        rows = [worker for worker in rows if worker in done]
        self.engine.at(now_s + self._half_s, self._finished, group, rows)
        for worker in rows:
            self.averaged(now_s, worker, group.key)

    def _finished(self, now_s: float, group: Group, rows: list[int]) -> None:
        for worker in rows:
            if self.engine.alive[worker]:
                self.handle(now_s, Finished(worker, group.number))

    def takes_part(self, worker: int, key: int, iteration: int) -> bool:
        """Return whether a worker has not left since its request."""
        return self.engine.iteration[worker] == iteration

    def average(self, key: int, rows: list[int]) -> None:
        """Replace the weights of workers by their mean."""
        weights, part = self.engine.training.weights, self.engine.parts[key]
        weights[rows, part] = np.add.reduce(weights[rows, part], 0) / len(rows)

    def averaged(self, now_s: float, worker: int, key: int) -> None:
        """Let a worker continue whose group is over."""
        self.engine.free(worker, key, now_s)


@dataclass
class _Contribution:
    """The weights that a worker has given to a group, or is about to.

    Attributes:
        iteration: iteration after which they were copied.
        weights: a copy.
        next_waits: whether the worker's next iteration is over and waits for this group.
        change: what the average adds to them; None: it is not known yet, or nothing.
    """

    iteration: int
    weights: FloatArray
    next_waits: bool = False
    change: FloatArray | None = None


class OverlappedGroupAveraging(GroupAveraging):
    """:class:`GroupAveraging` whose members continue with their own weights.

    The change of the average against the copies is added when it arrives. A pipeline rank is in one
    group at a time: if its next iteration ends before that, it waits.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        super().__init__(engine, scheduler)
        self.delay_s = 0.0
        self._given: dict[tuple[int, int], _Contribution] = {}

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Do the optimizer step, and give a copy to a group if the worker is in none."""
        self.engine.training.step(worker, self.engine.parts[key])
        given = self._given.get((worker, key))
        if given is None:
            self._give(now_s, worker, key)
        else:
            given.next_waits = True

    def left(self, now_s: float, worker: int) -> None:
        """Discard the worker's copies."""
        for key in self.engine.keys:
            self._given.pop((worker, key), None)
        super().left(now_s, worker)

    def _give(self, now_s: float, worker: int, key: int) -> None:
        engine = self.engine
        copy = engine.training.weights[worker, engine.parts[key]].copy()
        iteration = engine.iteration[worker]
        self._given[worker, key] = _Contribution(iteration, copy)
        engine.at(now_s + self._half_s, self._asks, worker, key, iteration)
        engine.free(worker, key, now_s)

    def _asks(self, now_s: float, worker: int, key: int, iteration: int) -> None:
        if self.takes_part(worker, key, iteration):
            self.handle(now_s, GroupRequest(worker, key, iteration))

    def takes_part(self, worker: int, key: int, iteration: int) -> bool:
        """Return whether the worker's copy is still the one of its request."""
        given = self._given.get((worker, key))
        return given is not None and given.iteration == iteration

    def average(self, key: int, rows: list[int]) -> None:
        """Work out the changes of members; they sum to zero."""
        given = [self._given[worker, key] for worker in rows]
        mean = np.stack([each.weights for each in given]).mean(axis=0)
        for each in given:
            each.change = mean - each.weights

    def averaged(self, now_s: float, worker: int, key: int) -> None:
        """Add the change, and give a copy to the next group if the next iteration is over."""
        given = self._given.pop((worker, key))
        if given.change is not None:
            self.engine.training.weights[worker, self.engine.parts[key]] += given.change
        if given.next_waits:
            # After whatever else happens at this moment.
            self.engine.at(now_s, self._give_next, worker, key, self.engine.iteration[worker])

    def _give_next(self, now_s: float, worker: int, key: int, iteration: int) -> None:
        if self.engine.iteration[worker] == iteration:
            self._give(now_s, worker, key)


class BipartitePairs(Strategy):
    """Asynchronous decentralised SGD (Lian et al. 2018, section 4).

    As an iteration begins, workers of even number ask a random one of odd number, and average with
    it while they compute; if the answer comes later than the gradient, the worker waits for it. A
    worker that is asked answers while it computes. So gradients are applied to weights that have
    changed since.

    Args:
        engine: the event loop.
        seed: seed of the partners.
    """

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        super().__init__(engine)
        self._seed = seed
        self.groups = [[] for _ in engine.keys]
        self._asking: set[tuple[int, int]] = set()
        self._stepped: set[tuple[int, int]] = set()

    def begun(self, now_s: float, worker: int) -> None:
        """Let half of the workers ask."""
        engine = self.engine
        self._stepped -= {(worker, key) for key in engine.keys}
        if worker % 2:
            return
        iteration, workers = engine.iteration[worker], engine.world.workers
        partner = passive_partner(worker, iteration, workers, self._seed)
        if partner is None or not engine.alive[partner]:
            return
        for key in engine.keys:
            self._asking.add((worker, key))
            flows = engine.world.exchange((worker, partner), key)
            engine.transfer(now_s, flows, self._answered, worker, partner, key, iteration)

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Do the worker's optimizer step, and continue once its average is done."""
        self.engine.training.step(worker, self.engine.parts[key])
        self._stepped.add((worker, key))
        self._go_on(now_s, worker, key)

    def _go_on(self, now_s: float, worker: int, key: int) -> None:
        who = (worker, key)
        if who in self._stepped and who not in self._asking:
            self.engine.free(worker, key, now_s)

    def _answered(self, now_s: float, worker: int, partner: int, key: int, iteration: int) -> None:
        engine = self.engine
        if engine.iteration[worker] != iteration:
            return
        if engine.alive[partner]:
            weights, part = engine.training.weights, engine.parts[key]
            mean = (weights[worker, part] + weights[partner, part]) / 2
            weights[worker, part] = weights[partner, part] = mean
            self.groups[key].append((min(worker, partner), max(worker, partner)))
            apart = abs(engine.iteration[worker] - engine.iteration[partner])
            self.staleness = max(self.staleness, apart)
        self._asking.discard((worker, key))
        self._go_on(now_s, worker, key)

    def left(self, now_s: float, worker: int) -> None:
        """Cancel what the worker waits for."""
        self._asking -= {(worker, key) for key in self.engine.keys}
