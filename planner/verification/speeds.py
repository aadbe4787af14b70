"""How fast devices computed and bytes moved while claimed tasks ran (docs/cost_model.md)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cluster.cluster import Cluster
from planner.verification.routes import Lane
from planner.verification.tasks import Key, Task

FloatArray = NDArray[np.float64]
_ROUNDING = 1e-9
"""Share of a rate or a bandwidth by which rounding may be off."""


class Span(NamedTuple):
    """When a task started and ended, in seconds from the start of the iteration."""

    start_s: float
    end_s: float


Times = Mapping[Key, Span]
"""Claimed times, by the name of each task."""


# --- computation ----------------------------------------------------------------------------------


class Clock(NamedTuple):
    """A clock that runs slower while something slows its device; linear between its moments.

    Attributes:
        moments_s: ascending, from 0 to beyond the end of all tasks.
        shown_s: what the clock shows at these.
    """

    moments_s: FloatArray
    shown_s: FloatArray

    def at(self, moment_s: float) -> float:
        """Return what the clock shows at a moment, in seconds."""
        return float(np.interp(moment_s, self.moments_s, self.shown_s))

    def when(self, shown_s: float) -> float:
        """Return the moment at which the clock shows so many seconds."""
        return float(np.interp(shown_s, self.shown_s, self.moments_s))


class Clocks:
    """The clocks of a cluster's devices while claimed tasks ran.

    Operations of a host slow each other, and so do its optimizer steps; what a device sends,
    receives and reduces slows its operations.

    Args:
        cluster: of the devices.
        tasks: that ran on them.
        times: that are claimed for these.
    """

    def __init__(self, cluster: Cluster, tasks: Sequence[Task], times: Times) -> None:
        self._cluster, self._tasks, self._times = cluster, tasks, times
        self._clock = cache(self._make_clock)

    @cached_property
    def _spans(self) -> Mapping[tuple[str, str], Sequence[Span]]:
        """When each device ran what; of use only where something slows devices."""
        found: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
        for task in self._tasks:
            communicates = task.key.what in ("message", "reduction")
            for device in task.devices:
                what = "communication" if communicates else task.key.what
                found[device, what].append(self._times[task.key])
        return found

    def computing(self, device: str) -> Sequence[Span]:
        """Return when a device runs operations."""
        return self._spans[device, "operation"]

    def passed_s(self, task: Task, span: Span) -> float:
        """Return what passed on the clock of the device of an operation or an optimizer step."""
        clock = self._clock(task.devices[0], task.key.what)
        return span.end_s - span.start_s if clock is None else clock.at(span[1]) - clock.at(span[0])

    def before_s(self, device: str, moment_s: float, seconds: float) -> float:
        """Return the moment from which so many seconds pass on a device's clock until another."""
        clock = self._clock(device, "operation")
        return moment_s - seconds if clock is None else clock.when(clock.at(moment_s) - seconds)

    def _make_clock(self, device: str, what: str) -> Clock | None:
        """Return a device's clock for operations or optimizer steps; None if nothing slows it."""
        host, factor = self._cluster.host_of.get(device), 1.0
        if what == "operation":
            factor = self._cluster.device_type(device).compute_slowdown_while_communicating
        if host is None and factor == 1:
            return None
        others = [self._spans[name, what] for name in (host.devices if host else (device,))]
        computing = np.array([span for row in others for span in row]).reshape(-1, 2)
        sending = np.array(self._spans[device, "communication"]).reshape(-1, 2)
        last_s = max(span.end_s for span in self._times.values())
        moments_s = np.unique([0.0, *computing.flat, *sending.flat, last_s + 1.0])
        slowness = np.where(_running(sending, moments_s) > 0, factor, 1.0)
        if host is not None:
            by_count = np.array([1.0, *host.slowdown])
            slowness *= by_count[np.minimum(_running(computing, moments_s), len(host.slowdown))]
        return Clock(moments_s, np.cumsum([0.0, *(np.diff(moments_s) / slowness[:-1])]))


