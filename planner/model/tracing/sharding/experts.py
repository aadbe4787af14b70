"""Whole experts on the ranks of a group: each computes the rows of the tokens that chose its own.

Rank r of t has the experts from r E / t on, E / t of them (Lepikhin et al., 2021, "GShard", section
3.2). Where every rank has all tokens it takes the rows of its experts out of them, and what it adds
up per token is a partial sum. Where each rank has the tokens of its own positions, rows travel:
two all-to-alls in the forward and two in the backward, as in Megatron-LM's ``alltoall`` dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, fx

from planner.model.tracing.sharding.axes import (
    COMBINE,
    DISPATCH,
    OFFSETS,
    arguments_of,
    operator_name,
)


class ExpertGroup(Protocol):
    """What a group does with rows of experts, each differentiable; in brackets the backward.

    ``hidden`` are tokens, [..., width], ``chosen`` their experts, int64 [..., k], and ``weights``
    those of the experts, [..., k]. Rows are of this rank's experts, sorted by expert.
    """

    def own_rows(self, hidden: Tensor, chosen: Tensor, experts: int) -> Tensor:
        """Copy tokens that all ranks have to rows of this rank's experts [partial gradients]."""

    def own_offsets(self, chosen: Tensor, experts: int) -> Tensor:
        """Return where those rows end, for each of this rank's experts."""

    def own_sums(self, rows: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
        """Sum those rows for all tokens: a partial sum [partial gradients of the weights]."""

    def expert_counts(self, chosen: Tensor, experts: int) -> Tensor:
        """Gather how many tokens of each rank chose each expert, int64 [ranks, experts]."""

    def send_rows(self, hidden: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """Send this rank's tokens to their experts and receive rows [rows' gradients go back]."""

    def received_offsets(self, counts: Tensor) -> Tensor:
        """Return where the rows received end, for each of this rank's experts."""

    def return_rows(self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Send rows back and sum them for this rank's tokens [gradients go to the experts]."""


_OWN = {DISPATCH: "own_rows", OFFSETS: "own_offsets", COMBINE: "own_sums"}

Call = Callable[..., fx.Node]
"""Adds a call of a method of the group."""


class RoutedShares:
    """Adds a rank's shares of operations that send tokens to experts or bring their rows back.

    Args:
        call: given a method and its arguments.
        communicate: given a method, what is communicated and its layer, and the arguments.
    """

    def __init__(self, call: Call, communicate: Call) -> None:
        self._call, self._communicate = call, communicate
        self._counts: dict[tuple[fx.Node, str], fx.Node] = {}

    def own(self, node: fx.Node, operand: Callable[[fx.Node], fx.Node], experts: int) -> fx.Node:
        """Add the share of an operation on tokens that every rank has."""
        values = [operand(value) for value in _values(node)]
        return self._call(_OWN[operator_name(node)], *values, experts)

    def exchanged(
        self, node: fx.Node, layer: str, operand: Callable[[fx.Node], fx.Node], experts: int
    ) -> fx.Node:
        """Add the share of an operation on tokens of which every rank has some."""
        given, name = arguments_of(node), operator_name(node)
        chosen = given["chosen"]
        key = chosen, layer
        if key not in self._counts:
            self._counts[key] = self._communicate(
                "expert_counts", chosen, layer, operand(chosen), experts
            )
        if name == OFFSETS:
            return self._call("received_offsets", self._counts[key])
        method, rows = ("send_rows", node) if name == DISPATCH else ("return_rows", given["rows"])
        values = [operand(value) for value in _values(node)]
        return self._communicate(method, rows, layer, *values, self._counts[key])


def _values(node: fx.Node) -> list[fx.Node]:
    return [value for value in arguments_of(node).values() if isinstance(value, fx.Node)]
