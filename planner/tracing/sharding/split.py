"""How a training step splits over a group, and how the group holds and reads every value.

The most work is split. A region reads whole values and leaves partial sums (Shoeybi et al., 2019,
"Megatron-LM", section 3). Its gradients of a whole value are partial, so that the backward sums
them: the function f of the paper; the reduction of a sum is its g.

With sequence parallelism each rank has a share of the positions between regions (Korthikanti et
al., 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2): an
all-reduce becomes a reduce-scatter where a region ends and an all-gather where one begins; norms,
dropout and residuals are computed once in a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import networkx as nx
from torch import fx

from planner.errors import PipeplanError
from planner.model.split_record import INDIVISIBLE, SplitParameter
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment
from planner.tracing.measure import MATRIX_PRODUCTS
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions, Parts
from planner.tracing.sharding.rules import (
    COMBINE,
    DISPATCH,
    ROUTING,
    Axis,
    Dimension,
    added_after,
    results_of,
)
from planner.tracing.sharing import bytes_of, is_check, operator_name, shape_of, written_by

RESHAPES = frozenset(("view", "reshape", "_unsafe_view"))
_VIEWS = RESHAPES | frozenset(
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


@dataclass
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
        places = {
            name: self.shares[node].place(node)
            for name, (node, *_) in self.dimensions.tied.items()
            if node in self.shares
        }
        return {
            name: SplitParameter(name=name, dimension=dimension, parts=parts)
            for name, (dimension, parts) in places.items()
        }

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


def split_step(
    exported: ExportedStep,
    layers: LayerAssignment,
    degree: int,
    *,
    sequence: bool = False,
    experts: bool = False,
) -> Split:
    """Find how a step splits: the most work with the least communication.

    Args:
        exported: the step.
        layers: layers of its operations.
        degree: number of devices.
        sequence: whether values between regions are shared by positions.
        experts: whether whole experts are given out.

    Raises:
        PipeplanError: if the step writes into a value that it reads again.
    """
    dimensions = Dimensions(exported)
    for node in dimensions.data:
        for value in written_by(node) if node.op == "call_function" else ():
            later = [user.name for user in value.users if user is not node and node < user]
            if value in dimensions.data and later:  # A rank may read another copy.
                raise PipeplanError(
                    f"operation {node.target} writes into {value.name!r}, which {later[0]!r} reads "
                    "afterwards; such a model cannot be split, return a new tensor there"
                )
    regions = _chosen((row for row in dimensions.classes if experts or not row.experts), degree)
    found = Split(degree, dimensions, regions, layers.layer_of, nodes_with_gradient(exported))
    _keep_sums(found, sequence)
    if sequence:
        _share_positions(exported, found)
    return found


def unsplit_parameters(split: Split) -> dict[str, str]:
    """Return why a parameter with two dimensions or more is not split, by its name."""
    found = {}
    for name, (node, *_) in split.dimensions.tied.items():
        reasons = []
        is_whole = node not in split.shares and len(shape_of(node)) > 1
        for own in range(len(shape_of(node))) if is_whole else ():
            if (row := split.dimensions.class_of.get((node, own))) is None:
                continue
            reason = "no matrix product would be split, or those that would are split better"
            if row.obstacles:
                reason = row.obstacles[0]
            elif not row.fits(split.degree):
                sizes = [str(size) for size in row.sizes if size % split.degree]
                reason = f"size {', '.join(sizes)} {INDIVISIBLE} {split.degree}"
            reasons.append(f"dimension {own}: {reason}")
        if reasons:
            found[name] = "; ".join(reasons)
    return found


# --- regions --------------------------------------------------------------------------------------


def _chosen(candidates: Iterable[DimensionClass], degree: int) -> list[DimensionClass]:
    """Choose regions: those with the most work first, as long as no operation is in two.

    A class is worth it if it has a matrix product, or a table of more rows than a sample looks up;
    whole experts come before anything else. The regions are in executable order.
    """
    gain: dict[DimensionClass, int] = {}
    for found in candidates:
        has_parameter = any(node.op == "get_attr" for node, _ in found.parts)
        if has_parameter and not found.obstacles and found.fits(degree):
            gain[found] = sum(_work(node, axis) for node, axis in found.rows)

    def rank(found: DimensionClass) -> tuple[bool, int, fx.Node]:
        return not found.experts, -gain[found], found.rows[0][0]

    regions: list[DimensionClass] = []
    for found in sorted((found for found in gain if gain[found]), key=rank):
        if all(found.nodes.isdisjoint(other.nodes) for other in regions):
            regions.append(found)
    return sorted(regions, key=lambda region: region.rows[0][0])


def _work(node: fx.Node, axis: Axis) -> int:
    """Return multiplications of a product along an axis, and a table's elements."""
    name = operator_name(node)
    if name in MATRIX_PRODUCTS:
        factor = next(n for n in node.all_input_nodes if len(shape_of(n)) > 1)
        return prod(shape_of(node)) * shape_of(factor)[-1]
    if name == "embedding" and not axis.outputs:
        rows, width = shape_of(axis.inputs[0][0])
        return rows * width if rows > _looked_up(node) else 0
    return 0


