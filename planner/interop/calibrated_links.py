"""Latency and bandwidth of links from the messages of a measured run.

A message takes latency plus bytes over bandwidth (Hockney 1994). Messages of several sizes separate
the two; messages of one size do not. An error in one of them spoils predictions of other sizes: a
wrong latency by the same few milliseconds for every message, a wrong bandwidth by a factor, which
matters most for large all-reduces. Hence the rule for messages of one size: the error of a short
message's prediction counts as latency, that of a long one as bandwidth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log
from statistics import median
from typing import NamedTuple

from planner.cluster.cluster import Cluster, Link
from planner.cluster.measured_links import CONTRADICTS, contradict
from planner.cluster.routing import Route
from planner.measured.events import MeasuredTransfer
from planner.measured.timeline import MeasuredTimeline
from planner.simulation.fair_rates import fair_rates
from planner.units import plural

Ends = tuple[str, str]
"""Two devices, in the order of the cluster file."""
TransferSamples = dict[int, list[float]]
"""Seconds of messages by their bytes."""
AGREEMENT = 1e-3
"""A share of a time below which measured and predicted count as equal."""
SPREAD_OF_SIZES = 1.25
"""Ratio of the largest to the smallest message that tells latency from bandwidth."""
LEAST_SHARE = 0.1
"""Fraction of a message's predicted time without latency; below it the latency is wrong too."""
SHORT_S = 1e-3
"""What posting, waking up and copying may cost a message, whatever its size."""
_FIGURES = ("bandwidth_gb_per_s", "latency_us", "duplex", "shared")


@dataclass(frozen=True)
class CalibratedLink:
    """A link before and after; ``method`` as of its pair, or "as its like" where none used it."""

    index: int
    before: Link
    after: Link
    method: str

    @property
    def name(self) -> str:
        """Its two ends."""
        return "-".join(self.before.between)


def calibrated_cluster(
    cluster: Cluster, measured: MeasuredTimeline
) -> tuple[Cluster, tuple[CalibratedLink, ...], tuple[str, ...]]:
    """Return the cluster with links as measured, what changed, and notes for the user.

    A pair's bandwidth goes to the narrowest links of its route; the others keep theirs unless it
    is less. Where several pairs use a link, its bandwidth is the most that any of them reached. A
    link that no transfer used changes as the measured links of equal figures do.

    Args:
        cluster: on which the plan ran.
        measured: the run.
    """
    samples, visible = transfer_samples(cluster, measured), _without_sharing(cluster)
    fits = [fit_pair(ends, _route(visible, ends), rows) for ends, rows in samples.items()]
    figures = _measured_figures(visible, fits)
    figures |= _like_figures(cluster, figures)
    changes = tuple(_changes(cluster, figures))
    if not changes:
        return cluster, (), ()
    after = {change.index: change.after for change in changes}
    rows = [after.get(index, link).model_dump() for index, link in enumerate(cluster.links)]
    data = {**cluster.model_dump(mode="json"), "links": rows}
    calibrated = Cluster.parse(data, "calibrated cluster")
    rerouted = _without_sharing(calibrated)
    notes = [*_contradiction_notes(changes), *_one_size_notes(fits)]
    notes += [
        f"with the new bandwidths data between {ends[0]} and {ends[1]} takes another route, over "
        "links that were not measured, so its prediction may be wrong"
        for ends in samples
        if _route(visible, ends).links != _route(rerouted, ends).links
    ]
    return calibrated, changes, tuple(notes)


def _without_sharing(cluster: Cluster) -> Cluster:
    """Return the same cluster, with shared links counted among the links of its routes."""
    links = tuple(link.model_copy(update={"shared": False}) for link in cluster.links)
    return cluster.model_copy(update={"links": links})


def _route(cluster: Cluster, ends: Ends) -> Route:
    route = cluster.route(*ends)
    assert route is not None  # Replayed before: all devices that exchange data are joined.
    return route


# --- messages -------------------------------------------------------------------------------------


def transfer_samples(cluster: Cluster, measured: MeasuredTimeline) -> dict[Ends, TransferSamples]:
    """Return seconds of messages between each two devices, both directions together, by bytes.

    Only the steps that count; of pairs with messages that had their links to themselves only
    these. Otherwise the seconds are those that a message would have taken alone.
    """
    alone: dict[Ends, TransferSamples] = {}
    delayed: dict[Ends, TransferSamples] = {}
    for step in measured.counted_steps:
        events = [event for event in measured.transfers if event.step == step]
        work: dict[str, list[tuple[float, float]]] = {n: [] for n in cluster.slows_communication}
        for row in measured.operations if work else ():
            if row.step == step and row.device in work:
                work[row.device].append((row.start_s, row.end_s))
        work = {name: sorted(rows) for name, rows in work.items()}
        crowded = _crowded(cluster, events)
        times = _seconds_alone(cluster, events, crowded, work)
        for index, (event, seconds) in enumerate(zip(events, times, strict=True)):
            if event.bytes and seconds > 0:
                pair = sorted((event.source, event.target), key=cluster.numbers.__getitem__)
                rows_of = (delayed if index in crowded else alone).setdefault(
                    (pair[0], pair[1]), {}
                )
                rows_of.setdefault(event.bytes, []).append(seconds)
    return {ends: alone.get(ends) or delayed[ends] for ends in (*alone, *delayed)}


