"""Placements of a step's values: partial sums are reduced here, gradients of whole ones summed.

A region reads whole values and leaves partial sums (Shoeybi et al., 2019, "Megatron-LM", section
3). Each rank's gradient of a whole value that it reads is partial, so the backward sums it: the
function f of the paper. The reduction of a result is its g.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx
from torch import Tensor, fx

from planner.model.tracing.sharding.axes import (
    COMBINE,
    DISPATCH,
    added_after,
    operator_name,
    shape_of,
)
from planner.model.tracing.sharding.dimensions import Dimensions, Parts
from planner.model.tracing.sharding.regions import Region, is_routing

SequenceShares = Callable[["Placements"], "Placements"]

VIEWS = frozenset(
    "alias view reshape _unsafe_view flatten unflatten squeeze transpose t permute unsqueeze "
    f"contiguous clone index {DISPATCH}".split()
)
"""Operations that move elements of their first operand: sums and partial sums pass through."""
_LINEAR = VIEWS | frozenset(f"neg sum select slice expand to {COMBINE}".split())
_MANY = frozenset(("add", "sub", "stack", "cat"))


@dataclass(frozen=True)
class Placements:
    """How each value of a step is placed on a group.

    Attributes:
        region_of: region of each operation that does a share of the work.
        sums: values that are partial sums, made by a region or computed from such.
        reduced: those among them that are also needed whole: all-reduced in the forward.
        ends: the view after a product whose bias is added there, once the sum is reduced.
        views: views of whole values that only regions read: their gradients are partial, and are
            summed before the view.
        copies: whole values whose gradient is summed in the backward, with the layer that reads
            them; once for all of its operations.
        summed: parameters that every rank has whole but with a partial gradient: summed over the
            group once a step.
        sequence: values between regions of which each rank has a share of the positions, with the
            dimension and its parts (sequence parallelism); empty without.
        shared: operations that each compute a share of such a value; other ones compute it whole.
        exchanged: operations that send tokens to experts, or bring their rows back, where each rank
            has a share of the tokens: rows go between ranks (all-to-all), and nothing is summed.
    """

    region_of: Mapping[fx.Node, Region]
    sums: frozenset[fx.Node] = frozenset()
    reduced: frozenset[fx.Node] = frozenset()
    ends: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    views: frozenset[fx.Node] = frozenset()
    copies: frozenset[tuple[fx.Node, str]] = frozenset()
    summed: frozenset[fx.Node] = frozenset()
    sequence: Mapping[fx.Node, tuple[int, Parts]] = field(default_factory=dict)
    shared: frozenset[fx.Node] = frozenset()
    exchanged: frozenset[fx.Node] = frozenset()

    def is_partial_reader(self, node: fx.Node) -> bool:
        """Return whether an operation's gradients of its whole operands are partial."""
        is_split = node in self.region_of or node in self.shared
        return is_split or node in self.sums or node in self.views

    def reads_whole(self, reader: fx.Node, value: fx.Node) -> bool:
        """Return whether an operation reads a value whole: neither its share nor a partial sum."""
        if reader in self.shared:
            return value not in self.sequence
        if value in self.sums:
            return reader not in self.sums or reader in self.region_of
        region = self.region_of.get(reader)
        return region is None or region.split_dimension(value) is None

    def reads_partially(self, reader: fx.Node, value: fx.Node) -> bool:
        """Return whether an operation reads a whole value, and its gradient has to be summed."""
        return (
            self.is_partial_reader(reader)
            and self.reads_whole(reader, value)
            and value not in self.views
            and not self._adds_whole(reader, value)
        )

    def _adds_whole(self, reader: fx.Node, value: fx.Node) -> bool:
        """Return whether a whole result of a product gets a bias, which has the whole gradient."""
        is_bias = reader in self.sums and value in added_after(reader)
        return is_bias and self.ends.get(reader, reader) not in self.sequence


