"""Times of messages without waits for others, and the latency and bandwidth that fit them.

A message takes latency plus bytes over bandwidth (Hockney 1994). Messages of several sizes separate
the two; messages of one size do not. An error in one of them spoils predictions of other sizes: a
wrong latency by the same few milliseconds for every message, a wrong bandwidth by a factor, which
matters most for large all-reduces. Hence the rule for messages of one size: the error of a short
message's prediction counts as latency, that of a long one as bandwidth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.cluster.routing import Route
from planner.measured.events import MeasuredTransfer
from planner.measured.timeline import MeasuredTimeline
from planner.plan.problem import Problem
from planner.simulation.fair_rates import fair_rates

Ends = tuple[str, str]
"""Two devices, in the order of the cluster file."""
TransferSamples = dict[int, list[float]]
"""Seconds of messages by their bytes."""


def transfer_samples(problem: Problem, measured: MeasuredTimeline) -> dict[Ends, TransferSamples]:
    """Seconds of messages between each two devices, both directions together, by bytes.

    Only the steps that count; of pairs with messages that had their links to themselves only
    these. Else it is what a message would have taken alone: it has
    a max-min fair share of them beside all that are on their way, less where its devices compute
    and slow it. Shares stay the same if all bandwidths are wrong by one factor.
    """
    cluster = problem.cluster
    alone: dict[Ends, TransferSamples] = {}
    delayed: dict[Ends, TransferSamples] = {}
    for step in measured.counted_steps:
        events = [event for event in measured.transfers if event.step == step]
        crowded = _crowded(cluster, events)
        times = _shared_s(cluster, events, crowded, _slowing_work(cluster, measured, step))
        for index, (event, seconds) in enumerate(zip(events, times, strict=True)):
            if event.bytes and seconds > 0:
                first, second = sorted(
                    (event.source, event.target), key=cluster.numbers.__getitem__
                )
                place = delayed if index in crowded else alone
                rows = place.setdefault((first, second), {})
                rows.setdefault(event.bytes, []).append(seconds)
    return {ends: alone.get(ends) or delayed[ends] for ends in dict.fromkeys([*alone, *delayed])}


def _slowing_work(
    cluster: Cluster, measured: MeasuredTimeline, step: int
) -> Mapping[str, Sequence[tuple[float, float]]]:
    """Return when the devices compute whose computation slows their messages."""
    work: dict[str, list[tuple[float, float]]] = {name: [] for name in cluster.slows_communication}
    for event in measured.operations if work else ():
        if event.step == step and event.device in work:
            work[event.device].append((event.start_s, event.end_s))
    return {name: sorted(rows) for name, rows in work.items()}


def _shared_s(
    cluster: Cluster,
    events: Sequence[MeasuredTransfer],
    crowded: Collection[int],
    work: Mapping[str, Sequence[tuple[float, float]]],
) -> list[float]:
    """Return the time that each transfer would have taken with its links to itself.

    Those of one pair of devices follow each other. A moment counts by the share of its rate that a
    transfer has then, and as a whole before its first byte.

    Args:
        cluster: whose links.
        events: all transfers of a step.
        crowded: those that meet others on their links.
        work: when devices compute whose computation slows what they send and receive.
    """
    times, spans = [event.end_s - event.start_s for event in events], []
    last_s: dict[tuple[str, str], float] = {}
    for index, event in enumerate(events):
        pair = event.source, event.target
        start_s = max(event.start_s, last_s.get(pair, event.start_s))
        start_s = start_s if start_s < event.end_s else event.start_s
        last_s[pair] = event.end_s
        route = cluster.route(*pair)
        is_slowed = index in crowded or not work.keys().isdisjoint(pair)
        if is_slowed and route is not None:
            first_s = min(start_s + route.latency_s, event.end_s)
            times[index] = first_s - start_s
            spans.append(_Span(first_s, event.end_s, index, route, pair))
    for begin_s, end_s, together in _moments(spans, work):
        # Spans of work follow each other: the last that began may go on.
        begun = {name: bisect_right(rows, (begin_s, inf)) for name, rows in work.items()}
        busy = {name for name, n in begun.items() if n and begin_s < work[name][n - 1][1]}
        flows = [(span.route.links, _most_gb_per_s(cluster, span, busy)) for span in together]
        used = {link: cluster.links[link[0]].bandwidth_gb_per_s for row, _ in flows for link in row}
        for span, rate in zip(together, fair_rates(flows, used), strict=True):
            times[span.number] += (end_s - begin_s) * rate / span.route.bandwidth_gb_per_s
    return times


def _most_gb_per_s(cluster: Cluster, span: _Span, busy: Collection[str]) -> float:
    """Return the rate that a transfer has at most while devices compute."""
    factors = (cluster.slows_communication[name] for name in span.pair if name in busy)
    return span.route.bandwidth_gb_per_s / max(factors, default=1.0)


class _Span(NamedTuple):
    """When the bytes of a transfer are on their way."""

    first_s: float
    end_s: float
    number: int
    route: Route
    pair: tuple[str, str]


def _moments(
    spans: Sequence[_Span], work: Mapping[str, Sequence[tuple[float, float]]]
) -> Iterator[tuple[float, float, list[_Span]]]:
    """Yield stretches of time with the transfers on their way and the work done throughout."""
    waiting = sorted(spans, reverse=True)
    together: list[_Span] = []
    changes = {moment for span in spans for moment in (span.first_s, span.end_s)}
    changes.update(moment for rows in work.values() for row in rows for moment in row)
    bounds = sorted(changes)
    for begin_s, end_s in pairwise(bounds):
        while waiting and waiting[-1].first_s <= begin_s:
            together.append(waiting.pop())
        together = [span for span in together if span.end_s > begin_s]
        if together:
            yield begin_s, end_s, together


def _crowded(cluster: Cluster, events: Sequence[MeasuredTransfer]) -> set[int]:
    """The transfers that overlap another on one of their links."""
    found: set[int] = set()
    last: dict[tuple[int, int], int] = {}
    for index, event in enumerate(events):
        route = cluster.route(event.source, event.target)
        for link in () if route is None else route.links:
            other = last.get(link)
            if other is not None and events[other].end_s > event.start_s:
                found |= {index, other}
            if other is None or events[other].end_s <= event.end_s:
                last[link] = index
    return found


def without_sharing(cluster: Cluster) -> Cluster:
    """Return the same cluster, with shared links counted among the links of its routes."""
    links = tuple(link.model_copy(update={"shared": False}) for link in cluster.links)
    return cluster.model_copy(update={"links": links})


def route_of(cluster: Cluster, ends: Ends) -> Route:
    """The route between two devices of a replayed plan that exchange data."""
    route = cluster.route(*ends)
    assert route is not None  # Replayed before: all devices that exchange data are joined.
    return route


AGREEMENT = 1e-3
"""A share of a time below which measured and predicted count as equal."""
SPREAD_OF_SIZES = 1.25
"""Ratio of the largest to the smallest message that tells latency from bandwidth."""
LEAST_SHARE = 0.1
"""Fraction of a message's predicted time without latency; below it the latency is wrong too."""
SHORT_S = 1e-3
"""What posting, waking up and copying may cost a message, whatever its size."""
UNTOLD = frozenset({"scaled", "latency"})
"""Methods of pairs whose messages did not tell latency from bandwidth."""


