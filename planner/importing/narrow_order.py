"""A topological order of a graph whose cuts are narrow: what a chain of layers is made from.

The bytes that live at each position, summed over the positions, are the sum of the cut widths.
Finding the order of least sum is hard in general (minimum linear arrangement of a directed acyclic
graph; Garey and Johnson 1979, GT42/43), so a few cheap orders are made, and the narrowest is
improved by a local search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate

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
        orders = [self._least_growth(eager=True), self._least_growth(eager=False)]
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

    @cached_property
    def _made_by(self) -> Mapping[str, list[Tensor]]:
        made: dict[str, list[Tensor]] = {name: [] for name in self.nodes}
        for tensor in self.tensors:
            made[tensor.producer].append(tensor)
        return made

    @cached_property
    def _read_by(self) -> Mapping[str, list[int]]:
        """Indices of the tensors that a node reads."""
        read: dict[str, list[int]] = {name: [] for name in self.nodes}
        for index, tensor in enumerate(self.tensors):
            for user in tensor.users:
                read[user].append(index)
        return read

    def _least_growth(self, *, eager: bool) -> tuple[str, ...]:
        """Greedy: of the nodes that can run, the one after which the fewest bytes live.

        Of equals the one that can run since last (a branch is finished before the next one
        starts). With ``eager`` unset nodes without inputs wait until no other node can run.
        """
        rank = {name: index for index, name in enumerate(self.nodes)}
        waiting_for = {name: len(read) for name, read in self._read_by.items()}
        users_left = [len(tensor.users) for tensor in self.tensors]
        heap: list[tuple[int, int, int, int, str]] = []
        done: dict[str, None] = {}
        ready: set[str] = set()

        def growth(name: str) -> int:
            made = sum(tensor.bytes for tensor in self._made_by[name])
            last = (i for i in self._read_by[name] if users_left[i] == 1)
            return made - sum(self.tensors[index].bytes for index in last)

        def offer(name: str) -> None:
            # Nodes that become cheaper are offered again; the outdated entry is skipped later.
            ready.add(name)
            late = 0 if eager or self._read_by[name] else 1
            entry = (late, growth(name), -len(done), rank[name], name)
            heappush(heap, entry)

        for name in self.nodes:
            if not waiting_for[name]:
                offer(name)
        while heap:
            name = heappop(heap)[-1]
            if name in done:
                continue
            done[name] = None
            for index in self._read_by[name]:
                users_left[index] -= 1
                if users_left[index] == 1:
                    last = next(user for user in self.tensors[index].users if user not in done)
                    if last in ready:
                        offer(last)
            for tensor in self._made_by[name]:
                for user in tensor.users:
                    waiting_for[user] -= 1
                    if not waiting_for[user]:
                        offer(user)
        return tuple(done)
