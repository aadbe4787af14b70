"""The part of a network that compiled code reads: latencies, bandwidths, routes, slowdowns."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.costs.by_identity import by_identity
from planner.costs.network_table import NetworkTable
from planner.program.compiled import Block, block, compiled, header, inlined, items
from planner.program.program import INT, REAL

(
    WIRES, LATENCY_S, GB_PER_S, MIDDLE, MIDDLE_START, MIDDLE_LINKS, FIRST_LINK, LAST_LINK,
    LINK_GB_PER_S, TYPE_OF, HOST_OF, SLOWDOWN, COMPUTE_SLOWDOWN, MESSAGE_SLOWDOWN,
) = block(
    "devices links hosts most_of_host is_slowed longest_route",
    latency_s=REAL, gb_per_s=REAL, middle=INT, middle_start=INT, middle_links=INT, first_link=INT,
    last_link=INT, link_gb_per_s=REAL, type_of=INT, host_of=INT, slowdown=REAL,
    compute_slowdown=REAL, message_slowdown=REAL,
)  # fmt: skip
_NAMES = """latency_s gb_per_s middle middle_start middle_links first_link last_link link_gb_per_s
    type_of host_of slowdown compute_slowdown message_slowdown""".split()
"""Tables of :class:`planner.costs.network_table.NetworkTable`, in the order above."""


@by_identity
def wires_of(network: NetworkTable) -> Block:
    """Return the tables of a network."""
    rows = [np.ravel(getattr(network, name)) for name in _NAMES]
    found = Block(WIRES, {LATENCY_S + n: len(row) for n, row in enumerate(rows)})
    for n, row in enumerate(rows):
        found[LATENCY_S + n][:] = row
    numbers = found.numbers
    numbers["devices"], numbers["links"] = len(network.devices), len(network.links)
    numbers["hosts"], numbers["most_of_host"] = network.slowdown.shape
    slowed = network.host_of >= 0
    slowed |= (network.compute_slowdown > 1) | (network.message_slowdown > 1)
    numbers["is_slowed"] = bool(slowed.any())
    numbers["longest_route"] = int(np.diff(network.middle_start).max(initial=0)) + 2
    return found


@inlined
def pair_of(wires: Any, source: int, target: int) -> int:
    """Return the place of a pair of devices in tables of pairs."""
    return int(source * header(wires, WIRES).devices + target)


@compiled
def route_end(wires: Any, source: int, target: int) -> int:
    """Return how many places :func:`route_link` has for a route."""
    middle, start = items(wires, MIDDLE), items(wires, MIDDLE_START)
    place = middle[pair_of(wires, source, target)]
    return int(start[place + 1] - start[place] + 2)


@compiled
def route_link(wires: Any, source: int, target: int, place: int, end: int) -> int:
    """Return the directed link at a place of a route; -1: there is none at this place."""
    if place == 0:
        return int(items(wires, FIRST_LINK)[source])
    if place == end - 1:
        return int(items(wires, LAST_LINK)[target])
    first = items(wires, MIDDLE_START)[items(wires, MIDDLE)[pair_of(wires, source, target)]]
    return int(items(wires, MIDDLE_LINKS)[first + place - 1])
