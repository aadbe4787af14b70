"""Groups that average behind the computation of their members' next iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.artifacts.link_table import FloatArray
from planner.sync.groups.events import Group, Request, Scheduler
from planner.sync.simulation.engine import Engine
from planner.sync.simulation.groups import GroupAveraging


@dataclass
class _Given:
    """What a worker has given to a group, or is about to.

    Attributes:
        iteration: after which.
        weights: a copy of its own.
        next_waits: whether its next iteration is over, and its place waits for this group.
    """

    iteration: int
    weights: FloatArray
    next_waits: bool = False


class GroupAveragingBehind(GroupAveraging):
    """As :class:`GroupAveraging`, but members go on with their own weights.

    What the average of the copies has changed is added when it comes. A place is in one group at a
    time: who is done with the next iteration before that waits.

    Args:
        engine: that runs it.
        scheduler: that decides the groups.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        super().__init__(engine, scheduler)
        self.delay_s = 0.0
        self._given: dict[tuple[int, int], _Given] = {}

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """The worker steps, and gives a copy to a group if it is in none."""
        self._engine.training.step(worker, self._engine.parts[key])
        given = self._given.get((worker, key))
        if given is None:
            self._give(worker, key, now_s)
        else:
            given.next_waits = True

    def left(self, worker: int, now_s: float) -> None:
        """What it has given is void."""
        for key in self._engine.keys:
            self._given.pop((worker, key), None)
        super().left(worker, now_s)

    def _give(self, worker: int, key: int, now_s: float) -> None:
        engine = self._engine
        copy = engine.training.weights[worker, engine.parts[key]].copy()
        iteration = engine.iteration[worker]
        self._given[worker, key] = _Given(iteration, copy)
        engine.at(now_s + self._half_s, self._asks, worker, (key, iteration))
        engine.free(worker, key, now_s)

    def _asks(self, now_s: float, worker: int, what: tuple[int, int]) -> None:
        """The request has reached the scheduler."""
        given = self._given.get((worker, what[0]))
        if given is not None and given.iteration == what[1]:
            self._tell(Request(worker, *what), now_s)

    def _end(self, now_s: float, group: Group, _: None) -> None:
        engine, key = self._engine, group.key
        asked = dict(zip(group.members, group.iterations, strict=True))
        rows = [worker for worker in group.members if self._is_of(worker, key, asked[worker])]
        given = [self._given.pop((worker, key)) for worker in rows]
        if len(rows) > 1:
            self._add_changes(rows, key, np.stack([each.weights for each in given]))
            self.staleness = max(self.staleness, max(asked.values()) - min(asked.values()))
        engine.at(now_s + self._half_s, self._finished, group, rows)
        for worker, each in zip(rows, given, strict=True):
            if each.next_waits:
                self._give(worker, key, now_s)

    def _is_of(self, worker: int, key: int, iteration: int) -> bool:
        given = self._given.get((worker, key))
        return given is not None and given.iteration == iteration

    def _add_changes(self, rows: list[int], key: int, copies: FloatArray) -> None:
        """The mean of the copies less the own one: all together nothing."""
        engine = self._engine
        engine.training.weights[rows, engine.parts[key]] += copies.mean(axis=0) - copies
        self._groups[key].append(tuple(rows))
