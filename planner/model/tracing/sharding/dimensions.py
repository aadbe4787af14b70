"""Dimensions of a step's values that can only be split together, with what keeps them whole.

The idea is that of named dimensions (Alabed et al., 2025, "TOAST"): every operation says which
dimensions of its operands and results correspond; the closure over the graph are classes. Splitting
a class needs no communication but where an operation sums over it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import accumulate
from math import gcd

import networkx as nx
from torch import fx, nn

from planner.model.tracing.sharding.axes import (
    OFFSETS,
    Axis,
    Dimension,
    axes_of,
    operator_name,
    results_of,
    shape_of,
)
from planner.tracing.export import ExportedStep

Parts = tuple[Fraction, ...]
"""Fractions of a dimension that are split one by one: a third each for fused query, key, value."""
WHOLE: Parts = (Fraction(1),)
_MOST_PARTS = 64


@dataclass(frozen=True)
class DimensionClass:
    """Dimensions that are split together.

    Attributes:
        parts: the parts of each dimension.
        obstacles: why it cannot be split, each with the operation's name; empty: it can.
    """

    parts: Mapping[Dimension, Parts]
    obstacles: tuple[str, ...]

    @property
    def experts(self) -> int:
        """The number of experts whose matrices and rows these are; 0: they are no experts'."""
        return next((shape_of(n)[0] for n, _ in self.parts if operator_name(n) == OFFSETS), 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all parts, each once: a degree has to divide them.

        Of experts that is their number: how many rows each has, the routing says.
        """
        if self.experts:
            return (self.experts,)
        found = {
            int(shape_of(node)[own] * part)
            for (node, own), parts in self.parts.items()
            for part in parts
        }
        return tuple(sorted(found))

    @property
    def divisor(self) -> int:
        """The largest degree; every divisor of it is one too."""
        return reduce(gcd, self.sizes)


@dataclass(frozen=True)
class Dimensions:
    """The classes of a step's dimensions.

    Attributes:
        axes: axes of each operation that has data, empty where there is no rule.
        data: values that depend on a parameter, in executable order; all others are cheap, and
            every rank has them.
        classes: classes in the order of their first operation.
        class_of: index of the class of each dimension.
        first: the first node of each parameter, by any of its nodes: a tied one has several.
    """

    axes: Mapping[fx.Node, tuple[Axis, ...]]
    data: Mapping[fx.Node, None]
    classes: tuple[DimensionClass, ...]
    class_of: Mapping[Dimension, int]
    first: Mapping[fx.Node, fx.Node]


def dimensions_of(exported: ExportedStep, walls: frozenset[fx.Node] = frozenset()) -> Dimensions:
    """Find the classes of a step's dimensions.

    Args:
        exported: the step.
        walls: operations that are taken to have no axes, and so end a class.
    """
    data = _data_values(exported)
    found = _Builder(data, _first_nodes(exported))
    for node in exported.graph.nodes:
        if node.op == "call_function" and node in data:
            found.add(node, () if node in walls else axes_of(node), node in walls)
    return found.result()


def _data_values(exported: ExportedStep) -> Mapping[fx.Node, None]:
    """Return parameters and all values computed from any, trained or frozen."""
    data: dict[fx.Node, None] = {}
    for node in exported.graph.nodes:
        if node.op == "get_attr":
            if isinstance(exported.attribute(node), nn.Parameter):
                data[node] = None
        elif node.op == "call_function" and any(n in data for n in node.all_input_nodes):
            data[node] = None
    return data


def _first_nodes(exported: ExportedStep) -> dict[fx.Node, fx.Node]:
    """Return the first node of the same, perhaps tied, parameter or buffer."""
    first: dict[str, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in exported.graph.find_nodes(op="get_attr"):
        name = exported.names.get(str(node.target), str(node.target))
        same[node] = first.setdefault(name, node)
    return same


class _Builder:
    """Collects what belongs together and what stays whole, operation by operation."""

    def __init__(self, data: Mapping[fx.Node, None], first: Mapping[fx.Node, fx.Node]) -> None:
        self.data = data
        self.first = first
        self.axes: dict[fx.Node, tuple[Axis, ...]] = {}
        self.together = nx.Graph()  # Dimensions of one class …
        self.alike = nx.Graph()  # … and those among them with equal parts.
        self.relations: list[tuple[Dimension, tuple[tuple[Dimension | None, Fraction], ...]]] = []
        self.obstacles: dict[Dimension, list[str]] = defaultdict(list)
        self.clashes: list[tuple[fx.Node, list[Dimension]]] = []

    def add(self, node: fx.Node, axes: Sequence[Axis] | None, is_wall: bool) -> None:
        """Add an operation; one without a rule keeps all of its dimensions whole."""
        if operator_name(node) == "_assert_tensor_metadata":
            return
        if node.target is operator.getitem:
            return  # The operation that made the tuple speaks of its parts.
        self.axes[node] = kept = tuple(map(self._known, axes or ()))
        covered: set[Dimension] = set()
        for axis in kept:
            members = (*axis.inputs, *axis.outputs)
            covered.update(members)
            nx.add_path(self.together, members)
            if axis.whole is None:
                nx.add_path(self.alike, members)
            else:
                self.relations.append((self._key(axis.whole), axis.pieces))
            self.alike.add_nodes_from(members)
        self.clashes.append((node, [axis.inputs[0] for axis in kept if axis.inputs]))
        if not is_wall:
            self._keep_whole(
                node, covered, "needs" if axes is not None else "has no rule: it needs"
            )

    def _known(self, axis: Axis) -> Axis:
        """Return the axis with the first node of each parameter, and without other constants."""
        return Axis(
            tuple(self._key(d) for d in axis.inputs if d[0] in self.data and _size(d) > 1),
            tuple(d for d in axis.outputs if d[0] in self.data and _size(d) > 1),
            tuple((piece and self._key(piece), share) for piece, share in axis.pieces),
            axis.whole and self._key(axis.whole),
        )

    def _key(self, dimension: Dimension) -> Dimension:
        return self.first.get(dimension[0], dimension[0]), dimension[1]

    def _keep_whole(self, node: fx.Node, covered: set[Dimension], verb: str) -> None:
        operands = (self.first.get(n, n) for n in node.all_input_nodes)
        for value in (*operands, *results_of(node).values()):
            for own in range(len(shape_of(value))) if value in self.data else ():
                if (value, own) not in covered and _size((value, own)) > 1:
                    self.together.add_node((value, own))
                    self.alike.add_node((value, own))
                    self.obstacles[value, own].append(f"{node.target} {verb} it whole")

    def result(self) -> Dimensions:
        position = {member: index for index, member in enumerate(self.together)}
        groups = [
            sorted(group, key=position.__getitem__)
            for group in nx.connected_components(self.together)
        ]
        class_of = {member: i for i, group in enumerate(groups) for member in group}
        obstacles = [
            [text for member in group for text in self.obstacles.get(member, ())]
            for group in groups
        ]
        for node, members in self.clashes:
            found = [class_of[member] for member in members]
            for index in {i for i in found if found.count(i) > 1}:
                obstacles[index].append(f"{node.target} would have two split axes")
        parts, torn = self._parts()
        for member in torn:
            obstacles[class_of[member]].append("operations divide it into different parts")
        for index, group in enumerate(groups):
            nodes = [node for node, _ in group]
            if len(set(nodes)) < len(nodes):
                obstacles[index].append("two dimensions of one tensor would be split")
        # The other nodes of a tied parameter are split as its first one.
        tied = [n for n in self.data if self.first.get(n, n) is not n]
        also = {(n, own): self._key((n, own)) for n in tied for own in range(len(shape_of(n)))}
        for member, first in also.items():
            if first in class_of:
                class_of[member] = class_of[first]
                groups[class_of[first]].append(member)
                parts[member] = parts[first]
        classes = tuple(
            DimensionClass({m: parts[m] for m in group}, tuple(dict.fromkeys(obstacles[i])))
            for i, group in enumerate(groups)
        )
        return Dimensions(self.axes, self.data, classes, class_of, self.first)

    def _parts(self) -> tuple[dict[Dimension, Parts], set[Dimension]]:
        """Return the parts of every dimension, and those that operations disagree on."""
        group_of: dict[Dimension, int] = {}
        for index, group in enumerate(nx.connected_components(self.alike)):
            group_of.update(dict.fromkeys(group, index))
        known: dict[int, Parts] = {}
        torn: set[Dimension] = set()
        changed = True
        while changed:
            changed = False
            for whole, pieces in self.relations:
                if whole not in group_of or whole in torn:
                    continue
                expected = tuple(
                    share * part
                    for piece, share in pieces
                    for part in known.get(group_of.get(piece, -1) if piece else -1, WHOLE)
                )
                found = known.get(group_of[whole])
                if found == expected:
                    continue
                changed = True
                is_torn = found is not None and not _refines(expected, found)
                if is_torn or len(expected) > _MOST_PARTS:
                    torn.add(whole)
                else:
                    known[group_of[whole]] = expected
        return {m: known.get(group, WHOLE) for m, group in group_of.items()}, torn


def _refines(finer: Parts, coarser: Parts) -> bool:
    """Return whether parts divide other parts further."""
    return set(accumulate(finer)) >= set(accumulate(coarser))


def _size(dimension: Dimension) -> int:
    return shape_of(dimension[0])[dimension[1]]
