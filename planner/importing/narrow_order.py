"""A topological order of a graph whose cuts are narrow: what a chain of layers is made from.

The bytes that live at each position, summed over the positions, are the sum of the cut widths.
Finding the order of least sum is hard in general (directed optimal linear arrangement; Garey and
Johnson 1979, GT43), so some cheap orders are made, and the narrowest is improved by a local search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.importing.least_growth import LeastGrowth
from planner.importing.order_moves import OrderMoves
from planner.importing.tensor import Tensor


@dataclass(frozen=True)
class NarrowOrder:
    """Looks for an order of ``nodes`` in which every tensor is made before it is used.

    Attributes:
        nodes: in the order that decides between equals.
        tensors: acyclic.
    """

    nodes: Sequence[str]
    tensors: Sequence[Tensor]

    def find(self) -> tuple[str, ...]:
        """The narrowest of the orders tried, of equal ones the first, improved."""
        orders = [
            LeastGrowth(self.nodes, self.tensors, eager=eager).order() for eager in (True, False)
        ]
        if self._is_executable(self.nodes):
            orders.insert(0, tuple(self.nodes))
        narrowest = min(orders, key=lambda order: sum(self.cut_bytes(order)))
        return OrderMoves(narrowest, self.tensors).improve()

    def cut_bytes(self, order: Sequence[str]) -> list[int]:
        """Bytes that live between each node of an order and the next."""
        position = {name: index for index, name in enumerate(order)}
        change = [0] * (len(order) + 1)
        for tensor in self.tensors:
            change[position[tensor.producer]] += tensor.bytes
            change[max(position[user] for user in tensor.users)] -= tensor.bytes
        return list(accumulate(change))[: len(order) - 1]

    def _is_executable(self, order: Sequence[str]) -> bool:
        position = {name: index for index, name in enumerate(order)}
        return all(
            position[tensor.producer] < position[user]
            for tensor in self.tensors
            for user in tensor.users
        )
