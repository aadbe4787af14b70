"""How a group holds each value of a step, and how each operation reads it.

A region reads whole values and leaves partial sums (Shoeybi et al., 2019, "Megatron-LM", section
3). Its gradients of a whole value are partial, so that the backward sums them: the function f of
the paper; the reduction of a sum is its g. With sequence parallelism (Korthikanti et al., 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2) ranks have shares of
the positions between regions: norms, dropout and residuals are computed once in a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from planner.tracing.sharding.dimensions import Parts
from planner.tracing.sharding.notation import added_after
from planner.tracing.sharding.regions import Region
from planner.tracing.sharing import shape_of


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
        layer_of: layer of each operation.
        gradients: values that the backward reaches.
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
    region_of: Mapping[fx.Node, Region]
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
