"""Simulated averaging of weights: in groups by the real schedulers, and in AD-PSGD's pairs.

Groups are decided by the schedulers that also run with real workers. The bipartite pairs need none:
half of the workers ask, the other half answers at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.groups.events import (
    Event,
    Finished,
    Group,
    GroupRequest,
    Joined,
    Left,
    Scheduler,
    Tick,
)
from planner.sync.groups.matching import passive_partner
from planner.sync.simulation.engine import EventLoop
from planner.sync.simulation.world import StageReduction

MOST_KEPT = 10_000
"""Groups whose reductions are kept at a time."""


class GroupAveraging:
    """Every worker does its optimizer step, then averages its weights with its group.

    The optimizer's state is not averaged. A member that has left in the meantime is left out; the
    others average without it.

    Args:
        engine: the event loop.
        scheduler: the scheduler of groups.
    """

    def __init__(self, engine: EventLoop, scheduler: Scheduler) -> None:
        self._engine, self._scheduler = engine, scheduler
        self._half_s = engine.world.scheduler_round_trip_s / 2
        self.delay_s = self._half_s
        self.staleness = 0
        self._groups: list[list[tuple[int, ...]]] = [[] for _ in engine.keys]
        self._all_reduce = lru_cache(MOST_KEPT)(engine.world.group_all_reduce)
        self._armed_s = float("inf")

    def begun(self, worker: int, now_s: float) -> None:
        """Do nothing."""

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

    def models(self) -> FloatArray:
        """Return the weights of active workers."""
        return self._engine.living()

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """Return the groups that averaged."""
        return self._groups

    def _handle(self, event: Event, now_s: float) -> None:
        for group in self._scheduler.handle(event, now_s):
            self._start(group, now_s)
        deadline_s = self._scheduler.deadline_s
        if deadline_s is not None and deadline_s < self._armed_s:
            self._armed_s = deadline_s
            self._engine.at(max(deadline_s, now_s), self._tick, None, None)

    def _tick(self, now_s: float, _: None, __: None) -> None:
        self._armed_s = float("inf")
        deadline_s = self._scheduler.deadline_s
        if deadline_s is None:
            return
        if deadline_s <= now_s:
            self._handle(Tick(), now_s)
        else:
            self._armed_s = deadline_s
            self._engine.at(deadline_s, self._tick, None, None)

    def _start(self, group: Group, now_s: float) -> None:
        """Send the decision to the members, who begin at once."""
        reduction = self._reduction(group)
        self._engine.sent_bytes += reduction.sent_bytes
        then = (self._moved, group, count())
        self._engine.transfer(now_s + self._half_s, reduction.flows, then)

    def _reduction(self, group: Group) -> StageReduction:
        return self._all_reduce(group.members, group.key)

    def _moved(self, now_s: float, group: Group, marks: Iterator[int]) -> None:
        """Let members go on that are done at the next mark of a ring, or at its end."""
        mark = next(marks)
        if not mark:
            self._average(group)
        done = self._reduction(group).done[mark]
        self._end(now_s, group, [group.members[place] for place in done])

    def _average(self, group: Group) -> None:
        """Average the weights of members that still wait, as soon as the first has the mean."""
        engine, rows = self._engine, self._present(group)
        if len(rows) > 1:
            part = engine.parts[group.key]
            held = engine.training.weights[rows, part]
            engine.training.weights[rows, part] = np.add.reduce(held, 0) / len(rows)
            self._note(group, rows)

    def _note(self, group: Group, rows: list[int]) -> None:
        self._groups[group.key].append(tuple(rows))
        self.staleness = max(self.staleness, max(group.iterations) - min(group.iterations))

    def _end(self, now_s: float, group: Group, done: list[int]) -> None:
        """Let members go on that have the mean."""
        rows = [worker for worker in self._present(group) if worker in done]
        self._engine.at(now_s + self._half_s, self._finished, group, rows)
        for worker in rows:
            self._engine.free_late(worker, group.key, now_s, group.members)

    def _present(self, group: Group) -> list[int]:
        """Return members that have not left since their request."""
        now = self._engine.iteration
        pairs = zip(group.members, group.iterations, strict=True)
        return [worker for worker, iteration in pairs if now[worker] == iteration]

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

    Args:
        engine: the event loop.
        scheduler: the scheduler of groups.
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
        given = self._given.get((worker, what[0]))
        if given is not None and given.iteration == what[1]:
            self._handle(GroupRequest(worker, *what), now_s)

    def _average(self, group: Group) -> None:
        """Work out the changes of members that still take part; they sum to zero."""
        asked = dict(zip(group.members, group.iterations, strict=True))
        rows = [worker for worker in group.members if self._is_of(worker, group.key, asked[worker])]
        copies = [self._given[worker, group.key].weights for worker in rows]
        if len(rows) > 1:
            mean = np.stack(copies).mean(axis=0)
            for worker, copy in zip(rows, copies, strict=True):
                self._given[worker, group.key].change = mean - copy
            self._note(group, rows)

    def _end(self, now_s: float, group: Group, done: list[int]) -> None:
        """Add the changes of members whose average has come."""
        engine, key = self._engine, group.key
        asked = dict(zip(group.members, group.iterations, strict=True))
        rows = [worker for worker in done if self._is_of(worker, key, asked[worker])]
        given = [self._given.pop((worker, key)) for worker in rows]
        engine.at(now_s + self._half_s, self._finished, group, rows)
        for worker, each in zip(rows, given, strict=True):
            if each.change is not None:
                engine.training.weights[worker, engine.parts[key]] += each.change
            if each.next_waits:
                later_s = now_s + engine.lateness_s()
                engine.at(later_s, self._give_late, (worker, key), engine.iteration[worker])

    def _is_of(self, worker: int, key: int, iteration: int) -> bool:
        given = self._given.get((worker, key))
        return given is not None and given.iteration == iteration


class BipartitePairs:
    """Asynchronous decentralised SGD (Lian et al. 2018, section 4).

    As an iteration begins, workers of even number ask a random one of odd number, and average with
    it while they compute; if the answer comes later than the gradient, the worker waits for it. A
    worker that is asked answers while it computes. So gradients are applied to weights that have
    changed since.

    Args:
        engine: the event loop.
        seed: seed of the partners.
    """

    delay_s = 0.0

    def __init__(self, engine: EventLoop, seed: int = 0) -> None:
        self._engine, self._seed = engine, seed
        self.staleness = 0
        self._pairs: list[list[tuple[int, ...]]] = [[] for _ in engine.keys]
        self._is_asking = [[False] * len(engine.keys) for _ in range(engine.world.workers)]
        self._has_stepped = [[False] * len(engine.keys) for _ in range(engine.world.workers)]
        self._met: dict[tuple[int, int], tuple[int, ...]] = {}

    def begun(self, worker: int, now_s: float) -> None:
        """Let half of the workers ask."""
        engine = self._engine
        self._has_stepped[worker] = [False] * len(engine.keys)
        partner = self._partner(worker) if worker % 2 == 0 else None
        if partner is None or not engine.alive[partner]:
            return
        for key in engine.keys:
            self._is_asking[worker][key] = True
            then = (self._end, (worker, partner, key), engine.iteration[worker])
            engine.reduce(now_s, engine.world.exchange((worker, partner), key), then)

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Do the worker's optimizer step, and continue once its average is done."""
        self._engine.training.step(worker, self._engine.parts[key])
        self._has_stepped[worker][key] = True
        if not self._is_asking[worker][key]:
            self._engine.free(worker, key, now_s, self._met.pop((worker, key), ()))

    def _partner(self, worker: int) -> int | None:
        iteration, workers = self._engine.iteration[worker], self._engine.world.workers
        return passive_partner(worker, iteration, workers, self._seed)

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
        """Stop asking the worker, and cancel its wait."""
        self._is_asking[worker] = [False] * len(self._engine.keys)

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """Let others ask the worker again."""

    def models(self) -> FloatArray:
        """Return the weights of active workers."""
        return self._engine.living()

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """Return the pairs that averaged."""
        return self._pairs