def place(
    dimensions: Dimensions,
    regions: Sequence[Region],
    layer_of: Mapping[fx.Node, str],
    gradients: frozenset[fx.Node],
    sequence: SequenceShares | None = None,
) -> Placements:
    """Place every value, with the fewest bytes reduced.

    Args:
        dimensions: the step's dimensions.
        regions: what is split.
        layer_of: layer of each operation.
        gradients: values that the backward reaches.
        sequence: given the placements without, finds what is shared by positions between regions;
            None: nothing is.
    """
    region_of = {node: region for region in regions for node in region.nodes}
    made = {node for region in regions for node in region.sums}
    # Rows that go back to shares of tokens are no partial sums there; see _exchanged.
    ends_there = {n for n in made if sequence is not None and operator_name(n) == COMBINE}
    sums, reduced = _reduce_where_smallest(made, ends_there, region_of, layer_of, gradients)
    ends = {node: end for node in reduced if (end := _end(node, layer_of))}
    sums, reduced = sums | set(ends.values()), reduced - ends.keys() | set(ends.values())
    found = Placements(region_of, sums, reduced, ends)
    views: set[fx.Node] = set()
    for source in reversed([*dimensions.data]):
        views |= _handed_on(source, found, views, layer_of)
    found = replace(found, views=frozenset(views))
    if sequence is not None:
        found = sequence(found)
        found = replace(found, exchanged=_exchanged(found, regions))
    partial = {
        (value, node)
        for node in dimensions.axes
        for value in node.all_input_nodes
        if value in gradients and found.reads_partially(node, value)
    }
    # A parameter that is also read elsewhere, where its gradient is whole, is summed at once.
    elsewhere = {
        first
        for value, first in dimensions.first.items()
        if value in found.sequence or any((value, user) not in partial for user in _users(value))
    }
    summed = {v for v, _ in partial if dimensions.first.get(v, v) not in elsewhere}
    summed = {value for value in summed if value.op == "get_attr"}
    copies = frozenset(
        (value, layer_of[node])
        for value, node in partial
        if value not in summed and value not in found.sequence
    )
    return replace(found, copies=copies, summed=frozenset(summed))


def _exchanged(found: Placements, regions: Sequence[Region]) -> frozenset[fx.Node]:
    """Return the operations of experts all of whose tokens are shared by positions."""
    exchanged: set[fx.Node] = set()
    for region in regions:
        routing = {node for node in region.nodes if is_routing(node)}
        made = {node for node in routing if operator_name(node) == COMBINE}
        read = {value for node in routing for value in node.all_input_nodes}
        tokens = made | {value for value in read if region.split_dimension(value) is None}
        # A combined value that stays a partial sum is reduced later, as without sharing.
        if made <= found.reduced and all(_has_positions(found, value) for value in tokens):
            exchanged |= routing
    return frozenset(exchanged)


def _has_positions(found: Placements, value: fx.Node) -> bool:
    return value in found.sequence and found.sequence[value][0] == len(shape_of(value)) - 2


def _end(node: fx.Node, layer_of: Mapping[fx.Node, str]) -> fx.Node | None:
    """Return the one view of a product with a bias that the bias can be added to just as well."""
    users = _users(node)
    if not added_after(node) or {layer_of.get(user) for user in users} != {layer_of[node]}:
        return None
    if len(users) > 1:
        return None
    is_view = operator_name(users[0]) in ("view", "reshape", "_unsafe_view")
    return users[0] if is_view and shape_of(users[0])[-1:] == shape_of(node)[-1:] else None


