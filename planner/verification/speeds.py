"""How fast devices computed and bytes moved while claimed tasks ran (docs/cost_model.md)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.verification.routes import Lane
from planner.verification.tasks import Key, Task

_ROUNDING = 1e-9
"""Share of a rate or a bandwidth by which rounding may be off."""


class Span(NamedTuple):
    """When a task started and ended, in seconds from the start of the iteration."""

    start_s: float
    end_s: float


Times = Mapping[Key, Span]
"""Claimed times, by the name of each task."""


class Clock:
    """A clock that runs slower while something slows its device.

    Args:
        slowness: moments, ascending, and how many times as long everything takes from each on.
    """

    def __init__(self, slowness: Iterable[tuple[float, float]]) -> None:
        self._moments, self._shown, self._slower = [0.0], [0.0], [1.0]
        for moment_s, slower in slowness:
            shown_s = self.at(moment_s)
            self._moments.append(moment_s)
            self._shown.append(shown_s)
            self._slower.append(slower)

    def at(self, moment_s: float) -> float:
        """Return what the clock shows at a moment, in seconds."""
        place = bisect_right(self._moments, moment_s) - 1
        return self._shown[place] + (moment_s - self._moments[place]) / self._slower[place]

    def when(self, shown_s: float) -> float:
        """Return the moment at which the clock shows so many seconds."""
        place = max(0, bisect_right(self._shown, shown_s) - 1)
        return self._moments[place] + (shown_s - self._shown[place]) * self._slower[place]


class Clocks:
    """The clocks of a cluster's devices while claimed tasks ran.

    Operations of a host slow each other, and so do its optimizer steps; what a device sends,
    receives and reduces slows its operations.

    Args:
        cluster: of the devices.
        tasks: that ran on them.
        times: that are claimed for these.
    """

    def __init__(self, cluster: Cluster, tasks: Iterable[Task], times: Times) -> None:
        self._host_of = {name: host for host in cluster.hosts for name in host.devices}
        self._type_of = {row.name: cluster.device_types[row.type] for row in cluster.devices}
        # Moments at which one more or one less of a kind runs on a device.
        self._changes: defaultdict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        for task in tasks:
            communicates = task.key.what in ("message", "reduction")
            what = "communication" if communicates else task.key.what
            for device in task.devices:
                (start_s, end_s), rows = times[task.key], self._changes[device, what]
                rows += ((start_s, 1), (end_s, -1))
        self._clock = cache(self._make_clock)

    def computing(self, device: str) -> Sequence[tuple[float, int]]:
        """Return the moments at which a device begins (1) and ends (-1) an operation."""
        return self._changes[device, "operation"]

    def passed_s(self, task: Task, span: Span) -> float:
        """Return what passed on the clock of a computation's device; copies have the true time."""
        is_copy = task.key.what == "copy"
        clock = None if is_copy else self._clock(task.devices[0], task.key.what)
        return span.end_s - span.start_s if clock is None else clock.at(span[1]) - clock.at(span[0])

    def before_s(self, device: str, moment_s: float, seconds: float) -> float:
        """Return the moment from which so many seconds pass on a device's clock until another."""
        clock = self._clock(device, "operation")
        return moment_s - seconds if clock is None else clock.when(clock.at(moment_s) - seconds)

    def _make_clock(self, device: str, what: str) -> Clock | None:
        """Return a device's clock for operations or optimizer steps; None if nothing slows it."""
        host, factor = self._host_of.get(device), 1.0
        if what == "operation":
            factor = self._type_of[device].compute_slowdown_while_communicating
        if host is None and factor == 1:
            return None
        slower = (1.0, *(host.slowdown if host else [1.0] * len(self._changes)))
        others = host.devices if host else (device,)
        changes = [(at_s, by, 0) for name in others for at_s, by in self._changes[name, what]]
        changes += [(at_s, 0, by) for at_s, by in self._changes[device, "communication"]]
        computing = communicating = 0
        slowness = []
        for at_s, rows in groupby(sorted(changes), key=itemgetter(0)):
            for _, more, more_sent in rows:
                computing, communicating = computing + more, communicating + more_sent
            most = min(computing, len(slower) - 1)
            slowness.append((at_s, slower[most] * (factor if communicating else 1.0)))
        return Clock(slowness)


@dataclass(frozen=True, eq=False)
class _Kind:
    """Flows alike: how often each crosses which links, and its bytes a second at most.

    There is one object for each kind, so that sets of them need not compare what they hold.
    """

    crossings: tuple[tuple[Lane, int], ...]
    bytes_per_s: float


@dataclass
class _Moving:
    """Bytes on their way: the seconds that passed for them, and the share of their rate since."""

    task: Task
    kind: _Kind
    passed_s: float
    since_s: float
    share: float = 1.0

    def take(self, share: float, now: float) -> None:
        self.passed_s += self.share * (now - self.since_s)
        self.since_s, self.share = now, share


