"""Dimensions of a step's values that can only be split together, with what keeps them whole.

Every operation says which dimensions of its operands and results correspond
(:mod:`~planner.tracing.sharding.rules`); the closure over the graph are classes, as the named
dimensions of Alabed et al., 2025, "TOAST". A split class communicates only where an operation sums
over it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd

from networkx.utils import UnionFind
from torch import fx, nn

from planner.model.split_record import RegionKind
from planner.tracing.export import ExportedStep
from planner.tracing.sharding.rules import OFFSETS, ROUTING, Axis, Dimension, axes_of, results_of
from planner.tracing.sharing import is_check, operator_name, shape_of

Parts = tuple[Fraction, ...]
"""Fractions of a dimension that are split one by one: thirds of a fused query, key and value."""
WHOLE: Parts = (Fraction(1),)
_MOST_PARTS = 64


@dataclass(frozen=True, eq=False)
class DimensionClass:
    """Dimensions that are split together.

    Attributes:
        parts: the parts of each dimension.
        rows: operations with the axis that is split, in executable order.
        obstacles: why it cannot be split, each with the operation's name; empty: it can.
    """

    parts: Mapping[Dimension, Parts]
    rows: Sequence[tuple[fx.Node, Axis]]
    obstacles: Sequence[str]

    @cached_property
    def nodes(self) -> frozenset[fx.Node]:
        """Operations that each do a share of the work."""
        return frozenset(node for node, _ in self.rows)

    @cached_property
    def sums(self) -> frozenset[fx.Node]:
        """Those among them whose result is a partial sum."""
        made = {node for node, axis in self.rows if not axis.outputs}
        return frozenset(node for node in made if operator_name(node) != "cross_entropy_loss")

    @property
    def kind(self) -> RegionKind:
        """By what it is split."""
        names = set(map(operator_name, self.nodes))
        if names & ROUTING:
            return "experts"
        if names & {"scaled_dot_product_attention", "softmax", "_softmax"}:
            return "heads"
        is_table = "embedding" in map(operator_name, self.sums)
        return "vocabulary" if is_table or "cross_entropy_loss" in names else "columns"

    @property
    def experts(self) -> int:
        """The number of experts whose matrices and rows these are; 0: they are no experts'."""
        return next((shape_of(n)[0] for n, _ in self.parts if operator_name(n) == OFFSETS), 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that a degree has to divide: of all parts, each once, or the number of experts."""
        if self.experts:
            return (self.experts,)
        rows = ((shape_of(node)[own], parts) for (node, own), parts in self.parts.items())
        return tuple(sorted({int(size * part) for size, parts in rows for part in parts}))

    def fits(self, degree: int) -> bool:
        """Return whether a degree divides all sizes."""
        return gcd(*self.sizes) % degree == 0


class Dimensions:
    """The classes of a step's dimensions.

    Attributes:
        tied: the nodes of each parameter and buffer by its name; tied ones share it.
        axes: axes of each operation that has data, empty where it has no rule.
        data: values that depend on a parameter, in executable order; all others are cheap, and
            every rank has them.
        classes: in the order of their first operation.
        class_of: the class of each dimension.

    Args:
        exported: the step.
        walls: operations that are taken to have no axes, and so end a class.
    """

    def __init__(self, exported: ExportedStep, walls: frozenset[fx.Node] = frozenset()) -> None:
        self.tied: dict[str, list[fx.Node]] = defaultdict(list)
        self.data: dict[fx.Node, None] = {}
        for node in exported.graph.nodes:
            if node.op == "get_attr":
                self.tied[exported.name_of(node)].append(node)
                is_data = isinstance(exported.attribute(node), nn.Parameter)  # Trained or frozen.
            else:
                is_data = not self.data.keys().isdisjoint(node.all_input_nodes)
            if is_data and node.op != "output":
                self.data[node] = None
        self.axes: dict[fx.Node, Sequence[Axis]] = {}
        self._together = UnionFind()  # Dimensions of one class …
        self._alike = UnionFind()  # … and those among them with equal parts.
        self._obstacles: dict[Dimension, list[str]] = defaultdict(list)
        for node in self.data:
            # The operation that made a tuple speaks of its parts.
            is_silent = node.target is operator.getitem or is_check(node)
            if node.op == "call_function" and not is_silent:
                self._add(node, node in walls)
        for nodes in self.tied.values():
            for own in range(len(shape_of(nodes[0]))) if nodes[0] in self.data else ():
                for union in (self._together, self._alike) if len(nodes) > 1 else ():
                    union.union(*((node, own) for node in nodes))
        self.classes = list(self._classes())
        self.class_of = {member: found for found in self.classes for member in found.parts}

    def _add(self, node: fx.Node, is_wall: bool) -> None:
        """Add an operation; one without a rule keeps all of its dimensions whole."""
        axes = () if is_wall else axes_of(node, self.data)
        self.axes[node] = axes or ()
        covered = {member for axis in self.axes[node] for member in axis.members}
        for axis in self.axes[node]:
            self._together.union(*axis.members)
            if axis.whole is None:
                self._alike.union(*axis.members)
        reason = f"{node.target} {'has no rule: it needs' if axes is None else 'needs'} it whole"
        for value in () if is_wall else (*node.all_input_nodes, *results_of(node).values()):
            for own, size in enumerate(shape_of(value)) if value in self.data else ():
                if size > 1 and (value, own) not in covered:
                    self._together.union((value, own))
                    self._obstacles[value, own].append(reason)

    def _classes(self) -> Iterator[DimensionClass]:
        groups: dict[Dimension, list[Dimension]] = defaultdict(list)
        for member in list(self._together):
            groups[self._together[member]].append(member)
        rows: dict[Dimension, list[tuple[fx.Node, Axis]]] = defaultdict(list)
        divided: dict[Dimension, list[Axis]] = defaultdict(list)
        for node, axes in self.axes.items():
            for axis in (axis for axis in axes if axis.members):
                rows[self._together[axis.members[0]]].append((node, axis))
                if axis.whole:
                    divided[self._alike[axis.whole]].append(axis)
        known: dict[Dimension, Parts] = {}
        for first, group in groups.items():
            parts = {member: self._parts(self._alike[member], divided, known) for member in group}
            found = [text for member in group for text in self._obstacles.get(member, ())]
            read = [node for node, axis in rows[first] if axis.inputs]
            twice = {node: None for node in read if read.count(node) > 1}
            found += [f"{node.target} would have two split axes" for node in twice]
            if not all(parts.values()):
                found.append("operations divide it into different parts")
            if len({node for node, _ in group}) < len(group):
                found.append("two dimensions of one tensor would be split")
            yield DimensionClass(parts, rows[first], found)

    def _parts(
        self,
        group: Dimension,
        divided: Mapping[Dimension, Sequence[Axis]],
        known: dict[Dimension, Parts],
    ) -> Parts:
        """Return the parts of alike dimensions, none if the axes that divide them differ."""
        if group in known:
            return known[group]
        known[group] = ()  # A piece of itself has none.
        found = set[Parts]()
        for axis in divided.get(group, ()):
            joined = tuple(
                share * part
                for piece, share in axis.pieces
                for part in (self._parts(self._alike[piece], divided, known) if piece else WHOLE)
            )
            found.add(joined if sum(joined) == 1 and len(joined) <= _MOST_PARTS else ())
        known[group] = (found or {WHOLE}).pop() if len(found) <= 1 else ()
        return known[group]
