"""Transfers between workers, which share links max-min fairly with all others under way."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

from planner.simulation.fair_rates import Link, fair_rates
from planner.sync.simulation.links import WorkerFlow

_ROUNDING_S = 1e-12
_ROUNDING = 1e-9
"""Share of a link's bandwidth by which its demand may be off."""
_MOST_GB_PER_S = 1e12
"""A flow without links takes no time."""

_Name = tuple[tuple[Link, ...], float]
"""Links that flows compete for with others, and their rate without these."""


@dataclass
class _Alike:
    """Flows under way that have one rate, as they compete for the same links.

    Attributes:
        links, most_gb_per_s: contested links, and the rate without others.
        order: number of the first of them.
        moved: gigabytes that each of them has moved at the last change, had it been there before.
        since_s: time of the last change.
        rate: GB/s since then.
        ends: what each will have been moved at its end, with its number; some have left.
        flows: numbers of those there are.
        changes: number of the last change of its next end, among those of all.
    """

    links: tuple[Link, ...]
    most_gb_per_s: float
    order: int
    moved: float = 0.0
    since_s: float = 0.0
    rate: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    flows: set[int] = field(default_factory=set)
    changes: int = -1

    def advance(self, now_s: float) -> None:
        """Move what has been moved since the last change."""
        self.moved += self.rate * (now_s - self.since_s)
        self.since_s = now_s


@dataclass
class _Moving:
    """A flow under way.

    Attributes:
        crossed: how often it crosses each link.
        alone_gb_per_s: its rate without others.
        what: what the caller knows it by.
        name: of the flows like it.
        end: what each of these will have been moved at its next mark, or else its end.
        marks: gigabytes from each mark to the next, and from the last one to its end; latest first.
    """

    crossed: Mapping[Link, int]
    alone_gb_per_s: float
    what: Any
    name: _Name
    end: float
    marks: list[float]


