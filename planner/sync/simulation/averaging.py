"""Simulated averaging of weights: in groups by the real schedulers, and in AD-PSGD's pairs.

Groups are decided by the schedulers that also run with real workers. The bipartite pairs need none:
half of the workers ask, the other half answers at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import inf

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.groups.events import Event, Finished, Group, GroupRequest, Joined, Left, Tick
from planner.sync.groups.matching import passive_partner
from planner.sync.groups.scheduler import Scheduler
from planner.sync.simulation.engine import Behaviour, EventLoop

MOST_KEPT = 10_000
"""Groups whose reductions are kept at a time."""


class GroupAveraging(Behaviour):
    """Every worker does its optimizer step, then averages its weights with its group.

    The optimizer's state is not averaged. A member that has left in the meantime is left out; the
    others average without it.

    Args:
        engine: the event loop.
        scheduler: the scheduler of groups.
    """

    def __init__(self, engine: EventLoop, scheduler: Scheduler) -> None:
        super().__init__(engine)
        self._scheduler = scheduler
        self._half_s = self.delay_s = engine.world.scheduler_round_trip_s / 2
        self.groups = [[] for _ in engine.keys]
        self._reduction = lru_cache(MOST_KEPT)(engine.world.group_all_reduce)
        self._armed_s = inf

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Pass the request to the scheduler."""
        engine = self._engine
        engine.training.step(worker, engine.parts[key])
        self._handle(GroupRequest(worker, key, engine.iteration[worker]), now_s)

    def left(self, worker: int, now_s: float) -> None:
        """Inform the scheduler at once."""
        self._handle(Left(worker), now_s)

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """Inform the scheduler before the worker's first request."""
        self._handle(Joined(worker, iteration), now_s)

    def _handle(self, event: Event, now_s: float) -> None:
        for group in self._scheduler.handle(event, now_s):
            # The decision is sent to the members, who begin at once.
            found = self._reduction(group.members, group.key)
            then = (self._moved, group, count())
            self._engine.transfer(now_s + self._half_s, found.flows, found.sent_bytes, then)
        self._arm(now_s)

    def _arm(self, now_s: float) -> None:
        deadline_s = self._scheduler.deadline_s
        if deadline_s is not None and deadline_s < self._armed_s:
            self._armed_s = deadline_s
            self._engine.at(max(deadline_s, now_s), self._tick, None, None)

    def _tick(self, now_s: float, _: None, __: None) -> None:
        self._armed_s = inf
        deadline_s = self._scheduler.deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            self._handle(Tick(), now_s)
        else:
            self._arm(now_s)

    def _moved(self, now_s: float, group: Group, marks: Iterator[int]) -> None:
        """Let members go on that are done at the next mark of a ring, or at its end.

        They average as soon as the first has the mean.
        """
        mark = next(marks)
        if not mark:
            rows = self._present(group)
            if len(rows) > 1:
                self._average(group.key, rows)
                self.groups[group.key].append(tuple(rows))
                behind = max(group.iterations) - min(group.iterations)
                self.staleness = max(self.staleness, behind)
        places = self._reduction(group.members, group.key).done[mark]
        done = {group.members[place] for place in places}
        self._end(now_s, group, [worker for worker in self._present(group) if worker in done])

    def _present(self, group: Group) -> list[int]:
        """Return members that still take part."""
        pairs = zip(group.members, group.iterations, strict=True)
        return [worker for worker, asked in pairs if self._waits(worker, group.key, asked)]

    def _waits(self, worker: int, key: int, iteration: int) -> bool:
        """Return whether a worker has not left since its request."""
        return self._engine.iteration[worker] == iteration

    def _average(self, key: int, rows: list[int]) -> None:
        weights, part = self._engine.training.weights, self._engine.parts[key]
        weights[rows, part] = np.add.reduce(weights[rows, part], 0) / len(rows)

    def _end(self, now_s: float, group: Group, rows: list[int]) -> None:
        """Let members go on that have the mean."""
        self._engine.at(now_s + self._half_s, self._finished, group, rows)
        for worker in rows:
            self._engine.free_late(worker, group.key, now_s, group.members)

    def _finished(self, now_s: float, group: Group, rows: list[int]) -> None:
        for worker in rows:
            if self._engine.alive[worker]:
                self._handle(Finished(worker, group.number), now_s)


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

    def __init__(self, engine: EventLoop, scheduler: Scheduler) -> None:
        super().__init__(engine, scheduler)
        self.delay_s = 0.0
        self._given: dict[tuple[int, int], _Contribution] = {}

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Do the optimizer step, and give a copy to a group if the worker is in none."""
        self._engine.training.step(worker, self._engine.parts[key])
        given = self._given.get((worker, key))
        if given is None:
            self._give(worker, key, now_s)
        else:
            given.next_waits = True

    def left(self, worker: int, now_s: float) -> None:
        """Discard the worker's copies."""
        for key in self._engine.keys:
            self._given.pop((worker, key), None)
        super().left(worker, now_s)

    def _give_late(self, now_s: float, who: tuple[int, int], iteration: int) -> None:
        """Give a copy once the worker has noticed that its last group is over."""
        if self._engine.iteration[who[0]] == iteration:
            self._give(*who, now_s)

    def _give(self, worker: int, key: int, now_s: float) -> None:
        engine = self._engine
        copy = engine.training.weights[worker, engine.parts[key]].copy()
        iteration = engine.iteration[worker]
        self._given[worker, key] = _Contribution(iteration, copy)
        engine.at(now_s + self._half_s, self._asks, worker, (key, iteration))
        engine.free(worker, key, now_s)

    def _asks(self, now_s: float, worker: int, what: tuple[int, int]) -> None:
        """Pass the request to the scheduler."""
        if self._waits(worker, *what):
            self._handle(GroupRequest(worker, *what), now_s)

    def _waits(self, worker: int, key: int, iteration: int) -> bool:
        given = self._given.get((worker, key))
        return given is not None and given.iteration == iteration

    def _average(self, key: int, rows: list[int]) -> None:
        """Work out the changes of members; they sum to zero."""
        given = [self._given[worker, key] for worker in rows]
        mean = np.stack([each.weights for each in given]).mean(axis=0)
        for each in given:
            each.change = mean - each.weights

    def _end(self, now_s: float, group: Group, rows: list[int]) -> None:
        """Add the changes of members whose average has come."""
        engine, key = self._engine, group.key
        given = [self._given.pop((worker, key)) for worker in rows]
        engine.at(now_s + self._half_s, self._finished, group, rows)
        for worker, each in zip(rows, given, strict=True):
            if each.change is not None:
                engine.training.weights[worker, engine.parts[key]] += each.change
            if each.next_waits:
                later_s = now_s + engine.lateness_s()
                engine.at(later_s, self._give_late, (worker, key), engine.iteration[worker])


