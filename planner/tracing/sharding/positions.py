"""Sequence parallelism: between regions each rank has a share of the positions.

Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.2: an all-reduce becomes a reduce-scatter where a region ends and an all-gather where one
begins; norms, dropout and residuals are computed once in a group.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from planner.tracing.export import ExportedStep
from planner.tracing.sharding.dimensions import Dimensions, Parts
from planner.tracing.sharding.notation import COMBINE, ROUTING, Dimension, results_of
from planner.tracing.sharding.placements import Placements, Share
from planner.tracing.sharing import operator_name, shape_of


def with_positions(exported: ExportedStep, found: Placements, degree: int) -> Placements:
    """Return placements with shares of positions between regions.

    The positions are the last dimension but one of what regions reduce, if it is not the first.
    """
    split = found.region_of.keys() | found.sums | found.views
    outside = Dimensions(exported, frozenset(split))
    chosen: dict[Dimension, Parts] = {}
    for node in found.reduced:
        own = len(shape_of(node)) - 2
        members = outside.class_of.get((node, own)) if own > 0 else None
        if members and members.fits(degree):
            is_once = len({value for value, _ in members.parts}) == len(members.parts)
            chosen.update(members.parts if is_once else {})
    positions = {
        value: Share(own, parts)
        for (value, own), parts in chosen.items()
        if value not in split or value in found.reduced
    }
    found = replace(found, positions=positions)
    nodes = {n for n in outside.axes if n not in split and _computes_its_share(n, outside, found)}
    nodes |= {part for node in nodes for part in results_of(node).values()}
    return replace(found, positioned=frozenset(nodes), exchanged=frozenset(_exchanged(found)))


def _computes_its_share(node: fx.Node, outside: Dimensions, found: Placements) -> bool:
    """Return whether an operation makes its share from shares alone."""
    values = (*node.all_input_nodes, *results_of(node).values())
    shared = {(n, found.positions[n].dimension) for n in values if n in found.positions}
    axes = [axis for axis in outside.axes[node] if not shared.isdisjoint(axis.members)]
    return len(axes) == 1 and bool(axes[0].outputs) and shared <= {*axes[0].members}


def _exchanged(found: Placements) -> set[fx.Node]:
    """Return the operations of experts all of whose tokens are shared by positions."""
    exchanged: set[fx.Node] = set()
    for region in dict.fromkeys(found.region_of.values()):
        routing = {node for node in region.nodes if operator_name(node) in ROUTING}
        made = {node for node in routing if operator_name(node) == COMBINE}
        values = made.union(*(node.all_input_nodes for node in routing)) - found.shares.keys()
        shares = [(len(shape_of(n)), found.positions.get(n)) for n in values]
        # A combined value that stays a partial sum is reduced later, as without sharing.
        if made <= found.reduced and all(s and s.dimension == rank - 2 for rank, s in shares):
            exchanged |= routing
    return exchanged