class WorkerTransfers:
    """Flows under way. Each that begins or ends changes the rates of those it competes with.

    A link is contested while the flows over it would take more than its bandwidth if each had the
    rate that it has without others. No other link can give a flow less than that, so that flows are
    told apart by contested links alone. Flows that compete for the same ones have one rate: a
    thousand workers at one server take little more than one.

    Args:
        capacity_gb_per_s: bandwidths of links.

    Attributes:
        divisions: classes of flows of equal rates among which links were divided, so far: the
            deterministic measure of the work.
    """

    def __init__(self, capacity_gb_per_s: Mapping[Link, float]) -> None:
        self.divisions = 0
        self._capacity = capacity_gb_per_s
        self._most = {link: rate * (1 + _ROUNDING) for link, rate in capacity_gb_per_s.items()}
        self._moving: dict[int, _Moving] = {}
        self._users: defaultdict[Link, set[int]] = defaultdict(set)
        self._wanted: defaultdict[Link, float] = defaultdict(float)
        """GB/s that the flows over a link would take without others."""
        self._contested: set[Link] = set()
        self._alike: dict[_Name, _Alike] = {}
        self._on: defaultdict[Link, set[_Name]] = defaultdict(set)
        self._next: list[tuple[float, int, int, _Name]] = []
        self._numbers, self._changes = count(), count()
        self._begun: set[_Name] = set()
        """Flows that began at one moment, whose rates are still to be shared out."""
        self._begun_s = 0.0

    def begin(self, now_s: float, flow: WorkerFlow, what: Any) -> None:
        """Start to move the bytes of a flow."""
        if now_s > self._begun_s:
            self._settle()
        self._begun_s = now_s
        number = next(self._numbers)
        crossed, alone = flow.crossed, self._alone_gb_per_s(flow)
        others = self._users_of(self._want(number, crossed, alone))
        ends = [0.0, *(mark / 1e9 for mark in flow.marks), flow.bytes / 1e9]
        pieces = [after - before for before, after in pairwise(ends)]
        self._moving[number] = _Moving(crossed, alone, what, ((), 0.0), 0.0, pieces[:0:-1])
        self._begun.add(self._place(now_s, number, pieces[0]))
        if others:
            self._begun |= self._moved(now_s, others - {number})

    def _alone_gb_per_s(self, flow: WorkerFlow) -> float:
        """Return the rate of a flow without others."""
        rates = [self._capacity[link] / times for link, times in flow.crossed.items()]
        return min([flow.most_gb_per_s, _MOST_GB_PER_S, *rates])

    def _want(self, number: int, crossed: Mapping[Link, int], alone: float) -> list[Link]:
        """Add a flow to the users of its links; return those that become contested."""
        users, wanted, most = self._users, self._wanted, self._most
        found = []
        for link, times in crossed.items():
            users[link].add(number)
            before = wanted[link]
            wanted[link] = after = before + times * alone
            if after > most[link] >= before:
                found.append(link)
        self._contested.update(found)
        return found

    def _want_no_more(self, number: int) -> list[Link]:
        """Remove a flow from the users of its links; return those that are contested no more."""
        users, wanted, most = self._users, self._wanted, self._most
        moving, found = self._moving[number], []
        alone = moving.alone_gb_per_s
        for link, times in moving.crossed.items():
            users[link].remove(number)
            before = wanted[link]
            # Exactly nothing when nobody is left, however often it was added to.
            wanted[link] = after = before - times * alone if users[link] else 0.0
            if before > most[link] >= after:
                found.append(link)
        self._contested.difference_update(found)
        return found

    def _users_of(self, links: Iterable[Link]) -> set[int]:
        return {number for link in links for number in self._users[link]}

    def _settle(self) -> None:
        """Share the links among flows that have just begun and all others."""
        if self._begun:
            begun, self._begun = self._begun, set()
            self._share(self._begun_s, begun)

    @property
    def next_end_s(self) -> float:
        """The time of the next end, unless a flow begins before; infinite if nothing moves."""
        self._settle()
        while self._next:
            end_s, _, changes, name = self._next[0]
            alike = self._alike.get(name)
            if alike is not None and alike.changes == changes:
                return end_s
            heapq.heappop(self._next)
        return math.inf

    def ended(self, now_s: float) -> list[Any]:
        """Return what the caller knows the flows by that have come to a mark or their end by now.

        Those at their end are removed.
        """
        found, changed = [], set[_Name]()
        links, freed = set[Link](), set[Link]()
        while self.next_end_s <= now_s + _ROUNDING_S:
            name = heapq.heappop(self._next)[3]
            alike = self._alike[name]
            number = self._first(alike)
            moving = self._moving[number]
            found.append(moving.what)
            if moving.marks:
                moving.end += moving.marks.pop()
                heapq.heappush(alike.ends, (moving.end, number))
            else:
                freed.update(self._want_no_more(number))
                del self._moving[number]
                self._take_out(number, name)
                changed.add(name)
                links.update(name[0])
            self._expect(name)
        if changed:
            self._share(now_s, changed | self._moved(now_s, self._users_of(freed)), links)
        return found

    def _first(self, alike: _Alike) -> int:
        """Return the flow that ends first."""
        while True:
            end, number = alike.ends[0]
            moving = self._moving.get(number)
            if number in alike.flows and moving is not None and moving.end == end:
                return number
            heapq.heappop(alike.ends)

    def _name_of(self, number: int) -> _Name:
        moving, contested = self._moving[number], self._contested
        crossed = moving.crossed
        links = [link for link in crossed if link in contested] if contested else []
        competed_for = tuple(link for link in links for _ in range(crossed[link]))
        return competed_for, moving.alone_gb_per_s

    def _place(self, now_s: float, number: int, gigabytes: float) -> _Name:
        """Add a flow to those that it is like."""
        moving, name = self._moving[number], self._name_of(number)
        if name not in self._alike:
            self._alike[name] = _Alike(*name, number, since_s=now_s)
            for link in name[0]:
                self._on[link].add(name)
        alike = self._alike[name]
        alike.advance(now_s)
        moving.name, moving.end = name, alike.moved + gigabytes
        alike.flows.add(number)
        heapq.heappush(alike.ends, (moving.end, number))
        return name

    def _take_out(self, number: int, name: _Name) -> None:
        alike = self._alike[name]
        alike.flows.remove(number)
        if not alike.flows:
            del self._alike[name]
            for link in name[0]:
                self._on[link].discard(name)

    def _moved(self, now_s: float, numbers: Iterable[int]) -> set[_Name]:
        """Place flows anew whose links are contested now, or no more; return both their names."""
        changed = set[_Name]()
        for number in sorted(numbers):
            moving = self._moving[number]
            before = moving.name
            if self._name_of(number) != before:
                alike = self._alike[before]
                alike.advance(now_s)
                left = max(0.0, moving.end - alike.moved)
                self._take_out(number, before)
                changed |= {before, self._place(now_s, number, left)}
        return changed

    def _share(self, now_s: float, names: set[_Name], links: Iterable[Link] = ()) -> None:
        """Update the rates of all flows that a change can affect."""
        reached = self._reached(names, links)
        rows = sorted((self._alike[name] for name in reached), key=lambda alike: alike.order)
        for alike, rate in zip(rows, self._rates(rows), strict=True):
            alike.advance(now_s)
            name = alike.links, alike.most_gb_per_s
            if rate != alike.rate or name in names:
                alike.rate = rate
                self._expect(name)

    def _rates(self, rows: Sequence[_Alike]) -> Sequence[float]:
        """Return the rate of each class; only those that compete for links have to be divided."""
        flows = [(alike.links, alike.most_gb_per_s) for alike in rows]
        capacity = {link: self._capacity[link] for links, _ in flows for link in links}
        if not capacity:
            return [most for _, most in flows]
        self.divisions += len(rows)
        return fair_rates(flows, capacity, [len(alike.flows) for alike in rows])

    def _expect(self, name: _Name) -> None:
        """Note when the next of the flows ends."""
        alike = self._alike.get(name)
        if alike is not None and alike.rate:
            alike.changes = next(self._changes)
            left = self._moving[self._first(alike)].end - alike.moved
            end_s = alike.since_s + max(0.0, left) / alike.rate
            heapq.heappush(self._next, (end_s, alike.order, alike.changes, name))

    def _reached(self, names: Iterable[_Name], links: Iterable[Link]) -> set[_Name]:
        """Return these flows, those that share a link with them, and so on."""
        found: set[_Name] = set()
        seen: set[Link] = set()
        left = [*links, *(link for name in names for link in name[0])]
        while left:
            link = left.pop()
            if link not in seen:
                seen.add(link)
                for name in self._on[link] - found:
                    found.add(name)
                    left += name[0]
        return found | {name for name in names if name in self._alike}


