"""How a group holds each value of a step, and how each operation reads it.

A region reads whole values and leaves partial sums (Shoeybi et al., 2019, "Megatron-LM", section
3). Its gradients of a whole value are partial, so that the backward sums them: the function f of
the paper; the reduction of a sum is its g.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import networkx as nx
from torch import fx

from planner.tracing.sharding.dimensions import DimensionClass, Dimensions, Parts
from planner.tracing.sharding.notation import (
    COMBINE,
    DISPATCH,
    added_after,
)
from planner.tracing.sharing import bytes_of, operator_name, shape_of

_VIEWS = frozenset(
    "alias view reshape _unsafe_view flatten unflatten squeeze transpose t permute unsqueeze "
    f"contiguous clone index {DISPATCH}".split()
)
"""Operations that move elements of their first operand: sums and partial sums pass through."""
_LINEAR = _VIEWS | frozenset(f"neg sum select slice expand to {COMBINE}".split())


@dataclass(frozen=True)
class Share:
    """A form of a value: each rank has an equal share of each part of a dimension."""

    dimension: int
    parts: Parts

    def place(self, value: fx.Node) -> tuple[int, tuple[int, ...]]:
        """Return the dimension and the sizes of its parts in a value."""
        size = shape_of(value)[self.dimension]
        return self.dimension, tuple(int(size * part) for part in self.parts)


Form = Share | Literal["whole", "copied", "sum"]
"""``whole``: all ranks have the value, and its whole gradient; ``copied``: the value, and a part of
the gradient, whose sum over ranks is the whole one; ``sum``: a part of the value."""


@dataclass(frozen=True)
class Placements:
    """How a group holds and reads the values of a step.

    Attributes:
        layer_of, gradients: layer of each operation; values that the backward reaches.
        region_of: region of each operation that does a share of the work.
        shares: values and parameters of which each rank has a share inside a region.
        sums: values that are partial sums, made by a region or computed from such.
        reduced: those among them that are also needed whole: reduced in the forward.
        ends: the view behind a product whose bias is added there, once the sum is reduced.
        views: views of whole values that only regions read: their gradients are partial, and are
            summed before the view.
        positions: values between regions of which each rank has a share by positions.
        positioned: operations that each compute a share of such a value.
        exchanged: operations that send tokens to experts, or bring their rows back, where each rank
            has a share of the tokens: rows go between ranks (all-to-all), and nothing is summed.
        summed: nodes of whole parameters whose gradients are summed over the group once a step.
    """

    layer_of: Mapping[fx.Node, str]
    gradients: frozenset[fx.Node]
    region_of: Mapping[fx.Node, DimensionClass]
    shares: Mapping[fx.Node, Share]
    sums: frozenset[fx.Node] = frozenset()
    reduced: frozenset[fx.Node] = frozenset()
    ends: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    views: frozenset[fx.Node] = frozenset()
    positions: Mapping[fx.Node, Share] = field(default_factory=dict)
    positioned: frozenset[fx.Node] = frozenset()
    exchanged: frozenset[fx.Node] = frozenset()
    summed: frozenset[fx.Node] = frozenset()

    def is_shared(self, node: fx.Node) -> bool:
        """Return whether each rank does a share of an operation's work."""
        return node in self.region_of or node in self.positioned

    def share_in(self, node: fx.Node, value: fx.Node) -> Share | None:
        """Return what a rank has of an operand or the result of an operation that is shared."""
        return (self.shares if node in self.region_of else self.positions).get(value)

    def made(self, value: fx.Node) -> Form:
        """Return the form in which a value is made."""
        if value in self.shares:
            return self.shares[value]
        if value in self.positioned or value in self.exchanged:
            return self.positions[value]
        if value in self.sums:
            return "sum"
        return "copied" if value in self.views or value in self.summed else "whole"

    def held(self, value: fx.Node) -> Form:
        """Return the form of a value between regions: sums reduced, positions shared."""
        is_made = value not in self.reduced and value not in self.positions
        return self.made(value) if is_made else self.positions.get(value, "whole")

    def read(self, reader: fx.Node, value: fx.Node) -> Form:
        """Return the form in which an operation reads a value."""
        if value in self.shares:
            return self.shares[value]
        if reader in self.exchanged:
            return self.held(value)
        if reader in self.positioned:
            return self.positions.get(value, "copied")
        if reader in self.region_of or reader in self.sums:
            if reader not in self.region_of and value in self.sums:
                return "sum"
            # A bias is added to the reduced sum, of which ranks may have shares.
            is_added = reader in self.sums and value in added_after(reader)
            is_end_shared = self.ends.get(reader, reader) in self.positions
            return "whole" if is_added and not is_end_shared else "copied"
        return "copied" if reader in self.views else "whole"


def place(dimensions: Dimensions, found: Placements, made: Mapping[fx.Node, bool]) -> Placements:
    """Place every value between regions whole, with the fewest bytes reduced.

    Args:
        dimensions: of the step.
        found: the placements that follow from its regions alone.
        made: the regions' sums, and whether each is reduced at once.
    """
    able = _may_stay_sums(dimensions, found, made)
    sums = made.keys() | _kept_by_cut(found, able, made)
    reduced = {
        node
        for node in sums
        if node not in able or any(u not in sums or u in found.region_of for u in _users(node))
    }
    ends = {node: end for node in reduced if (end := _end(node, found.layer_of))}
    sums, reduced = sums | {*ends.values()}, reduced - ends.keys() | {*ends.values()}
    found = replace(found, sums=frozenset(sums), reduced=frozenset(reduced), ends=ends)
    views: set[fx.Node] = set()
    for source in reversed([*dimensions.data]):
        views |= _handed_on(source, found, views)
    return replace(found, views=frozenset(views))


def with_summed(found: Placements, tied: Iterable[Sequence[fx.Node]]) -> Placements:
    """Return placements with parameters whose gradients are partial wherever they are read."""
    summed = set[fx.Node]()
    for nodes in tied:
        forms = {
            found.read(user, node) if node in found.gradients else "whole"
            for node in nodes
            for user in _users(node)
        }
        if forms == {"copied"} and found.positions.keys().isdisjoint(nodes):
            summed.update(nodes)
    return replace(found, summed=frozenset(summed))


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if operator_name(user) != "_assert_tensor_metadata"]


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
    first = len(partial) == 1 and partial[0] in given[:1]
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
