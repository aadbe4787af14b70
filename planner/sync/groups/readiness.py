"""Groups of the workers that are ready: SDPipe's scheduler (Miao et al., VLDB 2023).

The first worker at a key opens a group and waits for others for a while, which adapts to whether
others came. Members wait already, so there is no deadlock.

Workers that come at the same times would meet again and again, so there is a guarantee: after a
number of member updates of a key, the groups since the last time must have connected all workers.
If they have not, the key's group stays open, beyond its deadline and its largest size, until it
does. The authors' group stays open until their graph of pairs is complete, which amounts to a
barrier of all workers. Here it closes as soon as one worker of each component waits, since the
group itself then joins them; other workers continue. Only one key at a time holds a group, in the
order in which the keys fell due: a worker that one key waits for is held nowhere else.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.sync.groups.events import Group
from planner.sync.groups.scheduler import GroupRules, WaitingRoom
from planner.sync.strategies import SemiDecentralizedOptions


class SyncGraph:
    """Components of workers that groups have joined.

    A component whose workers have all left does not count; connections through a worker that has
    left remain.

    Attributes:
        components: number of components with an active worker.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.components = 0
        self._node: dict[int, int] = {}
        self._parent: list[int] = []
        self._active: list[int] = []
        """Number of active workers in a component, by root."""
        for worker in workers:
            self.join(worker)

    def join(self, worker: int) -> None:
        """Add a worker without connections."""
        self._node[worker] = len(self._parent)
        self._parent.append(len(self._parent))
        self._active.append(1)
        self.components += 1

    def leave(self, worker: int) -> None:
        """Remove a worker."""
        root = self.component(worker)
        del self._node[worker]
        self._active[root] -= 1
        self.components -= self._active[root] == 0

    def merge(self, members: Sequence[int]) -> None:
        """Connect active workers."""
        first = self.component(members[0])
        for member in members[1:]:
            other = self.component(member)
            if other != first:
                # The larger stays root, so that ways to it stay short.
                if self._active[other] > self._active[first]:
                    first, other = other, first
                self._parent[other] = first
                self._active[first] += self._active[other]
                self.components -= 1

    def component(self, worker: int) -> int:
        """Return a key that is equal for connected workers."""
        parent = self._parent
        node = self._node[worker]
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node


_SHORTER = 0.9
_LONGER = 2.0
"""Factors of the adaptive wait: SDPipe's own figures."""


@dataclass(slots=True)
class _KeyState:
    """The state of one key.

    Attributes:
        graph: connections of the groups since the last reset.
        updates: number of members of these groups.
        opening: number of the open group among all that were opened; None: none is open.
        wait_s: wait of each worker, if it is not the first wait.
    """

    graph: SyncGraph
    updates: int = 0
    opening: int | None = None
    wait_s: dict[int, float] = field(default_factory=dict)


