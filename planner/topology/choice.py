"""The choice of the topology that best explains the measured pairs and concurrent messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from networkx.utils import UnionFind

from planner.cluster.cluster import Cluster
from planner.cluster.routing import Route
from planner.costs.collectives import all_reduce_s
from planner.errors import PipeplanError
from planner.simulation.fair_rates import fair_rates
from planner.topology.candidates import Topology, topologies, with_links
from planner.topology.measurements import ConcurrentMessages, Ends, Measurements, TimedReduction

LATENCY_SHARE = 0.5
LATENCY_S = 100e-6
"""A pair's latency may be off by this fraction, or by this much if that is more."""
WORTH = 0.1
"""A less simple topology has to predict concurrent messages better by this much (mean of the
logarithms' errors)."""
_LEFT = 1e-9
"""Fraction of a message that rounding may leave."""


class PairError(NamedTuple):
    """The relative errors of a topology's bandwidth and latency for a pair of devices."""

    ends: Ends
    bandwidth: float
    latency: float
    is_within: bool


@dataclass(frozen=True)
class TopologyFit:
    """A topology and its prediction errors.

    Attributes:
        topology: the topology, with its links.
        errors: errors of all measured pairs.
        together: mean absolute logarithmic error of concurrent messages; None if none were
            measured.
        predicted_s: predicted seconds per round of these messages, in the order of the
            measurements.
    """

    topology: Topology
    errors: tuple[PairError, ...]
    together: float | None
    predicted_s: tuple[tuple[float, ...], ...]

    @property
    def explains(self) -> bool:
        """Whether all pairs are within the tolerance."""
        return all(error.is_within for error in self.errors)

    @property
    def worst(self) -> PairError:
        """The pair with the largest error of bandwidth."""
        return max(self.errors, key=lambda error: abs(error.bandwidth))


@dataclass(frozen=True)
class TopologyChoice:
    """The chosen topology, and all evaluated ones in order of preference."""

    taken: TopologyFit
    judged: tuple[TopologyFit, ...]


def choose_topology(
    found: Measurements, tolerance: float, name: str = "measured"
) -> TopologyChoice:
    """Choose the simplest topology that explains the pairs, unless another predicts sharing better.

    Args:
        found: the measurements.
        tolerance: allowed relative error of a pair's bandwidth; its own spread is added.
        name: name of the cluster.

    Raises:
        PipeplanError: if no pair was measured.
    """
    if not found.pairs:
        raise PipeplanError("no pair of devices was measured; let it run longer")
    judged = tuple(
        judge(variant, found, tolerance)
        for topology in topologies(found, tolerance, name)
        for variant in _variants(topology, found.together)
    )
    taken, *others = [row for row in judged if row.explains]
    for row in others:
        if row.together is not None and taken.together is not None:
            taken = row if row.together < taken.together - WORTH else taken
    return TopologyChoice(taken, judged)


def judge(topology: Topology, found: Measurements, tolerance: float) -> TopologyFit:
    """Evaluate how well a topology explains the measurements."""
    cluster = topology.cluster
    predicted_s = tuple(seconds_together(cluster, row) for row in found.together)
    wrong = [
        abs(math.log(guess_s / seconds))
        for row, guesses_s in zip(found.together, predicted_s, strict=True)
        for guess_s, seconds in zip(guesses_s, row.seconds, strict=True)
    ]
    errors = tuple(_pair_errors(cluster, found, tolerance))
    return TopologyFit(topology, errors, fmean(wrong) if wrong else None, predicted_s)


def _pair_errors(cluster: Cluster, found: Measurements, tolerance: float) -> Iterator[PairError]:
    for ends, row in found.pairs.items():
        route = cluster.route(*ends)
        if route is None:
            yield PairError(ends, -1.0, -1.0, is_within=False)
            continue
        width = route.bandwidth_gb_per_s / row.bandwidth_gb_per_s - 1
        off_s = route.latency_s - row.latency_s
        is_within = abs(width) <= tolerance + row.spread
        is_within &= abs(off_s) <= max(LATENCY_SHARE * row.latency_s, LATENCY_S)
        latency = off_s / row.latency_s if row.latency_s else 0.0
        yield PairError(ends, width, latency, is_within)


