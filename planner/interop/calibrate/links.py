"""Latency and bandwidth of links from transfers, and what that does to all-reduces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import NamedTuple

from planner.analysis.deviation import Comparison, Deviation
from planner.cluster.cluster import Cluster, Link
from planner.cluster.measured_links import CONTRADICTS, contradict
from planner.cluster.routing import Route
from planner.costs.placed_pipeline import PlacedPipeline
from planner.interop.calibrate.fits import (
    AGREEMENT,
    UNTOLD,
    Ends,
    PairFit,
    TransferSamples,
    fit_pair,
    route_of,
    without_sharing,
)
from planner.plan.operations import stages_label
from planner.units import format_seconds, plural

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
    pipeline: PlacedPipeline, samples: Mapping[Ends, TransferSamples]
) -> tuple[Cluster, tuple[CalibratedLink, ...], tuple[str, ...]]:
    """The cluster with links as measured, what changed, and what people should know of it.

    A pair's bandwidth goes to the narrowest links of its route; the others keep theirs unless it
    is less. Where several pairs use a link, its bandwidth is the most that any of them reached. A
    link that no transfer used changes as the measured links of equal figures do.

    Args:
        pipeline: what ran, on the cluster before.
        samples: seconds of messages by pair and bytes.
    """
    cluster = pipeline.problem.cluster
    visible = without_sharing(cluster)
    fits = [fit_pair(ends, route_of(visible, ends), rows) for ends, rows in samples.items()]
    links = _measured_links(visible, fits)
    every = {**links, **_like_links(cluster, links)}
    changes = tuple(_changes(cluster, every))
    if not changes:
        return cluster, (), ()
    calibrated = with_links(cluster, changes)
    notes = (
        *_contradiction_notes(changes),
        *_one_size_notes(fits),
        *_route_notes(visible, calibrated, samples),
    )
    return calibrated, changes, notes


def with_links(cluster: Cluster, changes: Sequence[CalibratedLink]) -> Cluster:
    """Return a cluster with other figures of some links."""
    if not changes:
        return cluster
    after = {change.index: change.after for change in changes}
    rows = [after.get(index, link) for index, link in enumerate(cluster.links)]
    data = {**cluster.model_dump(mode="json"), "links": [row.model_dump() for row in rows]}
    return Cluster.parse(data, "calibrated cluster")


class _Figures(NamedTuple):
    bandwidth_gb_per_s: float
    latency_us: float
    method: str


def _measured_links(cluster: Cluster, fits: Sequence[PairFit]) -> dict[int, _Figures]:
    """New figures of every link that a transfer used."""
    users: dict[int, list[PairFit]] = {}
    for fit in fits:
        for index, _ in route_of(cluster, fit.ends).links:
            users.setdefault(index, []).append(fit)
    return {index: _figures(cluster, index, rows) for index, rows in sorted(users.items())}


def _figures(cluster: Cluster, index: int, users: Sequence[PairFit]) -> _Figures:
    link = cluster.links[index]
    widths = [fit.bandwidth_gb_per_s for fit in users]
    routes = [route_of(cluster, fit.ends) for fit in users]
    if all(route.bandwidth_gb_per_s < link.bandwidth_gb_per_s for route in routes):
        widths.append(link.bandwidth_gb_per_s)
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
    kinds = [tuple(getattr(link, name) for name in _FIGURES) for link in cluster.links]
    alike: dict[tuple[object, ...], list[_Figures]] = {}
    for index, figures in measured.items():
        alike.setdefault(kinds[index], []).append(figures)
    found = {}
    for index, kind in enumerate(kinds):
        if index not in measured and (rows := alike.get(kind)):
            width = median(row.bandwidth_gb_per_s for row in rows)
            found[index] = _Figures(width, median(row.latency_us for row in rows), "as its like")
    return found


def _changes(cluster: Cluster, figures: Mapping[int, _Figures]) -> Iterator[CalibratedLink]:
    for index, row in sorted(figures.items()):
        before = cluster.links[index]
        update = {"bandwidth_gb_per_s": row.bandwidth_gb_per_s, "latency_us": row.latency_us}
        if all(getattr(before, name) == value for name, value in update.items()):
            continue
        source = "assumed" if row.method == "as its like" else "measured"
        after = before.model_copy(update={**update, "source": source})
        yield CalibratedLink(index, before, after, row.method)


def _contradiction_notes(changes: Sequence[CalibratedLink]) -> Iterator[str]:
    far = [
        row
        for row in changes
        if row.before.source != "assumed"
        and row.after.source == "measured"
        and contradict(row.before.bandwidth_gb_per_s, row.after.bandwidth_gb_per_s)
    ]
    if far:
        row = max(
            far,
            key=lambda row: abs(log(row.after.bandwidth_gb_per_s / row.before.bandwidth_gb_per_s)),
        )
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
    counts = Counter(fit.method for fit in fits if fit.method in UNTOLD)
    if counts:
        ways = "; ".join(f"{counts[m]}: {way}" for m, way in meanings.items() if m in counts)
        yield (
            f"messages of {counts.total()} of {len(fits)} device pairs cannot separate latency "
            f"from bandwidth: all are of about one size, or larger ones took no longer ({ways}); "
            "measure the links (`torchrun -m executor.detect`)"
        )


def _route_notes(
    before: Cluster, after: Cluster, samples: Mapping[Ends, TransferSamples]
) -> Iterator[str]:
    visible = without_sharing(after)
    for ends in samples:
        if route_of(before, ends).links != route_of(visible, ends).links:
            yield (
                f"with the new bandwidths data between {ends[0]} and {ends[1]} takes another "
                "route, over links that were not measured, so its prediction may be wrong"
            )


NOTICEABLE_FACTOR = 1.2
"""A prediction that far off is told."""


@dataclass(frozen=True)
class ReductionChange:
    """The all-reduce of some stages' gradients, against its prediction before and after."""

    stages: tuple[int, ...]
    before: Deviation
    after: Deviation

    @property
    def is_worse(self) -> bool:
        """Whether the calibration made the prediction noticeably worse."""
        return (
            self.after.factor > NOTICEABLE_FACTOR
            and self.after.factor > (1 + AGREEMENT) * self.before.factor
        )

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Predicted before, predicted after, measured."""
        before_s, after_s = self.before.predicted_s or 0.0, self.after.predicted_s or 0.0
        return before_s, after_s, self.before.measured_s or 0.0


def reduction_changes(before: Comparison, after: Comparison) -> tuple[ReductionChange, ...]:
    """Return the all-reduces that the run measured, in the plan's order, before and after."""
    return tuple(
        ReductionChange(stages, row, after.reductions[stages])
        for stages, row in before.reductions.items()
        if row.predicted_s is not None and row.measured_s is not None
    )


def reduction_notes(changes: Sequence[ReductionChange]) -> Iterator[str]:
    """Yield notes on all-reduces that are far off after the calibration."""
    words = "{} predicted before, {} after, {} measured"
    worse = [change for change in changes if change.is_worse]
    if worse:
        worst = max(worse, key=lambda change: change.after.factor)
        yield (
            f"calibration made the prediction of {len(worse)} of {len(changes)} all-reduces worse, "
            f"most that of {stages_label(worst.stages)}: "
            f"{words.format(*map(format_seconds, worst.seconds))}; correct bandwidth_gb_per_s and "
            "latency_us of its links manually, or measure larger messages"
        )
    elif changes and median(change.after.factor for change in changes) > NOTICEABLE_FACTOR:
        rows = zip(*(change.seconds for change in changes), strict=True)
        yield (
            "all-reduces are predicted from the links, and the prediction is off: "
            f"{words.format(*(format_seconds(median(row)) for row in rows))} (medians)"
        )
