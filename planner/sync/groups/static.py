"""Ripples' static schedule: which groups there are in an iteration is fixed beforehand.

Luo et al. 2019, "Heterogeneity-Aware Asynchronous Decentralized Training", its schedule of period
4 for nodes of 4 workers, here for nodes of any size: in every second iteration all of a node are a
group; in between, one worker of each node are a group across nodes, the worker after it is alone,
and the rest of the node is a group. Within a period the groups connect all workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.sync.groups.events import Group
from planner.sync.groups.machine import WaitingRoom
from planner.sync.groups.nodes import Nodes

PERIOD = 4

_Place = tuple[int, int, int]
"""Where a group waits: the iteration, the key, and its first member."""


def static_groups(nodes: Nodes, iteration: int) -> list[tuple[int, ...]]:
    """The groups of an iteration, counted from 1: everyone is in exactly one.

    Args:
        nodes: the workers of each, none of them empty.
        iteration: whose remainder by :data:`PERIOD` decides.
    """
    phase = (iteration - 1) % PERIOD
    if phase % 2:
        return [tuple(sorted(node)) for node in nodes]
    head = phase // 2
    across = tuple(sorted(node[head % len(node)] for node in nodes))
    return [across, *(group for node in nodes for group in _rests(node, head % len(node)))]


def _rests(node: Sequence[int], head: int) -> list[tuple[int, ...]]:
    """What the head leaves of its node: the next one alone, unless the others were then fewer."""
    rest = [*node[head + 1 :], *node[:head]]
    alone = 1 if len(rest) != 2 else 0
    return [tuple(sorted(group)) for group in (rest[:alone], rest[alone:]) if group]


class StaticSchedule:
    """A group begins when all its members wait with its iteration that will ever do so.

    Those are the members that are there and have not passed it. Someone who has left is left
    out. Someone who returns counts from the iteration it joins with: if that is behind the
    others, they wait for it in their next common group, until it has caught up; the groups of
    iterations that they have passed it goes through without them. If it is ahead, it waits for
    them. Nobody waits in a circle: of all who wait, those with the lowest iteration wait only for
    workers that wait nowhere.
    """

    deadline_s: float | None = None

    def __init__(self, room: WaitingRoom, nodes: Nodes) -> None:
        self._room = room
        self._groups: list[dict[int, tuple[int, ...]]] = [
            {worker: group for group in static_groups(nodes, phase + 1) for worker in group}
            for phase in range(PERIOD)
        ]
        self._missing: dict[_Place, int] = {}
        """How many are still to come, where someone waits."""

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Begin the worker's group if it was the last to come."""
        place = iteration, key, self._group(worker, iteration)[0]
        before = self._missing.get(place)
        missing = self._count(place) if before is None else before - 1
        self._missing[place] = missing
        return [] if missing else [self._begin(place)]

    def finish(self, worker: int) -> None:
        """Nothing depends on it."""

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Begin the groups that only waited for the one who has left."""
        return [self._begin(place) for place in self._recount(worker) if not self._missing[place]]

    def join(self, worker: int, iteration: int) -> None:
        """Wait for the worker wherever it will come."""
        self._recount(worker)

    def tick(self, now_s: float) -> list[Group]:
        """Nothing here depends on time."""
        return []

    def _group(self, worker: int, iteration: int) -> tuple[int, ...]:
        return self._groups[(iteration - 1) % PERIOD][worker]

    def _count(self, place: _Place) -> int:
        """How many of a group are still to come."""
        iteration, key, first = place
        upcoming, there = self._room.upcoming[key], self._room.there
        members = self._group(first, iteration)
        return sum(upcoming[member] <= iteration and member in there for member in members)

    def _recount(self, worker: int) -> list[_Place]:
        """Count anew where a worker that left or joined is a member; where someone still waits."""
        places = [place for place in self._missing if self._group(worker, place[0])[0] == place[2]]
        for place in places:
            if self._present(place):
                self._missing[place] = self._count(place)
            else:
                del self._missing[place]
        return sorted(place for place in places if place in self._missing)

    def _present(self, place: _Place) -> list[int]:
        iteration, key, first = place
        waiting = self._room.waiting[key]
        members = self._group(first, iteration)
        return [member for member in members if waiting.get(member) == iteration]

    def _begin(self, place: _Place) -> Group:
        del self._missing[place]
        return self._room.begin(place[1], self._present(place))
