"""Transfers between workers, which share links max-min fairly with all others under way."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.program.compiled import entry
from planner.sync.simulation.links import WorkerFlow

_ROUNDING = 1e-9
"""Share of a rate by which rounding may be off."""
_ROUNDING_S, _ROUNDING_OF_TIME = 1e-12, 1e-15
_ROW = [("left", "f8"), ("rate", "f8"), ("most", "f8"), ("crossings", "i8")]


@entry
def _share(flows: Any, links: Any, capacity: Any, used: Any, room: Any, users: Any) -> float:
    """Give flows their max-min fair rates; return the seconds until the first of them ends.

    The rates of all rise together until a link is full or a flow has its most, then those of the
    others continue to rise (Bertsekas and Gallager, Data Networks, 6.5.2). A flow takes its rate of
    a link as often as it crosses it.

    Args:
        flows: what they have left, their rates (written) and most, and how often they cross links.
        links: a row of links for each flow.
        capacity: of each link.
        used: of each link, to work with, as are those that follow.
        room: what is left of it for each flow that rises.
        users: how often these cross it.
    """
    left, rate, most, count = flows["left"], flows["rate"], flows["most"], flows["crossings"]
    rate[:] = -1.0
    for n in range(len(flows)):
        for i in range(count[n]):
            used[links[n, i]] = 0.0
            users[links[n, i]] = 0
    rising = len(flows)
    while rising:
        for n in range(len(flows)):
            for i in range(count[n] if rate[n] < 0 else 0):
                users[links[n, i]] += 1
        level = np.inf
        for n in range(len(flows)):
            if rate[n] < 0:
                level = min(level, most[n])
                for i in range(count[n]):
                    link = links[n, i]
                    room[link] = (capacity[link] - used[link]) / users[link]
                    level = min(level, room[link])
        full = level * (1 + _ROUNDING)
        for n in range(len(flows)):
            if rate[n] < 0:
                stops = most[n] <= full
                for i in range(count[n]):
                    users[links[n, i]] = 0
                    stops = stops or room[links[n, i]] <= full
                if stops:
                    rate[n] = min(level, most[n])
                    rising -= 1
                    for i in range(count[n]):
                        used[links[n, i]] += rate[n]
    return max((left / rate).min(), 0.0) if len(flows) else np.inf


class WorkerTransfers:
    """Flows under way. Each that begins or ends changes the rates of those it competes with.

    Args:
        capacity_gb_per_s: bandwidths of links, by their numbers.
    """

    def __init__(self, capacity_gb_per_s: FloatArray) -> None:
        links = len(capacity_gb_per_s)
        self._of_links = capacity_gb_per_s, np.zeros(links), np.zeros(links), np.zeros(links, int)
        self._flows = np.zeros(8, _ROW)
        self._links = np.zeros((8, 8), np.int32)
        self._names: list[tuple[int, Any]] = []
        """By flow: its number, and what the caller knows it by."""
        self._begun = 0
        self._since_s = 0.0
        self._end_s = math.inf
        """When the first flow ends, if the rates are those of all flows now."""
        self._is_settled = True

    def begin(self, now_s: float, flow: WorkerFlow, what: Any) -> None:
        """Start to move the bytes of a flow, which crosses a link."""
        self._advance(now_s)
        place, crossings = len(self._names), len(flow.links)
        self._make_room(place, crossings)
        self._flows[place] = flow.bytes / 1e9, 0.0, flow.most_gb_per_s, crossings
        self._links[place, :crossings] = flow.links
        self._names.append((self._begun, what))
        self._begun += 1

    def _make_room(self, place: int, crossings: int) -> None:
        rows, columns = self._links.shape
        if place == rows or crossings > columns:
            more = np.zeros((2 * rows, max(columns, crossings)), np.int32)
            more[:rows, :columns] = self._links
            self._links = more
            self._flows = np.concatenate([self._flows, np.zeros(rows, _ROW)])

    @property
    def next_end_s(self) -> float:
        """The time of the next end, unless a flow begins before; infinite if nothing moves."""
        self._settle()
        return self._end_s

    def _settle(self) -> None:
        if not self._is_settled:
            flows = self._flows[: len(self._names)]
            self._end_s = self._since_s + _share(flows, self._links, *self._of_links)
            self._is_settled = True

    def _advance(self, now_s: float) -> None:
        """Move what has been moved until now; flows may begin or end then."""
        if now_s > self._since_s and self._names:
            self._settle()
            flows = self._flows[: len(self._names)]
            flows["left"] -= flows["rate"] * (now_s - self._since_s)
        if now_s > self._since_s or not self._names:
            self._since_s = now_s
        self._is_settled = False

    def ended(self, now_s: float) -> list[Any]:
        """Remove the flows that have ended by now; return what the caller knows them by."""
        if self.next_end_s > now_s + _ROUNDING_S:
            return []
        self._advance(now_s)
        flows = self._flows[: len(self._names)]
        near = flows["rate"] * (_ROUNDING_S + _ROUNDING_OF_TIME * now_s)
        done = sorted(np.flatnonzero(flows["left"] <= near).tolist(), reverse=True)
        told = sorted((self._names[place] for place in done), key=itemgetter(0))
        for place in done:
            last = self._names.pop()
            if place < len(self._names):
                self._names[place] = last
                self._flows[place] = self._flows[len(self._names)]
                self._links[place] = self._links[len(self._names)]
        return [what for _, what in told]
