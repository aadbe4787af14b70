"""Placing a step's values: what is reduced, copied and shared by positions, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import networkx as nx
from torch import Tensor, fx

from planner.tracing.export import ExportedStep
from planner.tracing.sharding.dimensions import Dimensions, Parts, tied_nodes
from planner.tracing.sharding.notation import (
    COMBINE,
    DISPATCH,
    Dimension,
    added_after,
    results_of,
)
from planner.tracing.sharding.placements import Placements, Share
from planner.tracing.sharding.regions import Region, is_routing
from planner.tracing.sharing import operator_name, shape_of

_VIEWS = frozenset(
    "alias view reshape _unsafe_view flatten unflatten squeeze transpose t permute unsqueeze "
    f"contiguous clone index {DISPATCH}".split()
)
"""Operations that move elements of their first operand: sums and partial sums pass through."""
_LINEAR = _VIEWS | frozenset(f"neg sum select slice expand to {COMBINE}".split())


def place(
    exported: ExportedStep,
    dimensions: Dimensions,
    regions: Sequence[Region],
    layer_of: Mapping[fx.Node, str],
    gradients: frozenset[fx.Node],
    degree: int | None,
    *,
    sequence: bool,
) -> Placements:
    """Place every value, with the fewest bytes reduced.

    Args:
        exported: the step.
        dimensions: of the step.
        regions: what is split.
        layer_of: layer of each operation.
        gradients: values that the backward reaches.
        degree: number of devices; None: any.
        sequence: whether values between regions are shared by positions.
    """
    region_of = {node: region for region in regions for node in region.nodes}
    shares = {n: Share(own, parts) for r in regions for (n, own), parts in r.parts.items()}
    found = Placements(layer_of, gradients, region_of, shares)
    # Rows of experts that go back to shares of tokens are no sums of ranks there: see _exchanged.
    made = {node: sequence and operator_name(node) == COMBINE for r in regions for node in r.sums}
    able = _may_stay_sums(dimensions, found, made)
    sums = made.keys() | _kept_by_cut(found, able, made)
    reduced = {
        node
        for node in sums
        if node not in able or any(u not in sums or u in region_of for u in _users(node))
    }
    ends = {node: end for node in reduced if (end := _end(node, layer_of))}
    sums, reduced = sums | {*ends.values()}, reduced - ends.keys() | {*ends.values()}
    found = replace(found, sums=frozenset(sums), reduced=frozenset(reduced), ends=ends)
    views: set[fx.Node] = set()
    for source in reversed([*dimensions.data]):
        views |= _handed_on(source, found, views)
    found = replace(found, views=frozenset(views))
    found = _with_positions(exported, found, degree) if sequence else found
    return replace(found, summed=frozenset(_summed(exported, found)))


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if operator_name(user) != "_assert_tensor_metadata"]


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a tensor; of anything else 0."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _may_stay_sums(
    dimensions: Dimensions, found: Placements, made: Mapping[fx.Node, bool]
) -> dict[fx.Node, Sequence[fx.Node]]:
    """Return values that can be partial sums, with the whole operands that they are made of.

    They stay within a layer: what crosses a boundary between layers is never a partial sum.
    """
    able: dict[fx.Node, Sequence[fx.Node]] = {}
    for node in dimensions.data:
        partial = [n for n in node.all_input_nodes if n in able]
        if node in made:
            if not made[node] and not added_after(node):
                able[node] = ()
        elif partial and node not in found.region_of:
            layers = {found.layer_of.get(n) for n in (*partial, node)}
            whole = _whole_operands(node, partial)
            if whole is not None and len(layers) == 1:
                able[node] = whole
    return able


def _whole_operands(node: fx.Node, partial: Sequence[fx.Node]) -> Sequence[fx.Node] | None:
    """Return the operands that are no partial sums; None if the result is none of these."""
    name, given, value = operator_name(node), node.args[:2], node.meta.get("val")
    whole = [n for n in node.all_input_nodes if shape_of(n) and n not in partial]
    first = len(partial) == 1 and partial[0] is given[0]
    if name in _LINEAR:
        is_sum = first and partial[0].meta["val"].dtype == value.dtype  # type: ignore[union-attr]
    elif name in ("add", "sub"):
        is_sum = {*given} <= {*partial}
    elif name in ("stack", "cat"):
        is_sum = {*given[0]} <= {*partial}  # type: ignore[misc]
    else:
        is_factor = name == "mul" and len(partial) == 1 and given[0] is not given[1]
        is_sum = is_factor or (name == "div" and first)
    return whole if is_sum else None


def _kept_by_cut(
    found: Placements, able: Mapping[fx.Node, Sequence[fx.Node]], made: Mapping[fx.Node, bool]
) -> set[fx.Node]:
    """Return the values that stay partial sums, by a minimum cut.

    An operation is on the side of the sums if its result stays one; the cut pays for sums that are
    needed whole, and for gradients of the whole operands of products with sums.
    """
    network = nx.DiGraph()
    for node, whole in able.items():
        network.add_edge(node, (node, "read"), capacity=bytes_of(node))
        for user in _users(node):
            network.add_edge((node, "read"), user if user in able else "whole")
        if node in made:
            network.add_edge("sum", node)
            continue
        cost = sum(bytes_of(value) for value in whole if value in found.gradients)
        network.add_edge(node, "whole", capacity=cost)
        network.add_edges_from((node, n) for n in node.all_input_nodes if n in able)
    left = nx.minimum_cut(network, "sum", "whole")[1][0] if network else ()
    return {node for node in left if isinstance(node, fx.Node)}


def _end(node: fx.Node, layer_of: Mapping[fx.Node, str]) -> fx.Node | None:
    """Return the one view of a product with a bias that the bias can be added to just as well."""
    users = _users(node)
    if not added_after(node) or [layer_of.get(user) for user in users] != [layer_of[node]]:
        return None
    is_view = operator_name(users[0]) in ("view", "reshape", "_unsafe_view")
    return users[0] if is_view and shape_of(users[0])[-1:] == shape_of(node)[-1:] else None


def _handed_on(source: fx.Node, found: Placements, views: set[fx.Node]) -> set[fx.Node]:
    """Return views of a value that are only read partially, if to sum it instead is no worse."""

    def is_handed_on(node: fx.Node) -> bool:
        users, layer = _users(node), found.layer_of.get(node)
        is_view = operator_name(node) in _VIEWS | {"select", "slice"} and node.args[0] is source
        return (
            is_view
            and bool(users)
            and node not in found.region_of.keys() | found.sums
            and all(user in views or found.read(user, node) == "copied" for user in users)
            and all(found.layer_of.get(user) == layer for user in users)
        )

    read = set(filter(is_handed_on, source.users))
    return read if bytes_of(source) <= sum(map(bytes_of, read)) else set()


def _with_positions(exported: ExportedStep, found: Placements, degree: int | None) -> Placements:
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
    results = {value for axis in outside.axes[node] for value, _ in axis.outputs}
    values = [n for n in (*results, *node.all_input_nodes) if n in found.positions]
    shared = {(n, found.positions[n].dimension) for n in values}
    axes = [
        axis
        for axis in outside.axes[node]
        if any(member in shared and member[0] in results for member in axis.outputs)
    ]
    is_one = bool(results) and results <= {*values} and len(axes) == 1
    return is_one and shared <= {*axes[0].members}


def _exchanged(found: Placements) -> set[fx.Node]:
    """Return the operations of experts all of whose tokens are shared by positions."""
    exchanged: set[fx.Node] = set()
    for region in {id(region): region for region in found.region_of.values()}.values():
        routing = {node for node in region.nodes if is_routing(node)}
        made = {node for node in routing if operator_name(node) == COMBINE}
        read = {value for node in routing for value in node.all_input_nodes}
        tokens = made | {value for value in read if value not in found.shares}
        shares = {n: found.positions[n].dimension for n in tokens if n in found.positions}
        places = [shares.get(n) == len(shape_of(n)) - 2 for n in tokens]
        # A combined value that stays a partial sum is reduced later, as without sharing.
        if made <= found.reduced and all(places):
            exchanged |= routing
    return exchanged


def _summed(exported: ExportedStep, found: Placements) -> set[fx.Node]:
    """Return whole parameters whose gradients are partial wherever they are read."""
    summed = set[fx.Node]()
    for nodes in tied_nodes(exported).values():
        forms = [
            found.read(user, node) if node in found.gradients else "whole"
            for node in nodes
            for user in _users(node)
        ]
        if {*forms} == {"copied"} and found.positions.keys().isdisjoint(nodes):
            summed.update(nodes)
    return summed