def _handed_on(
    source: fx.Node, found: Placements, views: set[fx.Node], layer_of: Mapping[fx.Node, str]
) -> set[fx.Node]:
    """Return views of a value that are only read partially, if to sum it instead is no worse."""
    read = {
        node
        for node in _users(source)
        if operator_name(node) in VIEWS | {"select", "slice"}
        and node.args[0] is source
        and not found.is_partial_reader(node)
        and _users(node)
        and all(
            (user in views or found.reads_partially(user, node))
            and layer_of.get(user) == layer_of.get(node)
            for user in _users(node)
        )
    }
    return read if bytes_of(source) <= sum(map(bytes_of, read)) else set()


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if operator_name(user) != "_assert_tensor_metadata"]


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a tensor; of anything else 0."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _reduce_where_smallest(
    made: set[fx.Node],
    ends_there: set[fx.Node],
    region_of: Mapping[fx.Node, Region],
    layer_of: Mapping[fx.Node, str],
    gradients: frozenset[fx.Node],
) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """Return the partial sums and those that are reduced, by a minimum cut.

    An operation is on the side of the sources if its result stays a partial sum; the cut pays for
    sums that are needed whole, and for gradients of the whole operands of products with sums. Sums
    in ``ends_there`` are reduced at once.
    """
    able = _may_stay_sums(made - ends_there, region_of, layer_of)
    network = nx.DiGraph()
    for node in able:
        network.add_edge(node, (node, "read"), capacity=bytes_of(node))
        for user in _users(node):
            network.add_edge((node, "read"), user if user in able else "whole")
        if node in made:
            network.add_edge("sum", node)
            continue
        whole = _whole_operands(node, able) or ()
        cost = sum(bytes_of(value) for value in whole if value in gradients)
        network.add_edge(node, "whole", capacity=cost)
        network.add_edges_from((node, n) for n in node.all_input_nodes if n in able)
    left = nx.minimum_cut(network, "sum", "whole")[1][0] if network else ()
    sums = made | {node for node in left if isinstance(node, fx.Node)}
    reduced = {
        node
        for node in sums
        if node not in able or any(u not in sums or u in region_of for u in _users(node))
    }
    return frozenset(sums), frozenset(reduced)


def _may_stay_sums(
    made: set[fx.Node], region_of: Mapping[fx.Node, Region], layer_of: Mapping[fx.Node, str]
) -> dict[fx.Node, None]:
    """Return partial sums, and values that are partial sums if their operands stay such.

    They stay within a layer: what crosses a boundary between layers is never a partial sum.
    """
    able = {node: None for node in sorted(made, key=str) if not added_after(node)}
    ahead = list(able)
    while ahead:
        node = ahead.pop()
        for user in _users(node):
            stays = layer_of.get(user) == layer_of[node] and user not in region_of
            if stays and user not in able and _whole_operands(user, able) is not None:
                able[user] = None
                ahead.append(user)

    def is_none(node: fx.Node) -> bool:
        if _whole_operands(node, able) is None:
            return True
        return any(layer_of.get(n) != layer_of.get(node) for n in node.all_input_nodes if n in able)

    while wrong := [node for node in able if node not in made and is_none(node)]:
        for node in wrong:
            del able[node]
    return able


def _whole_operands(node: fx.Node, able: Mapping[fx.Node, None]) -> tuple[fx.Node, ...] | None:
    """Return the operands that are not partial sums; None if the result would not be one."""
    operands = [n for n in node.all_input_nodes if shape_of(n) or n in able]
    partial = [n for n in operands if n in able]
    name = operator_name(node)
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    if name in _LINEAR:
        source = node.args[0]
        if isinstance(source, fx.Node) and source in able and _same_type(source, node):
            return tuple(n for n in operands if n is not source)
    elif (name == "mul" and node.args[0] is not node.args[1]) or (
        name == "div" and partial == [node.args[0]]
    ):
        return tuple(n for n in operands if n not in able) if len(partial) == 1 else None
    elif name in _MANY and len(partial) == len(operands) == _tensor_count(node):
        return ()
    return None


def _tensor_count(node: fx.Node) -> int:
    """Return the number of terms of a sum or join; a number among them makes it none."""
    terms = node.args[0] if operator_name(node) in ("stack", "cat") else node.args[:2]
    return len(set(terms)) if all(isinstance(term, fx.Node) for term in terms) else -1  # type: ignore[union-attr, arg-type]


def _same_type(source: fx.Node, node: fx.Node) -> bool:
    return bool(source.meta["val"].dtype == node.meta["val"].dtype)