def ends_s(
    transfers: WorkerTransfers, requests: Sequence[tuple[float, Hashable, WorkerFlow]]
) -> list[float]:
    """Return the ends of flows that begin on idle links.

    Args:
        transfers: with nothing under way.
        requests: earliest begin, lane and flow; the bytes of a lane's flows move one after the
            other, in this order. Latencies pass while earlier bytes still move, as those of
            collectives that have been launched.
    """
    found = [0.0] * len(requests)
    lanes: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for number, (_, lane, _) in enumerate(requests):
        lanes[lane].append(number)
    starts = [(requests[row[0]][0] + requests[row[0]][2].fixed_s, row[0]) for row in lanes.values()]
    heapq.heapify(starts)
    while starts or transfers.next_end_s < math.inf:
        if starts and starts[0][0] <= transfers.next_end_s:
            now_s, number = heapq.heappop(starts)
            transfers.begin(now_s, requests[number][2], number)
            continue
        now_s = transfers.next_end_s
        for number in transfers.ended(now_s):
            found[number] = now_s
            waiting = lanes[requests[number][1]]
            waiting.popleft()
            if waiting:
                ready_s, _, flow = requests[waiting[0]]
                heapq.heappush(starts, (max(ready_s + flow.fixed_s, now_s), waiting[0]))
    return found