class ReadyGroups(GroupRules):
    """Rules under which a group consists of the workers that wait when it closes.

    If no guarantee is due, nobody waits longer than its group's deadline. With one key and N
    workers, there are fewer than N * (period + 2) member updates between resets: the group that
    reaches N * period brings at most N - 1 beyond it, and the next one is the last. While a key
    waits for its turn, each worker takes part in few more of its groups, since it must pass the key
    whose turn it is.
    """

    def __init__(self, room: WaitingRoom, options: SemiDecentralizedOptions) -> None:
        self._room = room
        self._options = options
        self._most = options.most_members or room.workers
        self._states = [_KeyState(SyncGraph(sorted(room.active))) for _ in room.keys]
        self._deadlines: list[tuple[float, int, int]] = []
        """Deadlines of open groups, with their number and key; some are already closed."""
        self._openings = 0
        self._due: dict[int, None] = {}
        """Keys whose guarantee is due, in order; the first holds its group."""
        self._held: int | None = None
        self._reached: set[int] = set()
        """Components with a worker that waits at the held key."""

    @property
    def deadline_s(self) -> float | None:
        """Deadline of the open group that closes first."""
        deadlines = self._deadlines
        while deadlines:
            deadline_s, opening, key = deadlines[0]
            if self._states[key].opening == opening and key != self._held:
                return deadline_s
            heapq.heappop(deadlines)
        return None

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Open a group or add to the open one; close it if it is complete."""
        state = self._states[key]
        if state.opening is None:
            self._open(state, key, now_s + state.wait_s.get(worker, self._options.first_wait_s))
        if key == self._held:
            self._reached.add(state.graph.component(worker))
        return self._close_from(key) if self._is_complete(key) else []

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Close the groups that only waited for the worker."""
        for state in self._states:
            state.graph.leave(worker)
            state.wait_s.pop(worker, None)
        if self._held is not None:
            self._reach(self._held)
        groups: list[Group] = []
        for key in self._room.keys:
            if not self._room.waiting[key]:
                self._states[key].opening = None
            if self._is_complete(key):
                groups += self._close_from(key)
            else:
                self._review(key)
        following = self._hold_next()
        return groups if following is None else groups + self._close_from(following)

    def join(self, worker: int, iteration: int) -> None:
        """Add the worker without connections."""
        for state in self._states:
            state.graph.join(worker)

    def tick(self, now_s: float) -> list[Group]:
        """Close the groups whose deadline has passed."""
        groups: list[Group] = []
        while (deadline_s := self.deadline_s) is not None and deadline_s <= now_s:
            _, _, key = heapq.heappop(self._deadlines)
            groups += self._close_from(key)
        return groups

    def _open(self, state: _KeyState, key: int, deadline_s: float) -> None:
        state.opening = self._openings
        self._openings += 1
        heapq.heappush(self._deadlines, (deadline_s, state.opening, key))

    def _is_complete(self, key: int) -> bool:
        count = len(self._room.waiting[key])
        if key == self._held:
            return 0 < len(self._reached) == self._states[key].graph.components
        return count >= min(self._most, len(self._room.active)) and count > 0

    def _close_from(self, key: int) -> list[Group]:
        """Close a group, and those that are complete since then."""
        groups = []
        following: int | None = key
        while following is not None:
            groups.append(self._close(following))
            self._review(following)
            following = self._hold_next()
        return groups

    def _close(self, key: int) -> Group:
        state = self._states[key]
        members = sorted(self._room.waiting[key])
        self._adapt(state, members)
        state.graph.merge(members)
        state.updates += len(members)
        state.opening = None
        return self._room.begin(key, members)

    def _adapt(self, state: _KeyState, members: list[int]) -> None:
        """Wait longer if nobody came, else slightly less, as SDPipe's client."""
        options = self._options
        for member in members:
            wait_s = state.wait_s.get(member, options.first_wait_s)
            if len(members) < 2:
                state.wait_s[member] = min(_LONGER * wait_s, options.most_wait_s)
            else:
                state.wait_s[member] = max(_SHORTER * wait_s, options.least_wait_s)

    def _review(self, key: int) -> None:
        """Reset if the guarantee is due and fulfilled; queue the key if it is only due."""
        period = self._options.guarantee_period
        state, active = self._states[key], self._room.active
        if period is None:
            return
        # What fell due stays so, even if workers that join would put it off.
        if key not in self._due and state.updates < period * len(active):
            return
        if state.graph.components > 1:
            self._due[key] = None
            return
        self._due.pop(key, None)
        state.graph = SyncGraph(sorted(active))
        state.updates = 0

    def _hold_next(self) -> int | None:
        """Give the turn to the first due key; return the key if this completes its group."""
        first = next(iter(self._due), None)
        if first == self._held:
            return None
        self._held = first
        if first is None:
            return None
        self._reach(first)
        return first if self._is_complete(first) else None

    def _reach(self, key: int) -> None:
        graph = self._states[key].graph
        self._reached = {graph.component(worker) for worker in self._room.waiting[key]}
