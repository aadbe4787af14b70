"""Measured links that contradict the topology around them: worth another measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster, Link

CONTRADICTS = 3.0
"""Bandwidths that differ by a larger factor contradict each other."""
_REMEDY = "measure it again (pipeplan detect), or correct the topology"


def contradict(first_gb_per_s: float, second_gb_per_s: float) -> bool:
    """Return whether two figures of the same bandwidth contradict each other."""
    low, high = sorted((first_gb_per_s, second_gb_per_s))
    return high > CONTRADICTS * low


def contradictions(cluster: Cluster) -> Iterator[str]:
    """Yield what measured links say against the rest of a cluster.

    A link between two devices contradicts a path through switches that is far wider, because no
    message would ever take the link; a link of a switch contradicts those of like devices.
    """
    yield from _links_that_are_passed_by(cluster)
    yield from _unlike_ports(cluster)


def _links_that_are_passed_by(cluster: Cluster) -> Iterator[str]:
    for index, link in enumerate(cluster.links):
        if link.source != "measured" or not {*link.between} <= cluster.numbers.keys():
            continue
        route = cluster.route(*link.between)
        assert route is not None  # The link itself is one.
        if route.bandwidth_gb_per_s > CONTRADICTS * link.bandwidth_gb_per_s:
            way = ", ".join(cluster.link_name(used) for used in route.links)
            yield (
                f"{_measured(index, link)}, and messages between the two go over {way} instead, "
                f"with {route.bandwidth_gb_per_s:.4g} GB/s by the file: {_REMEDY}"
            )


def _unlike_ports(cluster: Cluster) -> Iterator[str]:
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, link in enumerate(cluster.links):
        for device, switch in (link.between, link.between[::-1]):
            if device in cluster.numbers and switch not in cluster.numbers:
                alike[switch, cluster.type_of(device)].append(index)
    for (switch, kind), indices in alike.items():
        for index in indices:
            link = cluster.links[index]
            if link.source != "measured" or len(indices) < 3:
                continue
            others = [cluster.links[i].bandwidth_gb_per_s for i in indices if i != index]
            usual = median(others)
            if contradict(usual, link.bandwidth_gb_per_s):
                yield (
                    f"{_measured(index, link)}, and the {len(others)} other links from {switch!r} "
                    f"to devices of type {kind} have {usual:.4g} (median): {_REMEDY}"
                )


def _measured(index: int, link: Link) -> str:
    first, second = link.between
    return (
        f"links[{index}]: {link.bandwidth_gb_per_s:.4g} GB/s were measured between {first!r} and "
        f"{second!r}"
    )
