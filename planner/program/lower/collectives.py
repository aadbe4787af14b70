"""All-reduces among any devices, in compiled code.

All messages of a step are sent at once and share links. A ring takes 2(r-1) steps of bytes/r, a
binary tree 2 ceil(log2 r) steps of all bytes; half a ring is a reduce-scatter or an all-gather.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.costs.collectives import EQUAL
from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.lower.gradient_tables import (
    GRADIENTS,
    MEMBER_NUMBERS,
    MEMBERS,
    MESSAGE_GB_PER_S,
    MESSAGE_LATENCY_S,
    SHARING,
)
from planner.program.lower.wires import (
    GB_PER_S,
    LATENCY_S,
    LINK_GB_PER_S,
    WIRES,
    pair_of,
    route_end,
    route_link,
)
from planner.program.stage_rows import DEVICE, REPLICA, STAGE

RING, TREE = 0, 1


@inlined
def edge_source(gradients: Any, algorithm: int, number: int) -> int:
    """Return the device from which an edge among the members goes."""
    place = number if algorithm == RING else number // 2
    return int(items(gradients, MEMBER_NUMBERS)[place])


@inlined
def edge_target(gradients: Any, algorithm: int, number: int) -> int:
    """Return the device to which an edge among the members goes."""
    is_last = algorithm == RING and number + 1 == header(gradients, GRADIENTS).members
    return int(items(gradients, MEMBER_NUMBERS)[0 if is_last else number + 1])


@inlined
def edges_of(gradients: Any, algorithm: int) -> int:
    """Return how many edges an algorithm has among the members."""
    return int(header(gradients, GRADIENTS).members - (algorithm == TREE))


@compiled
def add_members(rows: Any, gradients: Any, stage: int) -> None:
    """Add the devices of a stage to the members, in the order of the cluster, each once."""
    found = row(rows, STAGE, stage)
    for replica in range(found.first, found.last):
        add_member(rows, gradients, replica)


@compiled
def add_member(rows: Any, gradients: Any, replica: int) -> None:
    """Add the device of a replica to the members, in the order of the cluster, if it is none."""
    members, numbers = items(gradients, MEMBERS), items(gradients, MEMBER_NUMBERS)
    g, device = header(gradients, GRADIENTS), row(rows, REPLICA, replica).device
    number, at = row(rows, DEVICE, device).number, g.members
    while at > 0 and numbers[at - 1] > number:
        at -= 1
    if at > 0 and numbers[at - 1] == number:
        return
    for place in range(g.members, at, -1):
        members[place], numbers[place] = members[place - 1], numbers[place - 1]
    members[at], numbers[at] = device, number
    g.members += 1


@compiled
def messages_of(wires: Any, gradients: Any, algorithm: int) -> int:
    """Work out the messages of a step among the members, where links are shared as they are now.

    Returns:
        How many unlike ones there are.
    """
    found, sharing, width = 0, items(gradients, SHARING), items(wires, LINK_GB_PER_S)
    for number in range(edges_of(gradients, algorithm)):
        source = edge_source(gradients, algorithm, number)
        target = edge_target(gradients, algorithm, number)
        pair, end = pair_of(wires, source, target), route_end(wires, source, target)
        gb_per_s = items(wires, GB_PER_S)[pair]
        for place in range(end):
            link = route_link(wires, source, target, place, end)
            if link >= 0:
                gb_per_s = min(gb_per_s, width[link] / sharing[link])
        found = _add(wires, gradients, algorithm, found, items(wires, LATENCY_S)[pair], gb_per_s)
    return found


@compiled
def share_links(wires: Any, gradients: Any, algorithm: int, count: int) -> bool:
    """Count the messages on each link, or none again; return whether all edges have a path."""
    sharing, is_joined = items(gradients, SHARING), True
    for number in range(edges_of(gradients, algorithm)):
        source = edge_source(gradients, algorithm, number)
        target = edge_target(gradients, algorithm, number)
        if items(wires, GB_PER_S)[pair_of(wires, source, target)] <= 0:
            is_joined = False
        end = route_end(wires, source, target)
        for place in range(end):
            link = route_link(wires, source, target, place, end)
            if link >= 0:
                sharing[link] = sharing[link] + 1 if count else 0
    return is_joined


@compiled
def _add(
    wires: Any, gradients: Any, algorithm: int, found: int, latency_s: float, gb_per_s: float
) -> int:
    """Add a message unless there is one like it; return how many there are."""
    latencies, rates = items(gradients, MESSAGE_LATENCY_S), items(gradients, MESSAGE_GB_PER_S)
    first = algorithm * header(wires, WIRES).devices
    for place in range(first, first + found):
        if latencies[place] == latency_s and rates[place] == gb_per_s:
            return found
    latencies[first + found], rates[first + found] = latency_s, gb_per_s
    return found + 1


@compiled
def step_s(wires: Any, gradients: Any, algorithm: int, count: int, bytes_: float) -> float:
    """Return the seconds of a step whose messages have so many bytes each."""
    first, most_s = algorithm * header(wires, WIRES).devices, 0.0
    latencies, rates = items(gradients, MESSAGE_LATENCY_S), items(gradients, MESSAGE_GB_PER_S)
    for place in range(first, first + count):
        most_s = max(most_s, latencies[place] + bytes_ / (rates[place] * 1e9))
    return most_s


@compiled
def narrowest(wires: Any, gradients: Any, algorithm: int, count: int) -> float:
    """Return the bandwidth that every edge of a step carries."""
    first, width = algorithm * header(wires, WIRES).devices, np.inf
    for place in range(first, first + count):
        width = min(width, items(gradients, MESSAGE_GB_PER_S)[place])
    return width


@compiled
def fill_collective(wires: Any, gradients: Any, bytes_: int, gathered: int, out: Any) -> int:
    """Write seconds, latency and rate of a collective of some bytes; return its algorithm.

    Args:
        wires: of the network.
        gradients: with the members and the messages of a step.
        bytes_: that are reduced.
        gathered: bytes of the all-gather that follows, if this is a reduce-scatter; else 0.
        out: a row of REDUCTION.
    """
    h = header(gradients, GRADIENTS)
    count, levels = h.members, 0
    while (1 << levels) < count:
        levels += 1
    steps, part = (count - 1) * (1 if gathered else 2), bytes_ / count
    out.gather_s = out.gather_latency_s = 0.0
    ring_s = steps * step_s(wires, gradients, RING, h.ring_messages, part)
    if not gathered:
        tree_s = 2 * levels * step_s(wires, gradients, TREE, h.tree_messages, float(bytes_))
        if ring_s > tree_s * (1 + EQUAL):
            out.gb_per_s = narrowest(wires, gradients, TREE, h.tree_messages)
            moving_s = 2 * levels * bytes_ / (out.gb_per_s * 1e9)
            out.seconds, out.latency_s = min(ring_s, tree_s), max(0.0, tree_s - moving_s)
            return TREE
        out.seconds = min(ring_s, tree_s)
    else:
        out.seconds = ring_s
    out.gb_per_s = narrowest(wires, gradients, RING, h.ring_messages)
    out.latency_s = max(0.0, ring_s - steps * part / (out.gb_per_s * 1e9))
    if gathered:
        part = gathered / count
        out.gather_s = steps * step_s(wires, gradients, RING, h.ring_messages, part)
        moving_s = steps * part / (out.gb_per_s * 1e9)
        out.gather_latency_s = max(0.0, out.gather_s - moving_s)
    return RING
