"""Groups of those who are ready: SDPipe's scheduler (Miao et al., VLDB 2023).

Who comes first at a key opens a group and waits for others for a while, which adapts to whether
others came. Members wait already, so nobody waits in a circle.

Those who come at the same moments would meet again and again, so there is a guarantee: after so
many member updates of a key the groups since the last time must have connected all workers. If
they have not, the key's group stays open, beyond its deadline and its most members, until it does.
The authors' group stays open until their graph of pairs is whole, which comes to a barrier of all
workers. Here it closes as soon as there waits one worker of each component, since the group itself
then joins them; whoever is not needed goes on or has gone on. One key at a time holds a group so,
in the order in which they fell due: a worker that one key waits for is then held nowhere else.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.sync.groups.events import Group
from planner.sync.groups.machine import WaitingRoom
from planner.sync.groups.sync_graph import SyncGraph
from planner.sync.strategies import SemiDecentralizedOptions

_SHORTER = 0.9
_LONGER = 2.0
"""By what a wait adapts: SDPipe's own figures."""


@dataclass(slots=True)
class _Place:
    """What one key knows.

    Attributes:
        graph: of the groups since the last reset.
        updates: members of these groups.
        opening: the number of the open group among all that were opened; None: none is open.
        wait_s: of each worker, where it is not the first wait.
    """

    graph: SyncGraph
    updates: int = 0
    opening: int | None = None
    wait_s: dict[int, float] = field(default_factory=dict)


class Readiness:
    """Rules under which a group is of those who wait when it closes.

    With no guarantee due nobody waits longer than its group's deadline. With one key, from one
    reset to the next there are fewer than N * (period + 2) member updates, N workers: the group
    that reaches N * period brings at most N - 1 beyond it, and the next one is the last. While a
    key waits for its turn, everyone takes part in few more of its groups, as it must pass the key
    whose turn it is.
    """

    def __init__(self, room: WaitingRoom, options: SemiDecentralizedOptions) -> None:
        self._room = room
        self._options = options
        self._most = options.most_members or room.workers
        self._places = [_Place(SyncGraph(sorted(room.there))) for _ in room.keys]
        self._deadlines: list[tuple[float, int, int]] = []
        """Of open groups, with their number and key; some are closed already."""
        self._openings = 0
        self._due: dict[int, None] = {}
        """Keys whose guarantee is due, in order; the first holds its group."""
        self._held: int | None = None
        self._reached: set[int] = set()
        """Components of which someone waits at the held key."""

    @property
    def deadline_s(self) -> float | None:
        """Of the open group that closes first."""
        deadlines = self._deadlines
        while deadlines:
            deadline_s, opening, key = deadlines[0]
            if self._places[key].opening == opening and key != self._held:
                return deadline_s
            heapq.heappop(deadlines)
        return None

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Open a group or add to the one that is open; close it if it is complete."""
        place = self._places[key]
        if place.opening is None:
            self._open(place, key, now_s + place.wait_s.get(worker, self._options.first_wait_s))
        if key == self._held:
            self._reached.add(place.graph.component(worker))
        return self._close_from(key) if self._is_complete(key) else []

    def finish(self, worker: int) -> None:
        """Nothing depends on it."""

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Close the groups that only waited for the worker."""
        for place in self._places:
            place.graph.leave(worker)
            place.wait_s.pop(worker, None)
        if self._held is not None:
            self._reach(self._held)
        groups: list[Group] = []
        for key in self._room.keys:
            if not self._room.waiting[key]:
                self._places[key].opening = None
            if self._is_complete(key):
                groups += self._close_from(key)
            else:
                self._review(key)
        following = self._hold_next()
        return groups if following is None else groups + self._close_from(following)

    def join(self, worker: int, iteration: int) -> None:
        """Connect the worker to nobody yet."""
        for place in self._places:
            place.graph.join(worker)

    def tick(self, now_s: float) -> list[Group]:
        """Close the groups whose time is over."""
        groups: list[Group] = []
        while (deadline_s := self.deadline_s) is not None and deadline_s <= now_s:
            _, _, key = heapq.heappop(self._deadlines)
            groups += self._close_from(key)
        return groups

    def _open(self, place: _Place, key: int, deadline_s: float) -> None:
        place.opening = self._openings
        self._openings += 1
        heapq.heappush(self._deadlines, (deadline_s, place.opening, key))

    def _is_complete(self, key: int) -> bool:
        count = len(self._room.waiting[key])
        if key == self._held:
            return 0 < len(self._reached) == self._places[key].graph.components
        return count >= min(self._most, len(self._room.there)) and count > 0

    def _close_from(self, key: int) -> list[Group]:
        """Close a group, and those that are complete since."""
        groups = []
        following: int | None = key
        while following is not None:
            groups.append(self._close(following))
            self._review(following)
            following = self._hold_next()
        return groups

    def _close(self, key: int) -> Group:
        place = self._places[key]
        members = sorted(self._room.waiting[key])
        self._adapt(place, members)
        place.graph.merge(members)
        place.updates += len(members)
        place.opening = None
        return self._room.begin(key, members)

    def _adapt(self, place: _Place, members: list[int]) -> None:
        """Wait longer if nobody came, else a little less: of SDPipe's client."""
        options = self._options
        for member in members:
            wait_s = place.wait_s.get(member, options.first_wait_s)
            if len(members) < 2:
                place.wait_s[member] = min(_LONGER * wait_s, options.most_wait_s)
            else:
                place.wait_s[member] = max(_SHORTER * wait_s, options.least_wait_s)

    def _review(self, key: int) -> None:
        """Begin anew if the guarantee is due and fulfilled; queue if it is due only."""
        period = self._options.guarantee_period
        place, there = self._places[key], self._room.there
        if period is None:
            return
        # What fell due stays so, even if workers that join would put it off.
        if key not in self._due and place.updates < period * len(there):
            return
        if place.graph.components > 1:
            self._due[key] = None
            return
        self._due.pop(key, None)
        place.graph = SyncGraph(sorted(there))
        place.updates = 0

    def _hold_next(self) -> int | None:
        """Give the turn to the first key that is due; the key, if its group is complete by that."""
        first = next(iter(self._due), None)
        if first == self._held:
            return None
        self._held = first
        if first is None:
            return None
        self._reach(first)
        return first if self._is_complete(first) else None

    def _reach(self, key: int) -> None:
        graph = self._places[key].graph
        self._reached = {graph.component(worker) for worker in self._room.waiting[key]}