@dataclass(frozen=True)
class PairFit:
    """Latency and bandwidth that fit the transfers between two devices, in both directions.

    ``method`` is "agrees", "fitted" (latency and bandwidth, from several sizes), or for one size
    "scaled" (bandwidth, or both where that is too little) or "latency" (all of the difference).
    """

    ends: Ends
    latency_s: float
    bandwidth_gb_per_s: float
    method: str
    samples: int


def fit_pair(ends: Ends, route: Route, samples: TransferSamples) -> PairFit:
    """Latency and bandwidth between two devices.

    Args:
        ends: the devices.
        route: between them, before.
        samples: seconds of messages by their bytes; none of 0 bytes, none of 0 s.
    """
    count = sum(map(len, samples.values()))
    points = {bytes_: median(seconds) for bytes_, seconds in samples.items()}
    if all(_agrees(s, route.seconds(bytes_)) for bytes_, s in points.items()):
        return PairFit(ends, route.latency_s, route.bandwidth_gb_per_s, "agrees", count)
    line = _line(points, {bytes_: len(seconds) for bytes_, seconds in samples.items()})
    if line is not None:
        return PairFit(ends, line[0], 1e-9 / line[1], "fitted", count)
    return PairFit(ends, *_of_one_size(route, points), count)


def _agrees(found_s: float, expected_s: float) -> bool:
    return abs(found_s - expected_s) <= AGREEMENT * expected_s


def _moving_s(bytes_: float, width_gb_per_s: float) -> float:
    return bytes_ / (width_gb_per_s * 1e9)


def _latency_s(points: Mapping[int, float], width_gb_per_s: float) -> float:
    """Return the rest of the messages' times after the time that a bandwidth takes."""
    return median(s - _moving_s(bytes_, width_gb_per_s) for bytes_, s in points.items())


def _line(points: Mapping[int, float], weights: Mapping[int, int]) -> tuple[float, float] | None:
    """Latency in seconds and seconds a byte by weighted least squares, neither negative.

    None where the sizes are too alike to tell them apart, or larger messages took no longer.
    """
    if max(points) < SPREAD_OF_SIZES * min(points):
        return None
    total = sum(weights.values())
    mean_bytes = sum(weights[x] * x for x in points) / total
    mean_s = sum(weights[x] * s for x, s in points.items()) / total
    spread = sum(weights[x] * (x - mean_bytes) ** 2 for x in points)
    slope = sum(weights[x] * (x - mean_bytes) * (s - mean_s) for x, s in points.items()) / spread
    latency_s = mean_s - slope * mean_bytes
    if latency_s < 0:
        squares = sum(weights[x] * x * x for x in points)
        latency_s = 0.0
        slope = sum(weights[x] * x * s for x, s in points.items()) / squares
    return (latency_s, slope) if slope > 0 else None


def _of_one_size(route: Route, points: Mapping[int, float]) -> tuple[float, float, str]:
    """Latency in seconds, bandwidth in GB/s and the method.

    A message is short if its bytes alone should take less than the latency (it is below Hockney's
    half-performance length) or less than what software costs a message.
    """
    given = route.bandwidth_gb_per_s
    latency_s = _latency_s(points, given)
    if latency_s >= 0 and _moving_s(max(points), given) < max(route.latency_s, SHORT_S):
        return latency_s, given, "latency"
    return (*_scaled(route, points), "scaled")


def _scaled(route: Route, points: Mapping[int, float]) -> tuple[float, float]:
    """Latency as it is, bandwidth as the messages say; both scaled where that is too little."""
    scales = []
    for bytes_, found_s in points.items():
        moving_s = _moving_s(bytes_, route.bandwidth_gb_per_s)
        if found_s - route.latency_s < LEAST_SHARE * moving_s:
            factor = median(s / route.seconds(x) for x, s in points.items())
            return route.latency_s * factor, route.bandwidth_gb_per_s / factor
        scales.append((found_s - route.latency_s) / moving_s)
    return route.latency_s, route.bandwidth_gb_per_s / median(scales)
