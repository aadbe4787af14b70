"""Waves: a worker goes on once the slowest one is near enough (HetPipe, Park et al., ATC 2020)."""

from __future__ import annotations

from collections.abc import Mapping

from planner.sync.groups.events import Group
from planner.sync.groups.scheduler import WaitingRoom


class Waves:
    """Rules under which nobody computes more than a distance of waves ahead of the slowest worker.

    A request for iteration c says that the worker's wave c is with the servers. It is answered, by
    a group of one, once every active worker has asked for iteration ``c - distance`` or a later
    one: the waves that are computed at the same time are then at most ``distance`` apart (Park et
    al. 2020, section 5, where the distance is D).

    Args:
        room: the workers.
        distance: of waves, from 0.
    """

    deadline_s: float | None = None

    def __init__(self, room: WaitingRoom, distance: int) -> None:
        self._room = room
        self._distance = distance

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Let everybody go on whom this worker's wave was the last to hold up."""
        return self._near_enough(key)

    def finish(self, worker: int) -> None:
        """Do nothing: a worker that may go on holds up nobody by that."""

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Let everybody go on who waited only for the worker that has left."""
        return [group for key in self._room.keys for group in self._near_enough(key)]

    def join(self, worker: int, iteration: int) -> None:
        """Do nothing: from now on others wait for it."""

    def tick(self, now_s: float) -> list[Group]:
        """Do nothing: waves have no deadlines."""
        return []

    def _near_enough(self, key: int) -> list[Group]:
        room = self._room
        waiting = room.waiting[key]
        if not waiting:
            return []
        upcoming = room.upcoming[key]
        slowest = min(upcoming[worker] for worker in room.active) - 1
        free = [w for w, wave in sorted(waiting.items()) if wave - self._distance <= slowest]
        return [room.begin(key, (worker,)) for worker in free]
