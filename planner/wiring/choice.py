"""The wiring that explains the figures of all pairs, and best what flows at the same time do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from networkx.utils import UnionFind

from planner.artifacts.cluster import Cluster
from planner.artifacts.routing import Route
from planner.errors import PipeplanError
from planner.fair_links import fair_rates
from planner.wiring.candidates import Wiring, wirings, with_links
from planner.wiring.measured import Ends, Measurements, Together

LATENCY_SHARE = 0.5
LATENCY_S = 100e-6
"""A pair's latency may be off by this share, or by this much if that is more."""
_LEFT = 1e-9
"""Share of a message that rounding may leave."""
WORTH = 0.1
"""A wiring that is less simple has to predict flows at the same time better by this (mean of the
logarithms' errors)."""


@dataclass(frozen=True)
class PairError:
    """A pair of devices and how far off a wiring's figures for it are, as shares."""

    ends: Ends
    bandwidth: float
    latency: float
    is_within: bool


@dataclass(frozen=True)
class Judged:
    """A wiring and what speaks against it.

    Attributes:
        wiring: with its links.
        errors: of all pairs that were measured.
        together: mean error of flows at the same time, as the logarithm's size; None where none
            were measured.
        predicted_s: of those flows from round to round, in the order of the measurements.
    """

    wiring: Wiring
    errors: tuple[PairError, ...]
    together: float | None
    predicted_s: tuple[tuple[float, ...], ...]

    @property
    def explains(self) -> bool:
        """Whether all pairs are within the tolerance."""
        return all(error.is_within for error in self.errors)

    @property
    def worst(self) -> PairError:
        """The pair whose bandwidth is farthest off."""
        return max(self.errors, key=lambda error: abs(error.bandwidth))


@dataclass(frozen=True)
class Choice:
    """The wiring taken, and all that were judged in the order in which they were preferred."""

    taken: Judged
    judged: tuple[Judged, ...]


def choose_wiring(found: Measurements, tolerance: float, name: str = "measured") -> Choice:
    """The simplest wiring that explains the pairs, unless another predicts sharing better.

    Args:
        found: what was measured.
        tolerance: of a pair's bandwidth, as a share; its own spread is added.
        name: of the cluster.

    Raises:
        PipeplanError: if no pair was measured.
    """
    if not found.pairs:
        raise PipeplanError("no pair of devices was measured; let it run longer")
    judged = tuple(
        judge(variant, found, tolerance)
        for wiring in wirings(found, tolerance, name)
        for variant in _variants(wiring, found.together)
    )
    fitting = [row for row in judged if row.explains]
    taken = fitting[0]
    for row in fitting[1:]:
        if row.together is not None and taken.together is not None:
            taken = row if row.together < taken.together - WORTH else taken
    return Choice(taken, judged)


def judge(wiring: Wiring, found: Measurements, tolerance: float) -> Judged:
    """How well a wiring explains what was measured."""
    cluster = wiring.cluster
    predicted_s = tuple(seconds_together(cluster, row) for row in found.together)
    wrong = [
        abs(math.log(guess_s / seconds)) if guess_s < math.inf else math.inf
        for row, guesses_s in zip(found.together, predicted_s, strict=True)
        for guess_s, seconds in zip(guesses_s, row.seconds, strict=True)
    ]
    errors = tuple(_pair_errors(cluster, found, tolerance))
    return Judged(wiring, errors, mean(wrong) if wrong else None, predicted_s)


def seconds_together(cluster: Cluster, row: Together) -> tuple[float, ...]:
    """Seconds from round to round of each flow, at max-min fair rates of all; infinite if no path.

    Flows with a device in common wait for each other at the end of a round; others never do, so
    that some message of theirs is always on its way.
    """
    routes = [cluster.route(*ends) for ends in row.flows]
    known = [route for route in routes if route is not None]
    if len(known) < len(routes):
        return (math.inf,) * len(routes)
    joined = UnionFind(row.flows)
    for ends in row.flows:
        joined.union(*(other for other in row.flows if {*other} & {*ends}))
    seconds = [0.0] * len(known)
    for group in joined.to_sets():
        places = [place for place, ends in enumerate(row.flows) if ends in group]
        for place in places:
            seconds[place] = _round_s(cluster, known, row.bytes_, places)
    return tuple(seconds)


def _round_s(
    cluster: Cluster, routes: Sequence[Route], bytes_: Sequence[int], places: Sequence[int]
) -> float:
    """Until the messages of some flows are through, while those of all others flow on."""
    left = {place: float(bytes_[place]) for place in places}
    going = set(range(len(routes)))
    elapsed_s = 0.0
    while left:
        rates = _rates(cluster, {place: routes[place] for place in sorted(going)})
        step_s = min(left[place] / rates[place] for place in left)
        elapsed_s += step_s
        left = {place: rest - rates[place] * step_s for place, rest in left.items()}
        through = {place for place, rest in left.items() if rest <= _LEFT * bytes_[place]}
        going -= through
        left = {place: rest for place, rest in left.items() if place not in through}
    return elapsed_s + max(routes[place].latency_s for place in places)


def _rates(cluster: Cluster, routes: Mapping[int, Route]) -> dict[int, float]:
    """Bytes a second."""
    used = {link for route in routes.values() for link in route.links}
    capacity = {link: cluster.links[link[0]].bandwidth_gb_per_s for link in used}
    wishes = [(route.links, route.bandwidth_gb_per_s) for route in routes.values()]
    return dict(zip(routes, (rate * 1e9 for rate in fair_rates(wishes, capacity)), strict=True))


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


def _variants(wiring: Wiring, together: Sequence[Together]) -> Iterator[Wiring]:
    """The wiring, and the same with half-duplex links if messages both ways were measured."""
    yield wiring
    if not any((b, a) in row.flows for row in together for a, b in row.flows):
        return
    everything = frozenset(range(len(wiring.cluster.links)))
    choices = {
        "half duplex": everything,
        "half duplex inside hosts": wiring.inner,
        "half duplex between hosts": everything - wiring.inner,
    }
    for title, half in choices.items():
        if not half or (half == everything and title != "half duplex"):
            continue
        cluster = _half_duplex(wiring.cluster, half)
        yield replace(wiring, duplex=title, cluster=cluster)


def _half_duplex(cluster: Cluster, half: frozenset[int]) -> Cluster:
    return with_links(cluster, lambda index: {"duplex": "half"} if index in half else {})