def _crowded(cluster: Cluster, events: Sequence[MeasuredTransfer]) -> set[int]:
    """Return the transfers that overlap another on one of their links."""
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


class _Span(NamedTuple):
    """When the bytes of a transfer are on their way, and over which route."""

    first_s: float
    end_s: float
    number: int
    route: Route
    pair: tuple[str, str]


def _seconds_alone(
    cluster: Cluster,
    events: Sequence[MeasuredTransfer],
    crowded: set[int],
    work: Mapping[str, Sequence[tuple[float, float]]],
) -> list[float]:
    """Return the time that each transfer would have taken with its links to itself.

    Transfers have max-min fair shares of the links beside all that are on their way, less where
    their devices compute and slow them. A moment counts by the share of its rate that a transfer
    has then, and as a whole before its first byte. Shares stay the same if all bandwidths are wrong
    by one factor. Transfers of one pair of devices follow each other.

    Args:
        cluster: whose links.
        events: all transfers of a step.
        crowded: those that meet others on their links.
        work: when devices compute whose computation slows what they send and receive.
    """
    times, spans = [event.end_s - event.start_s for event in events], list[_Span]()
    last_s: dict[tuple[str, str], float] = {}
    for index, event in enumerate(events):
        pair = event.source, event.target
        start_s = max(event.start_s, last_s.get(pair, event.start_s))
        start_s = start_s if start_s < event.end_s else event.start_s
        last_s[pair] = event.end_s
        route = cluster.route(*pair)
        if route is not None and (index in crowded or not work.keys().isdisjoint(pair)):
            first_s = min(start_s + route.latency_s, event.end_s)
            times[index] = first_s - start_s
            spans.append(_Span(first_s, event.end_s, index, route, pair))
    moments = {moment for span in spans for moment in (span.first_s, span.end_s)}
    moments |= {moment for rows in work.values() for row in rows for moment in row}
    waiting, together = sorted(spans, reverse=True), list[_Span]()
    for begin_s, end_s in pairwise(sorted(moments)):
        while waiting and waiting[-1].first_s <= begin_s:
            together.append(waiting.pop())
        together = [span for span in together if span.end_s > begin_s]
        if not together:
            continue
        # Spans of work follow each other: the last that began may go on.
        begun = {name: bisect_right(rows, (begin_s, inf)) for name, rows in work.items()}
        busy = {name for name, n in begun.items() if n and begin_s < work[name][n - 1][1]}
        flows = []
        for span in together:
            factors = (cluster.slows_communication[name] for name in span.pair if name in busy)
            most = span.route.bandwidth_gb_per_s / max(factors, default=1.0)
            flows.append((span.route.links, most))
        used = {link: cluster.links[link[0]].bandwidth_gb_per_s for row, _ in flows for link in row}
        for span, rate in zip(together, fair_rates(flows, used), strict=True):
            times[span.number] += (end_s - begin_s) * rate / span.route.bandwidth_gb_per_s
    return times


# --- pairs ----------------------------------------------------------------------------------------


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


def fit_pair(ends: Ends, route: Route, samples: TransferSamples) -> PairFit:
    """Return latency and bandwidth between two devices.

    A message of one size is short if its bytes alone should take less than the latency (it is below
    Hockney's half-performance length) or less than the cost of software for a message.

    Args:
        ends: the devices.
        route: between them, before.
        samples: seconds of messages by their bytes; none of 0 bytes, none of 0 s.
    """
    given = route.bandwidth_gb_per_s
    points = {bytes_: median(seconds) for bytes_, seconds in samples.items()}
    expected = {bytes_: route.seconds(bytes_) for bytes_ in points}
    if all(abs(s - expected[x]) <= AGREEMENT * expected[x] for x, s in points.items()):
        return PairFit(ends, route.latency_s, given, "agrees")
    weights = {bytes_: len(seconds) for bytes_, seconds in samples.items()}
    if (line := _line(points, weights)) is not None:
        return PairFit(ends, line[0], 1e-9 / line[1], "fitted")
    moving_s = {bytes_: bytes_ / (given * 1e9) for bytes_ in points}
    latency_s = median(s - moving_s[x] for x, s in points.items())
    if latency_s >= 0 and max(moving_s.values()) < max(route.latency_s, SHORT_S):
        return PairFit(ends, latency_s, given, "latency")
    shares = [(s - route.latency_s) / moving_s[x] for x, s in points.items()]
    if min(shares) < LEAST_SHARE:
        factor = median(s / expected[x] for x, s in points.items())
        return PairFit(ends, route.latency_s * factor, given / factor, "scaled")
    return PairFit(ends, route.latency_s, given / median(shares), "scaled")


