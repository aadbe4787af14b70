"""Weight gradients that wait: an input gradient leaves them, a weight gradient takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Added = Callable[[Tensor], None]


class Totals:
    """Gradients of what is computed from parameters alone, such as a transposed one.

    Args:
        added: told of each parameter whose gradient something other than autograd has added to.
    """

    def __init__(self, added: Added) -> None:
        self.added = added
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """One more gradient of a computed weight."""
        before = self._found.get(id(weight))
        total = gradient if before is None else before[1] + gradient
        self._found[id(weight)] = (weight, total)

    def hand_on(self) -> None:
        """To the parameters that they were computed from."""
        if self._found:
            weights, gradients = zip(*self._found.values(), strict=True)
            torch.autograd.backward(weights, gradients)


class Waiting(Protocol):
    """An operation whose weight gradients are still to be taken."""

    def take(self, totals: Totals) -> None:
        """Add them to the parameters' ``grad``, or to the totals of computed weights."""


@dataclass
class WeightGradients:
    """The weight gradients that one microbatch's input gradient has left to do."""

    waiting: list[Waiting] = field(default_factory=list)

    def run(self, added: Added) -> None:
        """Take them all, and let each go with what it holds.

        Args:
            added: see :class:`Totals`.
        """
        totals = Totals(added)
        self.waiting.reverse()
        while self.waiting:
            self.waiting.pop().take(totals)
        totals.hand_on()


class Queue:
    """Where the backward that runs now puts its weight gradients."""

    def __init__(self) -> None:
        self._now = WeightGradients()

    def put(self, waiting: Waiting) -> None:
        """One more operation."""
        self._now.waiting.append(waiting)

    def take(self) -> WeightGradients:
        """What has been put since the last time."""
        taken, self._now = self._now, WeightGradients()
        return taken


def add_gradients(
    weights: Sequence[Tensor], gradients: Sequence[Tensor | None], totals: Totals
) -> None:
    """Add gradients to parameters, or to the totals of computed weights."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
        if weight.grad_fn is None:
            add_gradient(weight, gradient, totals)
        else:
            totals.add(weight, gradient)


def add_gradient(parameter: Tensor, gradient: Tensor, totals: Totals) -> None:
    """Add to a parameter's ``grad``."""
    if parameter.grad is None:
        # A tensor of its own: autograd may hand out one that others still need, or an expanded one.
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    else:
        parameter.grad.add_(gradient)
    totals.added(parameter)
