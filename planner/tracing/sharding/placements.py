"""How a group holds each value of a step, and how each operation reads it.

A region reads whole values and leaves partial sums (Shoeybi et al., 2019, "Megatron-LM", section
3). Its gradients of a whole value are partial, so that the backward sums them: the function f of
the paper; the reduction of a sum is its g.

With sequence parallelism each rank has a share of the positions between regions (Korthikanti et
al., 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2): an
all-reduce becomes a reduce-scatter where a region ends and an all-gather where one begins; norms,
dropout and residuals are computed once in a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import networkx as nx
from torch import fx

from planner.model.split_record import SplitParameter
from planner.tracing.export import ExportedStep
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions, Parts
from planner.tracing.sharding.notation import (
    COMBINE,
    DISPATCH,
    ROUTING,
    Dimension,
    added_after,
    results_of,
)
from planner.tracing.sharing import bytes_of, operator_name, shape_of

_RESHAPES = frozenset(("view", "reshape", "_unsafe_view"))
_VIEWS = _RESHAPES | frozenset(
    f"alias flatten unflatten squeeze transpose t permute unsqueeze contiguous clone index "
    f"{DISPATCH}".split()
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
class Split:
    """A step's split: what is split, and how a group holds and reads every value.

    Attributes:
        degree: number of ranks.
        dimensions: the classes of dimensions behind it.
        regions: what is split, in executable order.
        layer_of, gradients: layer of each operation; values that the backward reaches.
        sums: values that are partial sums, made by a region or computed from such.
        reduced: those among them that are also needed whole: reduced in the forward.
        ends: the view behind a product whose bias is added there, once the sum is reduced.
        views: views of whole values that only regions read: their gradients are partial, and are
            summed before the view.
        positions: values between regions of which each rank has a share by positions.
        positioned: operations that each compute a share of such a value.
        exchanged: operations that send tokens to experts, or bring their rows back, where each rank
            has a share of the tokens: rows go between ranks (all-to-all), and nothing is summed.
    """

    degree: int
    dimensions: Dimensions
    regions: Sequence[DimensionClass]
    layer_of: Mapping[fx.Node, str]
    gradients: frozenset[fx.Node]
    sums: Set[fx.Node] = frozenset()
    reduced: Set[fx.Node] = frozenset()
    ends: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    views: Set[fx.Node] = frozenset()
    positions: Mapping[fx.Node, Share] = field(default_factory=dict)
    positioned: Set[fx.Node] = frozenset()
    exchanged: Set[fx.Node] = frozenset()

    @cached_property
    def region_of(self) -> dict[fx.Node, DimensionClass]:
        """The region of each operation that does a share of the work."""
        return {node: region for region in self.regions for node in region.nodes}

    @cached_property
    def shares(self) -> dict[fx.Node, Share]:
        """Values and parameters of which each rank has a share inside a region."""
        rows = (row for region in self.regions for row in region.parts.items())
        return {node: Share(own, parts) for (node, own), parts in rows}

    @cached_property
    def parameters(self) -> dict[str, SplitParameter]:
        """The split parameters, by name."""
        found = {}
        for name, (node, *_) in self.dimensions.tied.items():
            if node in self.shares:
                dimension, parts = self.shares[node].place(node)
                found[name] = SplitParameter(name=name, dimension=dimension, parts=parts)
        return found

    @cached_property
    def summed(self) -> frozenset[str]:
        """Names of whole parameters whose gradients are summed over the group once a step."""
        rows = self.dimensions.tied.items()
        return frozenset(name for name, (node, *_) in rows if node in self._summed)

    @cached_property
    def _summed(self) -> set[fx.Node]:
        """Nodes of parameters whose gradients are partial wherever they are read."""
        found = set[fx.Node]()
        for nodes in self.dimensions.tied.values():
            readers = [(user, node) for node in nodes for user in _users(node)]
            is_partial = readers and all(
                node in self.gradients
                and user not in self.exchanged
                and self.read(user, node) == "copied"
                for user, node in readers
            )
            if is_partial and self.positions.keys().isdisjoint(nodes):
                found.update(nodes)
        return found

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
        return "copied" if value in self.views or value in self._summed else "whole"

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
        if reader not in self.region_of and reader not in self.sums:
            return "copied" if reader in self.views else "whole"
        if reader not in self.region_of and value in self.sums:
            return "sum"
        # A bias is added to the reduced sum, of which ranks may have shares.
        is_added = reader in self.sums and value in added_after(reader)
        is_end_shared = self.ends.get(reader, reader) in self.positions
        return "whole" if is_added and not is_end_shared else "copied"


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if operator_name(user) != "_assert_tensor_metadata"]


# --- sums and whole values ------------------------------------------------------------------------


def with_sums(found: Split, *, sequence: bool) -> Split:
    """Return a split with every value between regions whole, and the fewest bytes reduced.

    Args:
        found: what its regions alone say.
        sequence: whether values between regions are to be shared by positions afterwards.
    """
    made = {node for region in found.regions for node in region.sums}
    able = _may_stay_sums(found, made, sequence=sequence)
    sums = made | _kept_by_cut(found, able, made)
    reduced = {
        node
        for node in sums
        if node not in able or any(u not in sums or u in found.region_of for u in _users(node))
    }
    ends = {node: end for node in reduced if (end := _end(node, found.layer_of))}
    sums, reduced = sums | {*ends.values()}, reduced - ends.keys() | {*ends.values()}
    found = replace(found, sums=sums, reduced=reduced, ends=ends)
    views: set[fx.Node] = set()
    for source in reversed([*found.dimensions.data]):
        read = {user for user in source.users if _is_handed_on(source, user, found, views)}
        views |= read if bytes_of(source) <= sum(map(bytes_of, read)) else set()
    return replace(found, views=views)


def _may_stay_sums(
    found: Split, made: Set[fx.Node], *, sequence: bool
) -> dict[fx.Node, Sequence[fx.Node]]:
    """Return values that can be partial sums, with the whole operands that they are made of.

    They stay within a layer: what crosses a boundary between layers is never a partial sum.
    """
    able: dict[fx.Node, Sequence[fx.Node]] = {}
    for node in found.dimensions.data:
        partial = [n for n in node.all_input_nodes if n in able]
        if node in made:
            # Rows of experts that go back to shares of tokens are no sums of ranks there.
            goes_back = sequence and operator_name(node) == COMBINE
            if not goes_back and not added_after(node):
                able[node] = ()
        elif partial and node not in found.region_of and _is_sum(node, partial):
            layers = {found.layer_of.get(n) for n in (*partial, node)}
            if len(layers) == 1:
                able[node] = [n for n in node.all_input_nodes if shape_of(n) and n not in partial]
    return able


def _is_sum(node: fx.Node, partial: Sequence[fx.Node]) -> bool:
    """Return whether a result is a partial sum if these operands are."""
    name, given = operator_name(node), node.args
    values: Any = given[0] if name in ("stack", "cat") else given[:2]
    if name in ("add", "sub", "stack", "cat"):
        return {*values} <= {*partial}
    is_first = [*given[:1]] == [*partial]
    if name in _LINEAR:
        return is_first and bool(partial[0].meta["val"].dtype == node.meta["val"].dtype)
    is_factor = name == "mul" and len(partial) == 1 and values[0] is not values[1]
    return is_factor or (name == "div" and is_first)


def _kept_by_cut(
    found: Split, able: Mapping[fx.Node, Sequence[fx.Node]], made: Set[fx.Node]
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
    is_same = shape_of(users[0])[-1:] == shape_of(node)[-1:]
    return users[0] if operator_name(users[0]) in _RESHAPES and is_same else None


def _is_handed_on(source: fx.Node, node: fx.Node, found: Split, views: set[fx.Node]) -> bool:
    """Return whether an operation is a view that is only read partially."""
    users, layer = _users(node), found.layer_of.get(node)
    is_view = operator_name(node) in _VIEWS | {"select", "slice"} and node.args[0] is source
    return (
        is_view
        and bool(users)
        and not found.is_shared(node)
        and node not in found.sums
        and all(user in views or found.read(user, node) == "copied" for user in users)
        and all(found.layer_of.get(user) == layer for user in users)
    )


# --- shares of positions --------------------------------------------------------------------------


def with_positions(exported: ExportedStep, found: Split) -> Split:
    """Return a split with shares of positions between regions.

    The positions are the last dimension but one of what regions reduce, if it is not the first.
    """
    split = found.region_of.keys() | found.sums | found.views
    outside = Dimensions(exported, frozenset(split))
    chosen: dict[Dimension, Parts] = {}
    for node in found.reduced:
        own = len(shape_of(node)) - 2
        members = outside.class_of.get((node, own)) if own > 0 else None
        is_once = members and len({value for value, _ in members.parts}) == len(members.parts)
        if members and is_once and members.fits(found.degree):
            chosen.update(members.parts)
    positions = {
        value: Share(own, parts)
        for (value, own), parts in chosen.items()
        if value not in split or value in found.reduced
    }
    found = replace(found, positions=positions)
    nodes = {n for n in outside.axes if n not in split and _computes_its_share(n, outside, found)}
    nodes |= {part for node in nodes for part in results_of(node).values()}
    return replace(found, positioned=nodes, exchanged=_exchanged(found))


def _computes_its_share(node: fx.Node, outside: Dimensions, found: Split) -> bool:
    """Return whether an operation makes its share from shares alone."""
    values = (*node.all_input_nodes, *results_of(node).values())
    shared = {(n, found.positions[n].dimension) for n in values if n in found.positions}
    axes = [axis for axis in outside.axes[node] if not shared.isdisjoint(axis.members)]
    return len(axes) == 1 and bool(axes[0].outputs) and shared <= {*axes[0].members}


def _exchanged(found: Split) -> set[fx.Node]:
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