def _running(spans: FloatArray, moments_s: FloatArray) -> NDArray[np.int64]:
    """Return how many spans have begun and not ended at each moment."""
    begun, ended = (np.searchsorted(np.sort(row), moments_s, "right") for row in spans.T)
    return begun - ended


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class _Kind:
    """Flows alike: how often each crosses which links, and its bytes a second at most.

    There is one object of a kind, so that kinds, which may cross hundreds of links, hash fast.
    """

    crossings: tuple[tuple[Lane, int], ...]
    bytes_per_s: float


@dataclass(slots=True)
class _Flow:
    """Bytes on their way: the seconds that passed for them, and the share of their rate since."""

    task: Task
    kind: _Kind
    passed_s: float
    since_s: float
    share: float = 1.0

    def take(self, share: float, now: float) -> None:
        self.passed_s += self.share * (now - self.since_s)
        self.since_s, self.share = now, share


def moved_s(
    cluster: Cluster, tasks: Sequence[Task], times: Times, clocks: Clocks | None = None
) -> dict[Key, float]:
    """Return the seconds in which flows would have moved alone what they moved.

    Args:
        cluster: on whose links.
        tasks: all messages and collectives that may move bytes at once.
        times: that are claimed for these.
        clocks: of devices whose operations slow what they send and receive; None if none do.

    Returns:
        By the name of a flow; those that nothing can have slowed are left out.
    """
    types = {row.name: cluster.device_types[row.type] for row in cluster.devices}
    slower = {name: row.communication_slowdown_while_computing for name, row in types.items()}
    slower = {name: factor for name, factor in slower.items() if factor != 1} if clocks else {}
    widths = [link.bandwidth_gb_per_s * 1e9 for link in cluster.links]
    limiting, kind_of = _full_at_once(widths, tasks), cache(_Kind)
    events: list[tuple[float, int, _Flow | str]] = []
    flows = []
    for task in tasks:
        is_shared = not limiting.isdisjoint(task.crossings)
        if is_shared or not slower.keys().isdisjoint(task.devices):
            crossings = tuple(sorted(row for row in task.crossings.items() if row[0] in limiting))
            start_s, end_s = times[task.key]
            latency_s = min(task.latency_s, end_s - start_s)
            flow = _Flow(task, kind_of(crossings, task.bytes_per_s), latency_s, start_s + latency_s)
            flows.append(flow)
            events += [(flow.since_s, 1, flow), (max(flow.since_s, end_s), -1, flow)]
    for device in slower:
        for start_s, end_s in clocks.computing(device) if clocks else ():
            events += [(start_s, 1, device), (end_s, -1, device)]
    _Traffic(widths, slower).run(events)
    return {flow.task.key: flow.passed_s for flow in flows}


def _full_at_once(widths: Sequence[float], tasks: Sequence[Task]) -> set[Lane]:
    """Return the links that all that can be on them at once may fill.

    Of what waits in the same lines one is on its way at a time.
    """
    demands: defaultdict[Lane, dict[object, float]] = defaultdict(dict)
    for task in tasks:
        for lane, count in task.crossings.items():
            most = max(demands[lane].get(task.lines, 0.0), count * task.bytes_per_s)
            demands[lane][task.lines] = most
    return {lane for lane, rows in demands.items() if sum(rows.values()) > widths[lane[0]]}