class Traffic:
    """Messages and collectives whose bytes moved at once.

    Args:
        cluster: on whose links.
        flows: all of them.
        times: that are claimed for these.
        clocks: of devices whose operations slow what they send and receive; None if none do.

    Attributes:
        passed_s: of flows that something may have slowed, the seconds in which they would have
            moved alone what they moved between their start and their end.
    """

    def __init__(
        self, cluster: Cluster, flows: Sequence[Task], times: Times, clocks: Clocks | None
    ) -> None:
        self._widths = [link.bandwidth_gb_per_s * 1e9 for link in cluster.links]
        types = {row.name: cluster.device_types[row.type] for row in cluster.devices}
        slower = {name: row.communication_slowdown_while_computing for name, row in types.items()}
        self._slower = {name: by for name, by in slower.items() if clocks and by != 1}
        self._computing: Counter[str] = Counter()
        self._rates, self._kind = cache(self._fair_rates), cache(_Kind)
        self._moving: dict[Key, _Moving] = {}
        self._on: defaultdict[Lane, dict[Key, _Moving]] = defaultdict(dict)
        self._limiting = self._full_at_once(flows)
        self.passed_s: dict[Key, float] = {}
        events: list[tuple[float, int, _Moving | str]] = []
        for task in filter(self._may_be_slowed, flows):
            start_s, end_s = times[task.key]
            latency_s = min(task.latency_s, end_s - start_s)
            crossings = ((n, k) for n, k in task.crossings.items() if n in self._limiting)
            kind = self._kind(tuple(sorted(crossings)), task.bytes_per_s)
            row = _Moving(task, kind, latency_s, start_s + latency_s)
            events += [(row.since_s, 1, row), (max(row.since_s, end_s), -1, row)]
        if clocks is not None:
            for device in self._slower:
                events += [(at_s, by, device) for at_s, by in clocks.computing(device)]
        self._run(events)

    def _full_at_once(self, flows: Sequence[Task]) -> set[Lane]:
        """Return the links that all that can be on them at once may fill.

        Of what waits in the same lines one is on its way at a time.
        """
        demands: defaultdict[Lane, dict[object, float]] = defaultdict(dict)
        for task in flows:
            for lane, count in task.crossings.items():
                most = max(demands[lane].get(task.lines, 0.0), count * task.bytes_per_s)
                demands[lane][task.lines] = most
        return {n for n, rows in demands.items() if sum(rows.values()) > self._widths[n[0]]}

    def _may_be_slowed(self, task: Task) -> bool:
        slowing = self._slower.keys() & set(task.devices)
        return bool(slowing) or not self._limiting.isdisjoint(task.crossings)

    def _run(self, events: list[tuple[float, int, _Moving | str]]) -> None:
        """Go from event to event; between two of them all rates stay as they are."""
        for now, rows in groupby(sorted(events, key=itemgetter(0)), key=itemgetter(0)):
            met: list[_Moving] = []
            for _, change, what in sorted(rows, key=itemgetter(1), reverse=True):
                if isinstance(what, str):
                    self._computing[what] += change
                    met += (row for row in self._moving.values() if what in row.task.devices)
                    continue
                key, lanes = what.task.key, [lane for lane, _ in what.kind.crossings]
                if change > 0:
                    self._moving[key] = what
                    for lane in lanes:
                        self._on[lane][key] = what
                    met.append(what)
                else:
                    what.take(0.0, now)
                    self.passed_s[key] = self._moving.pop(key).passed_s
                    for lane in lanes:
                        del self._on[lane][key]
                        met += self._on[lane].values()
            self._share(self._sharing_with(met), now)

    def _sharing_with(self, met: Sequence[_Moving]) -> list[_Moving]:
        """Return what moves and shares links with some flows, directly or by others.

        The rates of all others stay as they are.
        """
        found: dict[Key, _Moving] = {}
        waiting, seen = [row for row in met if row.task.key in self._moving], set[Lane]()
        while waiting:
            row = waiting.pop()
            found[row.task.key] = row
            for lane, _ in row.kind.crossings:
                if lane not in seen:
                    seen.add(lane)
                    waiting += self._on[lane].values()
        return list(found.values())

    def _share(self, moving: list[_Moving], now: float) -> None:
        kinds = [self._slowed(row) for row in moving]
        rates = self._rates(frozenset(Counter(kinds).items()))
        for row, kind in zip(moving, kinds, strict=True):
            share = rates[kind] / row.kind.bytes_per_s
            if share != row.share:
                row.take(share, now)

    def _slowed(self, row: _Moving) -> _Kind:
        """Return a flow as it is while some of its devices compute."""
        if not self._slower:
            return row.kind
        names = [name for name in row.task.devices if self._computing[name] > 0]
        most = max((self._slower.get(name, 1.0) for name in names), default=1.0)
        if most == 1:
            return row.kind
        return self._kind(row.kind.crossings, row.kind.bytes_per_s / most)

    def _fair_rates(self, flows: Collection[tuple[_Kind, int]]) -> dict[_Kind, float]:
        """Return max-min fair rates by progressive filling, of kinds and how many there are.

        All rates rise together; those over a full link rise no more.
        """
        count, level = dict(flows), 0.0
        rates, growing = dict.fromkeys(count, 0.0), set(count)
        users: Counter[Lane] = Counter()
        crossing: defaultdict[Lane, list[_Kind]] = defaultdict(list)
        for kind, number in count.items():
            for lane, times in kind.crossings:
                users[lane] += times * number
                crossing[lane].append(kind)
        room = {lane: self._widths[lane[0]] for lane in users}
        while growing:
            rise = min(kind.bytes_per_s for kind in growing) - level
            rise = min([rise, *(room[lane] / times for lane, times in users.items())])
            level += rise
            stopped = {k for k in growing if level >= k.bytes_per_s * (1 - _ROUNDING)}
            for lane, times in users.items():
                room[lane] -= rise * times
                if room[lane] <= _ROUNDING * self._widths[lane[0]]:
                    stopped.update(growing.intersection(crossing[lane]))
            for kind in stopped:
                rates[kind] = level
                for lane, times in kind.crossings:
                    users[lane] -= times * count[kind]
                    if not users[lane]:
                        del users[lane]
            growing -= stopped
        return rates