def _line(points: Mapping[int, float], weights: Mapping[int, int]) -> tuple[float, float] | None:
    """Return latency in seconds and seconds a byte by weighted least squares, neither negative.

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
        latency_s, slope = 0.0, sum(weights[x] * x * s for x, s in points.items()) / squares
    return (latency_s, slope) if slope > 0 else None


# --- links ----------------------------------------------------------------------------------------


class _Figures(NamedTuple):
    bandwidth_gb_per_s: float
    latency_us: float
    method: str


def _measured_figures(cluster: Cluster, fits: Sequence[PairFit]) -> dict[int, _Figures]:
    """Return new figures of every link that a transfer used."""
    users: dict[int, list[tuple[PairFit, Route]]] = {}
    for fit in fits:
        route = _route(cluster, fit.ends)
        for index, _ in route.links:
            users.setdefault(index, []).append((fit, route))
    found = {}
    for index, rows in sorted(users.items()):
        link = cluster.links[index]
        widths = [fit.bandwidth_gb_per_s for fit, _ in rows]
        if all(route.bandwidth_gb_per_s < link.bandwidth_gb_per_s for _, route in rows):
            widths.append(link.bandwidth_gb_per_s)
        latency_us = median(_latency_us(link, route, fit) for fit, route in rows)
        methods = {fit.method for fit, _ in rows} - {"agrees"}
        found[index] = _Figures(max(widths), latency_us, ", ".join(sorted(methods)) or "agrees")
    return found


def _latency_us(link: Link, route: Route, fit: PairFit) -> float:
    """Return a link's share of its pair's latency: in proportion, equal where there was none."""
    if fit.latency_s == route.latency_s:
        return link.latency_us
    if route.latency_s == 0:
        return fit.latency_s * 1e6 / len(route.links)
    return link.latency_us * (fit.latency_s / route.latency_s)


def _like_figures(cluster: Cluster, measured: Mapping[int, _Figures]) -> dict[int, _Figures]:
    """Return new figures of links that no transfer used, from those that had equal figures."""
    kinds = [tuple(getattr(link, name) for name in _FIGURES) for link in cluster.links]
    alike: dict[tuple[object, ...], list[_Figures]] = {}
    for index, figures in measured.items():
        alike.setdefault(kinds[index], []).append(figures)
    return {
        index: _Figures(
            median(row.bandwidth_gb_per_s for row in alike[kind]),
            median(row.latency_us for row in alike[kind]),
            "as its like",
        )
        for index, kind in enumerate(kinds)
        if index not in measured and kind in alike
    }


def _changes(cluster: Cluster, figures: Mapping[int, _Figures]) -> Iterator[CalibratedLink]:
    for index, row in sorted(figures.items()):
        before = cluster.links[index]
        update = {"bandwidth_gb_per_s": row.bandwidth_gb_per_s, "latency_us": row.latency_us}
        if any(getattr(before, name) != value for name, value in update.items()):
            source = "assumed" if row.method == "as its like" else "measured"
            after = before.model_copy(update={**update, "source": source})
            yield CalibratedLink(index, before, after, row.method)


def _contradiction_notes(changes: Sequence[CalibratedLink]) -> Iterator[str]:
    ratios = {
        row.index: row.after.bandwidth_gb_per_s / row.before.bandwidth_gb_per_s for row in changes
    }
    far = [
        row
        for row in changes
        if row.before.source != "assumed"
        and row.after.source == "measured"
        and contradict(row.before.bandwidth_gb_per_s, row.after.bandwidth_gb_per_s)
    ]
    if far:
        row = max(far, key=lambda row: abs(log(ratios[row.index])))
        yield (
            f"{plural(len(far), 'link')} of {len(changes)} contradict the cluster by more than "
            f"{CONTRADICTS:g}x, most {row.name}: {row.after.bandwidth_gb_per_s:.4g} GB/s measured, "
            f"{row.before.bandwidth_gb_per_s:.4g} in the plan; if that is not what the hardware "
            "can do, messages went another way than the cluster file says (see NCCL_SOCKET_IFNAME, "
            "GLOO_SOCKET_IFNAME): correct its links, or measure again"
        )


def _one_size_notes(fits: Sequence[PairFit]) -> Iterator[str]:
    meanings = {
        "latency": "the difference counts as latency (short messages)",
        "scaled": "the difference counts as bandwidth",
    }
    counts = Counter(fit.method for fit in fits if fit.method in meanings)
    if counts:
        ways = "; ".join(f"{counts[m]}: {way}" for m, way in meanings.items() if m in counts)
        yield (
            f"messages of {counts.total()} of {len(fits)} device pairs cannot separate latency "
            f"from bandwidth: all are of about one size, or larger ones took no longer ({ways}); "
            "measure the links (`torchrun -m executor.detect`)"
        )