class _Traffic:
    """Flows whose bytes move at once.

    Args:
        widths: bytes a second of each link.
        slower: how many times as long flows of a device take while it computes.
    """

    def __init__(self, widths: Sequence[float], slower: Mapping[str, float]) -> None:
        self._widths, self._slower = widths, slower
        self._computing: Counter[str] = Counter()
        self._moving: dict[Key, _Flow] = {}
        self._on: defaultdict[Lane, dict[Key, _Flow]] = defaultdict(dict)
        self._rates = cache(self._fair_rates)
        self._by_factor = cache(lambda kind, most: _Kind(kind.crossings, kind.bytes_per_s / most))

    def run(self, events: Sequence[tuple[float, int, _Flow | str]]) -> None:
        """Go from moment to moment, at which flows or computations begin (1) or end (-1)."""
        ordered = sorted(events, key=lambda row: (row[0], -row[1]))
        for now, rows in groupby(ordered, key=itemgetter(0)):
            met: list[_Flow] = []
            for _, change, what in rows:
                if isinstance(what, str):
                    self._computing[what] += change
                    met += (flow for flow in self._moving.values() if what in flow.task.devices)
                elif change > 0:
                    self._moving[what.task.key] = what
                    for lane, _ in what.kind.crossings:
                        self._on[lane][what.task.key] = what
                    met.append(what)
                else:
                    what.take(0.0, now)
                    del self._moving[what.task.key]
                    for lane, _ in what.kind.crossings:
                        del self._on[lane][what.task.key]
                        met += self._on[lane].values()
            self._share(self._sharing_with(met), now)

    def _sharing_with(self, met: Sequence[_Flow]) -> list[_Flow]:
        """Return what moves and shares links with some flows, directly or by others.

        The rates of all others stay as they are.
        """
        found: dict[Key, _Flow] = {}
        waiting, seen = [row for row in met if row.task.key in self._moving], set[Lane]()
        while waiting:
            flow = waiting.pop()
            if flow.task.key in found:
                continue
            found[flow.task.key] = flow
            for lane, _ in flow.kind.crossings:
                if lane not in seen:
                    seen.add(lane)
                    waiting += self._on[lane].values()
        return list(found.values())

    def _share(self, flows: Sequence[_Flow], now: float) -> None:
        kinds = [self._slowed(flow) for flow in flows]
        rates = self._rates(frozenset(Counter(kinds).items()))
        for flow, kind in zip(flows, kinds, strict=True):
            share = rates[kind] / flow.kind.bytes_per_s
            if share != flow.share:
                flow.take(share, now)

    def _slowed(self, flow: _Flow) -> _Kind:
        """Return a flow as it is while some of its devices compute."""
        names = (name for name in flow.task.devices if self._computing[name] > 0)
        most = max((self._slower[name] for name in names), default=1.0)
        return self._by_factor(flow.kind, most)

    def _fair_rates(self, flows: Collection[tuple[_Kind, int]]) -> dict[_Kind, float]:
        """Return max-min fair rates by progressive filling, of kinds and how many there are.

        All rates rise together; those over a full link, and those at their most, rise no more. The
        level at which a link is full only rises while flows over it stop: it is looked at again
        once it is the lowest.
        """
        numbers, rates = dict(flows), dict[_Kind, float]()
        on: defaultdict[Lane, list[_Kind]] = defaultdict(list)
        growing, stopped = Counter[Lane](), defaultdict[Lane, float](float)
        for kind, number in numbers.items():
            for lane, times in kind.crossings:
                on[lane].append(kind)
                growing[lane] += times * number

        def full_at(lane: Lane) -> float:
            return max(0.0, self._widths[lane[0]] - stopped[lane]) / growing[lane]

        def stop(kind: _Kind, level: float) -> None:
            rates[kind] = level
            for lane, times in kind.crossings:
                growing[lane] -= times * numbers[kind]
                stopped[lane] += level * times * numbers[kind]

        waiting = [(full_at(lane), lane) for lane in on]
        heapify(waiting)
        for most in sorted(numbers, key=lambda kind: kind.bytes_per_s):
            while most not in rates and waiting and waiting[0][0] < most.bytes_per_s:
                level, lane = heappop(waiting)
                if growing[lane] and full_at(lane) > level * (1 + _ROUNDING):
                    heappush(waiting, (full_at(lane), lane))
                    continue
                for kind in on[lane]:
                    if kind not in rates:
                        stop(kind, level)
            if most not in rates:
                stop(most, most.bytes_per_s)
        return rates