def _looked_up(node: fx.Node) -> int:
    """Return how many rows of a table a sample looks up; by a constant index, it may be all."""
    table, index = node.all_input_nodes[:2]
    ahead, seen = [index], {index}
    while ahead:
        ahead += (new := set(ahead.pop().all_input_nodes) - seen)
        seen |= new
    is_constant = all(value.op != "placeholder" for value in seen)
    return shape_of(table)[0] if is_constant else prod(shape_of(index)[1:])


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if not is_check(user)]


# --- sums and whole values ------------------------------------------------------------------------


def _keep_sums(found: Split, sequence: bool) -> None:
    """Let partial sums stay so that the fewest bytes are reduced, and every other value whole."""
    made = {node for region in found.regions for node in region.sums}
    able = _may_stay_sums(found, made, sequence)
    found.sums = made | _kept_by_cut(found, able, made)
    found.reduced = {
        node
        for node in found.sums
        if node not in able
        or any(u not in found.sums or u in found.region_of for u in _users(node))
    }
    found.ends = {node: end for node in found.reduced if (end := _end(node, found.layer_of))}
    found.sums |= {*found.ends.values()}
    found.reduced = found.reduced - found.ends.keys() | {*found.ends.values()}
    views: set[fx.Node] = set()
    for source in reversed([*found.dimensions.data]):
        read = {user for user in source.users if _is_handed_on(source, user, found, views)}
        views |= read if bytes_of(source) <= sum(map(bytes_of, read)) else set()
    found.views = views


def _may_stay_sums(
    found: Split, made: Set[fx.Node], sequence: bool
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
    return users[0] if operator_name(users[0]) in RESHAPES and is_same else None


def _is_handed_on(source: fx.Node, node: fx.Node, found: Split, views: set[fx.Node]) -> bool:
    """Return whether an operation is a view that is only read partially."""
    users, layer = _users(node), found.layer_of.get(node)
    return (
        operator_name(node) in _VIEWS | {"select", "slice"}
        and node.args[0] is source
        and bool(users)
        and not found.is_shared(node)
        and node not in found.sums
        and all(user in views or found.read(user, node) == "copied" for user in users)
        and all(found.layer_of.get(user) == layer for user in users)
    )


# --- shares of positions --------------------------------------------------------------------------


def _share_positions(exported: ExportedStep, found: Split) -> None:
    """Share values between regions by positions.

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
    found.positions = {
        value: Share(own, parts)
        for (value, own), parts in chosen.items()
        if value not in split or value in found.reduced
    }
    nodes = {n for n in outside.axes if n not in split and _computes_its_share(n, outside, found)}
    found.positioned = nodes | {part for node in nodes for part in results_of(node).values()}
    # Operations of experts all of whose tokens are shared by positions.
    exchanged: set[fx.Node] = set()
    for region in found.regions:
        routing = {node for node in region.nodes if operator_name(node) in ROUTING}
        made = {node for node in routing if operator_name(node) == COMBINE}
        values = made.union(*(node.all_input_nodes for node in routing)) - found.shares.keys()
        shares = [(len(shape_of(n)), found.positions.get(n)) for n in values]
        # A combined value that stays a partial sum is reduced later, as without sharing.
        if made <= found.reduced and all(s and s.dimension == rank - 2 for rank, s in shares):
            exchanged |= routing
    found.exchanged = exchanged


def _computes_its_share(node: fx.Node, outside: Dimensions, found: Split) -> bool:
    """Return whether an operation makes its share from shares alone."""
    values = (*node.all_input_nodes, *results_of(node).values())
    shared = {(n, found.positions[n].dimension) for n in values if n in found.positions}
    axes = [axis for axis in outside.axes[node] if not shared.isdisjoint(axis.members)]
    return len(axes) == 1 and bool(axes[0].outputs) and shared <= {*axes[0].members}