def _variants(topology: Topology, together: Sequence[ConcurrentMessages]) -> Iterator[Topology]:
    """Yield the topology, and half-duplex variants if messages in both directions were measured."""
    yield topology
    if not any((b, a) in row.flows for row in together for a, b in row.flows):
        return
    every, inner = frozenset(range(len(topology.cluster.links))), topology.inner
    variants = {"half duplex": every}
    if inner and inner != every:
        variants["half duplex inside hosts"] = inner
        variants["half duplex between hosts"] = every - inner
    for title, half in variants.items():
        cluster = _half_duplex(topology.cluster, half)
        yield replace(topology, duplex=title, cluster=cluster)


def _half_duplex(cluster: Cluster, half: frozenset[int]) -> Cluster:
    return with_links(cluster, lambda index: {"duplex": "half"} if index in half else {})


# --- concurrent messages --------------------------------------------------------------------------


def seconds_together(cluster: Cluster, row: ConcurrentMessages) -> tuple[float, ...]:
    """Return the seconds per round of each flow at max-min fair rates; infinite without a path.

    Flows with a device in common wait for each other at the end of a round. Others never do, so one
    of their messages is always in progress.
    """
    routes = [route for ends in row.flows if (route := cluster.route(*ends)) is not None]
    if len(routes) < len(row.flows):
        return (math.inf,) * len(row.flows)
    joined = UnionFind(row.flows)
    for ends in row.flows:
        joined.union(*(other for other in row.flows if {*other} & {*ends}))
    seconds = [0.0] * len(routes)
    for group in joined.to_sets():
        flows = [flow for flow, ends in enumerate(row.flows) if ends in group]
        for flow in flows:
            seconds[flow] = _round_s(cluster, routes, row.bytes_, flows)
    return tuple(seconds)


def _round_s(
    cluster: Cluster, routes: Sequence[Route], bytes_: Sequence[int], flows: Sequence[int]
) -> float:
    """Return the time until the messages of some flows are done, while all other flows continue."""
    left = {flow: float(bytes_[flow]) for flow in flows}
    going = set(range(len(routes)))
    elapsed_s = 0.0
    while left:
        rates = _rates(cluster, {flow: routes[flow] for flow in sorted(going)})
        step_s = min(left[flow] / rates[flow] for flow in left)
        elapsed_s += step_s
        left = {flow: rest - rates[flow] * step_s for flow, rest in left.items()}
        through = {flow for flow, rest in left.items() if rest <= _LEFT * bytes_[flow]}
        going -= through
        left = {flow: rest for flow, rest in left.items() if flow not in through}
    return elapsed_s + max(routes[flow].latency_s for flow in flows)


def _rates(cluster: Cluster, routes: Mapping[int, Route]) -> dict[int, float]:
    """Return the rates of flows in bytes per second."""
    used = {link for route in routes.values() for link in route.links}
    capacity = {link: cluster.links[link[0]].bandwidth_gb_per_s for link in used}
    wishes = [(route.links, route.bandwidth_gb_per_s) for route in routes.values()]
    return dict(zip(routes, (rate * 1e9 for rate in fair_rates(wishes, capacity)), strict=True))


# --- all-reduces ----------------------------------------------------------------------------------


class ReductionError(NamedTuple):
    """An all-reduce and its predicted seconds."""

    reduction: TimedReduction
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; above 1 if it took longer."""
        return self.reduction.seconds / self.predicted_s


def reduction_errors(
    cluster: Cluster, reductions: Sequence[TimedReduction]
) -> tuple[ReductionError, ...]:
    """Return predictions next to measurements; all-reduces without a path are left out."""
    found = (
        ReductionError(row, all_reduce_s(cluster, row.devices, row.bytes_)) for row in reductions
    )
    return tuple(error for error in found if 0 < error.predicted_s < math.inf)
