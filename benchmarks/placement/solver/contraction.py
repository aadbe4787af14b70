"""Contraction: nodes that must share a device become one block before the search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import networkx as nx

from benchmarks.placement.solver.blocks import Blocks, make_blocks
from benchmarks.placement.solver.instance import LoadInstance

NO_TIME = 1e-6
"""Below this the authors' program takes a time for zero (``performTrivialNodeOptimizations``)."""


class Ordered(NamedTuple):
    """A pair of groups of which the first may not be in a later stage than the second.

    ``is_turned`` marks those made of backward edges; the authors' program counts them apart.
    """

    before: int
    after: int
    is_turned: bool


def free_blocks(instance: LoadInstance) -> Blocks:
    """One block a colour, nothing else: stages need not be contiguous."""
    return make_blocks(instance, _by_color(instance), ())


def contiguous_blocks(instance: LoadInstance) -> Blocks:
    """Blocks and their order, as the authors' exact dynamic program sees them.

    Read from ``throughput-dp/dp.cpp`` of github.com/msr-fiddle/dnn-partitioning:

    1. one block a colour, forward and backward nodes alike;
    2. only the forward pass is ordered. A colour without forward nodes is ordered by its backward
       edges, turned round; backward nodes elsewhere just follow their colour;
    3. blocks on a circle of that order become one;
    4. a block whose forward nodes take no time, with a single neighbour in the forward pass, none
       in the backward pass, and no backward time of its own, becomes one with that neighbour,
       again and again. **This is a rule of the authors' program, not of the problem**: where
       memory and permissions do not bind it changes no optimum of theirs, else it can.
    """
    group, edges = ordered_groups(instance)
    group, edges = _merge(group, edges, _leaves(instance, group, edges))
    return make_blocks(instance, group, {(edge.before, edge.after) for edge in edges})


def ordered_groups(instance: LoadInstance) -> tuple[list[int], set[Ordered]]:
    """The group of every node after rules 1 to 3 of :func:`contiguous_blocks`, and their order."""
    group = _by_color(instance)
    edges = _ordered(instance, group)
    circles = nx.DiGraph([(edge.before, edge.after) for edge in edges])
    return _merge(group, edges, nx.strongly_connected_components(circles))


def _by_color(instance: LoadInstance) -> list[int]:
    """The group of every node: colours numbered as they come."""
    keys = [
        ("node", index) if node.color is None else ("color", node.color)
        for index, node in enumerate(instance.nodes)
    ]
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return [number[key] for key in keys]


def _ordered(instance: LoadInstance, group: list[int]) -> set[Ordered]:
    has_forward = {
        group[index] for index, node in enumerate(instance.nodes) if not node.is_backward
    }
    found = set()
    for source, target in instance.edges:
        first, second = instance.position[source], instance.position[target]
        a, b = group[first], group[second]
        backward = [instance.nodes[end].is_backward for end in (first, second)]
        if not any(backward):
            found.add(Ordered(a, b, False))
        elif all(backward) and not has_forward.issuperset((a, b)):
            found.add(Ordered(b, a, True))
    return {edge for edge in found if edge.before != edge.after}


def _merge(
    group: list[int], edges: set[Ordered], parts: Iterable[Iterable[int]]
) -> tuple[list[int], set[Ordered]]:
    """Make the groups of each part one, and number all groups anew."""
    part_of = {number: number for number in group}
    for part in map(set, parts):
        part_of.update(dict.fromkeys(part, min(part)))
    number = {part: index for index, part in enumerate(dict.fromkeys(map(part_of.get, group)))}
    new = {old: number[part] for old, part in part_of.items()}
    merged = {Ordered(new[edge.before], new[edge.after], edge.is_turned) for edge in edges}
    return [new[old] for old in group], {edge for edge in merged if edge.before != edge.after}


def _leaves(
    instance: LoadInstance, group: list[int], edges: set[Ordered]
) -> Iterable[Iterable[int]]:
    """The groups that rule 4 of :func:`contiguous_blocks` makes one."""
    forest = nx.Graph()
    forest.add_nodes_from(group)
    incident: dict[int, set[Ordered]] = {number: set() for number in group}
    for edge in edges:
        incident[edge.before].add(edge)
        incident[edge.after].add(edge)
    idle = _idle(instance, group)
    waiting = sorted(idle)
    while waiting:
        leaf = waiting.pop()
        if leaf not in idle or len(incident[leaf]) != 1:
            continue
        edge = incident[leaf].pop()
        neighbour = edge.before if edge.after == leaf else edge.after
        incident[neighbour].discard(edge)
        forest.add_edge(leaf, neighbour)
        idle.discard(leaf)
        waiting.append(neighbour)
    return list(nx.connected_components(forest))


def _idle(instance: LoadInstance, group: list[int]) -> set[int]:
    """Groups that take no time and have no edge from their forward to a backward node."""
    count = len(instance.classes)
    forward = {number: [0.0] * count for number in group}
    backward = dict.fromkeys(group, 0.0)
    for node, number in zip(instance.nodes, group, strict=True):
        if node.is_backward:
            backward[number] += sum(node.times)
        else:
            forward[number] = [a + b for a, b in zip(forward[number], node.times, strict=True)]
    turning = set()
    for source, target in instance.edges:
        first, second = instance.position[source], instance.position[target]
        if instance.nodes[second].is_backward and not instance.nodes[first].is_backward:
            turning.add(group[first])
    return {
        number
        for number in set(group) - turning
        if max(forward[number]) < NO_TIME and backward[number] < NO_TIME
    }
