"""Measurements as a cluster that is known would give them, without any noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from builders import device_type

from planner.cluster.cluster import Cluster
from planner.cluster.hardware import DeviceType
from planner.topology.measurements import (
    ConcurrentMessages,
    Ends,
    MeasuredRank,
    Measurements,
    OneWay,
)

TYPES = {"unit": DeviceType.model_validate(device_type())}
Figures = Mapping[Ends, tuple[float, float]]
"""Latency in seconds and GB/s of pairs, by both devices."""


def measurements(
    hosts: Mapping[str, str],
    figures: Figures,
    together: Sequence[ConcurrentMessages] = (),
    spread: float = 0.0,
) -> Measurements:
    """Both ways of every pair with the same figures.

    Args:
        hosts: by device, in the order of ranks.
        figures: of pairs; others are missing.
        together: flows at the same time.
        spread: of all bandwidths.
    """
    members = tuple(MeasuredRank(name, host, "unit") for name, host in hosts.items())
    ways = {}
    for (a, b), (latency_s, width) in figures.items():
        for source, target in ((a, b), (b, a)):
            ways[source, target] = OneWay(source, target, latency_s, width, 0, spread)
    return Measurements(members, TYPES, ways, tuple(together))


def figures_of(cluster: Cluster) -> dict[Ends, tuple[float, float]]:
    """What single messages on a cluster would show."""
    names = cluster.device_names
    found = {}
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            route = cluster.route(first, second)
            assert route is not None
            found[first, second] = (route.latency_s, route.bandwidth_gb_per_s)
    return found


def flows(kind: str, *rows: tuple[str, str, float], bytes_: int = 10**7) -> ConcurrentMessages:
    """Flows at the same time by source, target and GB/s, with messages of equal size."""
    return ConcurrentMessages(
        kind,
        tuple((source, target) for source, target, _ in rows),
        (bytes_,) * len(rows),
        tuple(bytes_ / (rate * 1e9) for _, _, rate in rows),
    )
