"""Ripples: groups of a static schedule, and groups that are drawn before their members wait.

The static schedule (Luo et al. 2019, "Heterogeneity-Aware Asynchronous Decentralized Training") has
a period of 4 for nodes of 4 workers, here for nodes of any size: in every second iteration all
workers of a node form a group; in between, one worker of each node form a group across nodes, the
worker after it is alone, and the rest of the node forms a group. Within a period the groups connect
all workers.

The Group Generator (Luo et al. 2019; Prague, ASPLOS 2020) has no clocks and sockets here. The first
request of a worker for an iteration, at any key, decides: the worker gets a group that was drawn
for it before, else groups are drawn now. Every worker takes part in its groups in the order in
which they were drawn, one per iteration, and the same at all keys. Of the groups that have not
begun everywhere, the members of the first drawn wait for nothing else, so there is no deadlock.
AD-PSGD's pairs, each decided independently, can deadlock: A waits for B, B for C, C for A.

A worker's lock bit is set from when a group is drawn for it until it is done with that group at
some key, and not only until it asks itself: a worker that waits for a slow or stopped one is not
drawn by others, which would then wait for both. So a slow worker delays only the members of its own
group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.sync.groups.events import Group
from planner.sync.groups.generator import Drawer
from planner.sync.groups.levels import Levels, Nodes
from planner.sync.groups.scheduler import GroupRules, WaitingRoom

PERIOD = 4

_Meeting = tuple[int, int, int]
"""A group by its iteration, key and first member."""


def static_groups(nodes: Nodes, iteration: int) -> list[tuple[int, ...]]:
    """Return the groups of an iteration, counted from 1: every worker is in exactly one.

    Args:
        nodes: the workers of each node, none of them empty.
        iteration: its remainder by :data:`PERIOD` decides.
    """
    phase = (iteration - 1) % PERIOD
    if phase % 2:
        return [tuple(sorted(node)) for node in nodes]
    head = phase // 2
    across = tuple(sorted(node[head % len(node)] for node in nodes))
    return [across, *(group for node in nodes for group in _rests(node, head % len(node)))]


def _rests(node: Sequence[int], head: int) -> list[tuple[int, ...]]:
    """Return the groups of a node without its head: the next worker alone, unless fewer remain."""
    rest = [*node[head + 1 :], *node[:head]]
    alone = 1 if len(rest) != 2 else 0
    return [tuple(sorted(group)) for group in (rest[:alone], rest[alone:]) if group]


class StaticSchedule(GroupRules):
    """A group begins when all its members that can still come wait with its iteration.

    These are the active members that have not passed it. A worker that has left is left out. A
    worker that returns counts from the iteration it joins with: if it is behind the others, they
    wait for it in their next common group until it has caught up, and groups of iterations that
    they have passed start without them. If it is ahead, it waits for them. There is no deadlock:
    among all waiting workers, those with the lowest iteration wait only for workers that wait
    nowhere.
    """

    def __init__(self, room: WaitingRoom, nodes: Nodes) -> None:
        self._room = room
        self._groups: list[dict[int, tuple[int, ...]]] = [
            {worker: group for group in static_groups(nodes, phase + 1) for worker in group}
            for phase in range(PERIOD)
        ]
        self._missing: dict[_Meeting, int] = {}
        """Number of members still missing, for groups that someone waits for."""

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Begin the worker's group if it was the last to come."""
        meeting = iteration, key, self._group(worker, iteration)[0]
        before = self._missing.get(meeting)
        missing = self._count(meeting) if before is None else before - 1
        self._missing[meeting] = missing
        return [] if missing else [self._begin(meeting)]

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Begin the groups that only waited for the one who has left."""
        return [
            self._begin(meeting) for meeting in self._recount(worker) if not self._missing[meeting]
        ]

    def join(self, worker: int, iteration: int) -> None:
        """Wait for the worker wherever it will come."""
        self._recount(worker)

    def _group(self, worker: int, iteration: int) -> tuple[int, ...]:
        return self._groups[(iteration - 1) % PERIOD][worker]

    def _count(self, meeting: _Meeting) -> int:
        """Return how many members of a group are still missing."""
        iteration, key, first = meeting
        upcoming, active = self._room.upcoming[key], self._room.active
        members = self._group(first, iteration)
        return sum(upcoming[member] <= iteration and member in active for member in members)

    def _recount(self, worker: int) -> list[_Meeting]:
        """Count again the waiting groups of a worker that left or joined."""
        meetings = [
            meeting for meeting in self._missing if self._group(worker, meeting[0])[0] == meeting[2]
        ]
        for meeting in meetings:
            if self._present(meeting):
                self._missing[meeting] = self._count(meeting)
            else:
                del self._missing[meeting]
        return sorted(meeting for meeting in meetings if meeting in self._missing)

    def _present(self, meeting: _Meeting) -> list[int]:
        iteration, key, first = meeting
        waiting = self._room.waiting[key]
        members = self._group(first, iteration)
        return [member for member in members if waiting.get(member) == iteration]

    def _begin(self, meeting: _Meeting) -> Group:
        del self._missing[meeting]
        return self._room.begin(meeting[1], self._present(meeting))


_BEGUN = -1


@dataclass(slots=True)
class _Draw:
    """A group that has not begun at all keys.

    Attributes:
        iterations: iteration of each member that has not left; members ascend.
        present: number of members that wait for it at each key; :data:`_BEGUN` once it has begun.
        keys_left: number of keys at which it has not begun.
    """

    iterations: dict[int, int]
    present: list[int]
    keys_left: int


class Draws(GroupRules):
    """Rules under which a drawn group begins at a key as soon as all its members wait there."""

    def __init__(self, room: WaitingRoom, drawer: Drawer) -> None:
        self._room = room
        self._drawer = drawer
        self._asked = [0] * room.workers
        """The last iteration that a worker has asked for at any key."""
        self._promised = [0] * room.workers
        """The last iteration of a worker for which a group is drawn."""
        self._draws: list[dict[int, _Draw]] = [{} for _ in range(room.workers)]
        self._running: dict[int, int] = {}
        """Iterations of workers whose lock bit is cleared once they are done with a group."""
        self._eligible = Levels()
        for worker in range(room.workers):
            self._eligible.put(worker, 0)

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Draw groups if there is none for the worker; begin its group if it was the last one."""
        if iteration > self._asked[worker]:
            self._advance(worker, iteration)
        draw = self._draws[worker][iteration]
        draw.present[key] += 1
        return [self._begin(draw, key)] if draw.present[key] == len(draw.iterations) else []

    def finish(self, worker: int) -> None:
        """Unlock the worker if this was the last group drawn for it."""
        iteration = self._running.pop(worker, None)
        if iteration is not None and self._promised[worker] == iteration:
            self._eligible.put(worker, iteration)

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Take the worker out of its groups, and begin those that only waited for it."""
        self._eligible.discard(worker)
        self._running.pop(worker, None)
        draws = self._draws[worker]
        self._draws[worker] = {}
        for key, iteration in waited.items():
            draws[iteration].present[key] -= 1
        return [group for draw in draws.values() for group in self._without(worker, draw)]

    def join(self, worker: int, iteration: int) -> None:
        """Remove the worker from everything drawn before."""
        self._asked[worker] = self._promised[worker] = iteration - 1
        self._eligible.put(worker, iteration - 1)

    def _advance(self, worker: int, iteration: int) -> None:
        """Note the iteration of a worker, and draw if it has no group."""
        self._asked[worker] = iteration
        if iteration > self._promised[worker]:
            self._eligible.discard(worker)
            for members in self._drawer.draw(worker, iteration, self._eligible):
                self._promise(members)
        if self._drawer.takes_promised:
            self._eligible.put(worker, iteration)

    def _promise(self, members: Sequence[int]) -> None:
        iterations = {}
        for member in sorted(members):
            self._promised[member] += 1
            iterations[member] = self._promised[member]
        keys = len(self._room.keys)
        draw = _Draw(iterations, [0] * keys, keys)
        for member, iteration in iterations.items():
            self._draws[member][iteration] = draw
            if not self._drawer.takes_promised:
                self._eligible.discard(member)

    def _without(self, worker: int, draw: _Draw) -> list[Group]:
        del draw.iterations[worker]
        if not draw.iterations:
            return []
        complete = [key for key in self._room.keys if draw.present[key] == len(draw.iterations)]
        return [self._begin(draw, key) for key in complete]

    def _begin(self, draw: _Draw, key: int) -> Group:
        draw.present[key] = _BEGUN
        if draw.keys_left == len(draw.present) and not self._drawer.takes_promised:
            self._unlock(draw)
        draw.keys_left -= 1
        if not draw.keys_left:
            for member, iteration in draw.iterations.items():
                del self._draws[member][iteration]
        return self._room.begin(key, tuple(draw.iterations))

    def _unlock(self, draw: _Draw) -> None:
        """Unlock workers that are done with the last group drawn for them."""
        for member, iteration in draw.iterations.items():
            if len(draw.iterations) > 1:
                self._running[member] = iteration
            elif self._promised[member] == iteration:
                self._eligible.put(member, iteration)
