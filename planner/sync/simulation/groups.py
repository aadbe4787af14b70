"""Strategies whose groups a scheduler decides: the same machines that run behind real workers."""

from __future__ import annotations

import numpy as np

from planner.artifacts.link_table import FloatArray
from planner.sync.groups.events import (
    Event,
    Finished,
    Group,
    Joined,
    Left,
    Request,
    Scheduler,
    Tick,
)
from planner.sync.simulation.engine import Engine
from planner.sync.simulation.world import Reduction


class GroupAveraging:
    """Every worker steps by itself, then averages its weights with its group.

    The optimizer's state is not averaged. A member that has left in the meantime is left out; the
    others average without it.

    Args:
        engine: that runs it.
        scheduler: that decides the groups.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._engine, self._scheduler = engine, scheduler
        self._half_s = engine.world.scheduler_round_trip_s / 2
        self.delay_s = self._half_s
        self.sent_bytes = 0.0
        self.staleness = 0
        self._groups: list[list[tuple[int, ...]]] = [[] for _ in engine.keys]
        self._costs: dict[tuple[int, int, bool], Reduction] = {}
        self._armed_s = float("inf")

    def begun(self, worker: int, now_s: float) -> None:
        """Nothing to do."""

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """The request has reached the scheduler."""
        engine = self._engine
        engine.training.step(worker, engine.parts[key])
        self._tell(Request(worker, key, engine.iteration[worker]), now_s)

    def left(self, worker: int, now_s: float) -> None:
        """The scheduler learns of it at once."""
        self._tell(Left(worker), now_s)

    def joined(self, worker: int, iteration: int, now_s: float) -> None:
        """The scheduler learns of it before the worker asks for anything."""
        self._tell(Joined(worker, iteration), now_s)

    def models(self) -> FloatArray:
        """The weights of the workers that are there."""
        return self._engine.living()

    def memberships(self) -> list[list[tuple[int, ...]]]:
        """The groups that ran."""
        return self._groups

    def _tell(self, event: Event, now_s: float) -> None:
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
            self._tell(Tick(), now_s)
        else:
            self._armed_s = deadline_s
            self._engine.at(deadline_s, self._tick, None, None)

    def _start(self, group: Group, now_s: float) -> None:
        """The decision travels back to the members, who begin at once."""
        engine, begin_s, count = self._engine, now_s + self._half_s, len(group.members)
        if count > 1:
            reduction = self._cost(group)
            self.sent_bytes += reduction.sent_bytes
            begin_s = engine.reserve(begin_s, group.members, group.key, reduction)
        engine.at(begin_s, self._end, group, None)

    def _cost(self, group: Group) -> Reduction:
        world, members = self._engine.world, group.members
        name = (group.key, len(members), world.crosses(members))
        if name not in self._costs:
            bytes_ = world.places[group.key].parameter_bytes
            self._costs[name] = world.all_reduce(members, bytes_)
        return self._costs[name]

    def _end(self, now_s: float, group: Group, _: None) -> None:
        engine, rows = self._engine, self._present(group)
        if len(rows) > 1:
            part = engine.parts[group.key]
            held = engine.training.weights[rows, part]
            engine.training.weights[rows, part] = np.add.reduce(held, 0) / len(rows)
            self._groups[group.key].append(tuple(rows))
            self.staleness = max(self.staleness, max(group.iterations) - min(group.iterations))
        engine.at(now_s + self._half_s, self._finished, group, rows)
        for worker in rows:
            engine.free(worker, group.key, now_s, group.members)

    def _present(self, group: Group) -> list[int]:
        """Members that have not left since they asked."""
        now = self._engine.iteration
        pairs = zip(group.members, group.iterations, strict=True)
        return [worker for worker, iteration in pairs if now[worker] == iteration]

    def _finished(self, now_s: float, group: Group, rows: list[int]) -> None:
        for worker in rows:
            if self._engine.alive[worker]:
                self._tell(Finished(worker, group.number), now_s)
