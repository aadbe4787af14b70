"""Latency and bandwidth of links from the times of transfers between pairs of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.artifacts.cluster import Cluster, Link
from planner.artifacts.routing import Route
from planner.calibration.fits import UNTOLD, PairFit, fit_pair
from planner.calibration.routes import route_of, without_sharing
from planner.calibration.transfers import Ends, TransferSamples
from planner.costs.placement import PlacedPipeline

_FIGURES = ("bandwidth_gb_per_s", "latency_us", "duplex", "shared")


@dataclass(frozen=True)
class LinkChange:
    """A link before and after; ``method`` as of its pair, or "as its like" where none used it."""

    index: int
    name: str
    before: Link
    after: Link
    method: str


def calibrated_cluster(
    pipeline: PlacedPipeline,
    samples: Mapping[Ends, TransferSamples],
    least_gb_per_s: Mapping[int, float],
) -> tuple[Cluster, tuple[LinkChange, ...], tuple[str, ...]]:
    """The cluster with links as measured, what changed, and what people should know of it.

    A pair's bandwidth goes to the narrowest links of its route; the others keep theirs unless it
    is less. Where several pairs use a link, its bandwidth is the most that any of them reached. A
    link that no transfer used changes as the measured links of equal figures do.

    Args:
        pipeline: what ran, on the cluster before.
        samples: seconds of messages by pair and bytes.
        least_gb_per_s: what all-reduces prove that links carry, by index; it counts on links whose
            messages did not tell latency from bandwidth.
    """
    cluster = pipeline.problem.cluster
    visible = without_sharing(cluster)
    fits = [_fit(visible, ends, rows, least_gb_per_s) for ends, rows in samples.items()]
    links = _measured_links(visible, fits, least_gb_per_s)
    every = {**links, **_like_links(cluster, links)}
    changes = tuple(_changes(cluster, every))
    if not changes:
        return cluster, (), ()
    after = {change.index: change.after for change in changes}
    rows = [after.get(index, link) for index, link in enumerate(cluster.links)]
    data = {**cluster.model_dump(mode="json"), "links": [row.model_dump() for row in rows]}
    calibrated = Cluster.parse(data, "calibrated cluster")
    notes = (*_one_size_notes(fits), *_route_notes(visible, calibrated, samples))
    return calibrated, changes, notes


def _fit(
    cluster: Cluster,
    ends: Ends,
    samples: TransferSamples,
    least_gb_per_s: Mapping[int, float],
) -> PairFit:
    route = route_of(cluster, ends)
    least = min(_least(cluster, route, index, least_gb_per_s) for index, _ in route.links)
    return fit_pair(ends, route, samples, least)


def _least(
    cluster: Cluster, route: Route, index: int, least_gb_per_s: Mapping[int, float]
) -> float:
    """What a link of a route carries at least; links that are not its narrowest keep theirs."""
    width = cluster.links[index].bandwidth_gb_per_s
    return max(least_gb_per_s.get(index, 0.0), width if width > route.bandwidth_gb_per_s else 0.0)


@dataclass(frozen=True)
class _Figures:
    bandwidth_gb_per_s: float
    latency_us: float
    method: str


def _measured_links(
    cluster: Cluster, fits: Sequence[PairFit], least_gb_per_s: Mapping[int, float]
) -> dict[int, _Figures]:
    """New figures of every link that a transfer used."""
    users: dict[int, list[PairFit]] = {}
    for fit in fits:
        for index, _ in route_of(cluster, fit.ends).links:
            users.setdefault(index, []).append(fit)
    return {
        index: _figures(cluster, index, rows, least_gb_per_s.get(index, 0.0))
        for index, rows in sorted(users.items())
    }


def _figures(
    cluster: Cluster, index: int, users: Sequence[PairFit], least_gb_per_s: float
) -> _Figures:
    link = cluster.links[index]
    widths = [fit.bandwidth_gb_per_s for fit in users]
    routes = [route_of(cluster, fit.ends) for fit in users]
    if all(route.bandwidth_gb_per_s < link.bandwidth_gb_per_s for route in routes):
        widths.append(link.bandwidth_gb_per_s)
    if all(fit.method in UNTOLD for fit in users):
        widths.append(least_gb_per_s)
    latency_us = median(
        _latency_us(link, route, fit) for route, fit in zip(routes, users, strict=True)
    )
    methods = {fit.method for fit in users} - {"agrees"}
    return _Figures(max(widths), latency_us, ", ".join(sorted(methods)) or "agrees")


def _latency_us(link: Link, route: Route, fit: PairFit) -> float:
    """A link's share of its pair's latency: in proportion, equal where there was none."""
    if fit.latency_s == route.latency_s:
        return link.latency_us
    if route.latency_s == 0:
        return fit.latency_s * 1e6 / len(route.links)
    return link.latency_us * (fit.latency_s / route.latency_s)


def _like_links(cluster: Cluster, measured: Mapping[int, _Figures]) -> dict[int, _Figures]:
    """New figures of links that no transfer used, from those that had equal figures."""
    alike: dict[tuple[object, ...], list[_Figures]] = {}
    for index, figures in measured.items():
        alike.setdefault(_kind(cluster.links[index]), []).append(figures)
    found = {}
    for index, link in enumerate(cluster.links):
        rows = alike.get(_kind(link), [])
        if index not in measured and rows:
            width = median(row.bandwidth_gb_per_s for row in rows)
            latency_us = median(row.latency_us for row in rows)
            found[index] = _Figures(width, latency_us, "as its like")
    return found


def _kind(link: Link) -> tuple[object, ...]:
    return tuple(getattr(link, name) for name in _FIGURES)


def _changes(cluster: Cluster, figures: Mapping[int, _Figures]) -> Iterator[LinkChange]:
    for index, row in sorted(figures.items()):
        before = cluster.links[index]
        update = {"bandwidth_gb_per_s": row.bandwidth_gb_per_s, "latency_us": row.latency_us}
        if all(getattr(before, name) == value for name, value in update.items()):
            continue
        source = "assumed" if row.method == "as its like" else "measured"
        after = before.model_copy(update={**update, "source": source})
        name = "-".join(before.between)
        yield LinkChange(index, name, before, after, row.method)


def _one_size_notes(fits: Sequence[PairFit]) -> Iterator[str]:
    untold = [fit.method for fit in fits if fit.method in UNTOLD]
    if untold:
        ways = {
            "latency": "the difference counts as latency (short messages)",
            "all-reduce": "bandwidth is the least that an all-reduce proves, the rest is latency",
            "scaled": "the difference counts as bandwidth",
        }
        told = "; ".join(f"{untold.count(m)}: {way}" for m, way in ways.items() if m in untold)
        yield (
            f"messages of {len(untold)} of {len(fits)} pairs of devices do not tell latency from "
            "bandwidth: all are of about one size, or larger ones took no longer "
            f"({told}); calibrate with a plan that sends messages of several sizes"
        )


def _route_notes(
    before: Cluster, after: Cluster, samples: Mapping[Ends, TransferSamples]
) -> Iterator[str]:
    visible = without_sharing(after)
    for ends in samples:
        if route_of(before, ends).links != route_of(visible, ends).links:
            yield (
                f"with the new bandwidths data between {ends[0]} and {ends[1]} takes another "
                "route, over links that were not measured: it may be predicted wrongly"
            )