class BipartitePairs(Behaviour):
    """Asynchronous decentralised SGD (Lian et al. 2018, section 4).

    As an iteration begins, workers of even number ask a random one of odd number, and average with
    it while they compute; if the answer comes later than the gradient, the worker waits for it. A
    worker that is asked answers while it computes. So gradients are applied to weights that have
    changed since.

    Args:
        engine: the event loop.
        seed: seed of the partners.
    """

    def __init__(self, engine: EventLoop, seed: int = 0) -> None:
        super().__init__(engine)
        self._seed = seed
        self.groups = [[] for _ in engine.keys]
        self._asking: set[tuple[int, int]] = set()
        self._stepped: set[tuple[int, int]] = set()
        self._met: dict[tuple[int, int], tuple[int, ...]] = {}

    def begun(self, worker: int, now_s: float) -> None:
        """Let half of the workers ask."""
        engine = self._engine
        self._stepped -= {(worker, key) for key in engine.keys}
        if worker % 2:
            return
        iteration, workers = engine.iteration[worker], engine.world.workers
        partner = passive_partner(worker, iteration, workers, self._seed)
        if partner is None or not engine.alive[partner]:
            return
        for key in engine.keys:
            self._asking.add((worker, key))
            found = engine.world.exchange((worker, partner), key)
            then = (self._end, (worker, partner, key), iteration)
            engine.transfer(now_s, found.flows, found.sent_bytes, then)

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Do the worker's optimizer step, and continue once its average is done."""
        self._engine.training.step(worker, self._engine.parts[key])
        self._stepped.add((worker, key))
        self._go_on(now_s, worker, key)

    def _go_on(self, now_s: float, worker: int, key: int) -> None:
        who = (worker, key)
        if who in self._stepped and who not in self._asking:
            self._engine.free(worker, key, now_s, self._met.pop(who, ()))

    def _end(self, now_s: float, who: tuple[int, int, int], iteration: int) -> None:
        engine, (worker, partner, key) = self._engine, who
        if engine.iteration[worker] != iteration:
            return
        if engine.alive[partner]:
            weights, part = engine.training.weights, engine.parts[key]
            mean = (weights[worker, part] + weights[partner, part]) / 2
            weights[worker, part] = weights[partner, part] = mean
            self._met[worker, key] = pair = (min(worker, partner), max(worker, partner))
            self.groups[key].append(pair)
            apart = abs(engine.iteration[worker] - engine.iteration[partner])
            self.staleness = max(self.staleness, apart)
        self._asking.discard((worker, key))
        self._go_on(now_s, worker, key)

    def left(self, worker: int, now_s: float) -> None:
        """Cancel what the worker waits for."""
        self._asking -= {(worker, key) for key in self._engine.keys}
