"""Waves: a worker goes on once the slowest one is near enough (HetPipe, Park et al., ATC 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, TypeVar

from planner.sync.groups.events import Group
from planner.sync.groups.levels import Levels
from planner.sync.groups.scheduler import GroupRules, WaitingRoom

Change = TypeVar("Change")


class WaveChanges(Generic[Change]):
    """What waves have changed, on its way into the weights of a server; real or simulated.

    A pull after wave c has no changes of waves beyond ``c + distance``, which somebody who was
    quicker to pull may have pushed since: with distance 0 all pipelines thus take up the very same
    weights. Such changes are held back until the next pull, and added in the order of waves then.

    Args:
        distance: of waves, from 0.

    Attributes:
        included: by pipeline, its last wave whose changes are in the weights.
    """

    def __init__(self, distance: int) -> None:
        self._distance = distance
        self._pulled_after = 0
        """The last wave after which a pipeline has pulled."""
        self._held: list[tuple[int, int, Change]] = []
        """Waves, pipelines and changes that nobody may pull yet."""
        self.included: dict[int, int] = {}

    def push(self, wave: int, pipeline: int, change: Change) -> list[Change]:
        """Take in a change; return those to add to the weights now, in order."""
        self._held.append((wave, pipeline, change))
        return self._up_to(self._pulled_after + self._distance)

    def pull(self, wave: int | None) -> list[Change]:
        """Return the changes to add before a pull.

        Args:
            wave: after which it is; None: it has everything.
        """
        if wave is None:
            return self._up_to(math.inf)
        self._pulled_after = max(self._pulled_after, wave)
        return self._up_to(self._pulled_after + self._distance)

    def _up_to(self, last: float) -> list[Change]:
        ready = sorted((row for row in self._held if row[0] <= last), key=lambda row: row[:2])
        self._held = [row for row in self._held if row[0] > last]
        self.included.update((pipeline, wave) for wave, pipeline, _ in ready)
        return [change for _, _, change in ready]


class Waves(GroupRules):
    """Rules under which nobody computes more than a distance of waves ahead of the slowest worker.

    A request for iteration c says that the worker's wave c is with the servers. It is answered, by
    a group of one, once every active worker has asked for iteration ``c - distance`` or a later
    one: the waves that are computed at the same time are then at most ``distance`` apart (Park et
    al. 2020, section 5, where the distance is D).

    Args:
        room: the workers.
        distance: of waves, from 0.
    """

    def __init__(self, room: WaitingRoom, distance: int) -> None:
        self._room = room
        self._distance = distance
        self._asked = [Levels() for _ in room.keys]
        """By key, active workers by the last iteration that they have asked for there."""
        for worker in room.active:
            self.join(worker, 1)

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Let everybody go on whom this worker's wave was the last to hold up."""
        asked = self._asked[key]
        before = asked.lowest
        asked.put(worker, iteration)
        return self._near_enough(key, None if asked.lowest > before else worker)

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Let everybody go on who waited only for the worker that has left."""
        for asked in self._asked:
            asked.discard(worker)
        return [group for key in self._room.keys for group in self._near_enough(key)]

    def join(self, worker: int, iteration: int) -> None:
        """Have others wait for the worker."""
        for asked in self._asked:
            asked.put(worker, iteration - 1)

    def _near_enough(self, key: int, only: int | None = None) -> list[Group]:
        """Let workers go on that the slowest is near enough to; ``only`` one of them, or all."""
        waiting = self._room.waiting[key]
        if not waiting:
            return []
        last = self._asked[key].lowest + self._distance
        workers = sorted(waiting) if only is None else [only]
        free = [worker for worker in workers if waiting[worker] <= last]
        return [self._room.begin(key, (worker,)) for worker in free]
