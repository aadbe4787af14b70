"""Stages as intervals of the chain: the positions of their boundaries.

A boundary is an integer; sums over layers are looked up by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.search.partition.cp_sat.tensors import CutTensor

Expression = Any
"""A linear expression; ortools types sums as unions that cannot be added again."""
Literal = Any
"""A boolean variable or its negation."""
LayersByStage = Sequence[Sequence[int]]
"""The positions of each stage's layers."""
Values = cp_model.CpSolver | cp_model.CpSolverSolutionCallback


class ChainCuts:
    """Boundaries of the chain.

    Args:
        model: the CP-SAT model.
        length: number of layers.
        tensors: between them.
        max_stages: the largest number of stages.
        cuts: positions at which stages may begin and end.

    Attributes:
        boundary: ``boundary[j]`` is the first layer of stage j; the last is the chain's end.
        active: whether stage j exists.
    """

    def __init__(
        self,
        model: cp_model.CpModel,
        length: int,
        tensors: Sequence[CutTensor],
        max_stages: int,
        cuts: Sequence[int],
    ) -> None:
        self._model = model
        self._length = length
        self._tensors = tensors
        self._stages = range(max_stages)
        self._comparisons: dict[tuple[int, int], cp_model.IntVar] = {}
        self._looked_up: dict[tuple[tuple[int, ...], int], cp_model.IntVar] = {}
        self.boundary = [
            model.new_int_var_from_domain(cp_model.Domain.from_values(cuts), f"boundary {j}")
            for j in range(max_stages + 1)
        ]
        self.active = [model.new_bool_var(f"active {j}") for j in self._stages]
        self._order_boundaries()

    def _order_boundaries(self) -> None:
        model, length = self._model, self._length
        model.add(self.boundary[0] == 0)
        model.add(self.boundary[-1] == length)
        model.add(self.active[0] == 1)
        for j in self._stages:
            first, end, active = self.boundary[j], self.boundary[j + 1], self.active[j]
            model.add(end >= first + 1).only_enforce_if(active)
            model.add(first == length).only_enforce_if(~active)
            model.add(end == length).only_enforce_if(~active)
            if j:
                model.add_implication(active, self.active[j - 1])

    def done_by(self, j: int, layer: int) -> Literal:
        """Return literal of ``boundary[j + 1] > layer``."""
        if j < 0 or j + 1 >= len(self.boundary):
            return self._model.new_constant(int(j >= 0))
        key = (j + 1, layer)
        if key not in self._comparisons:
            literal = self._model.new_bool_var("")
            cut = self.boundary[j + 1]
            self._model.add(cut >= layer + 1).only_enforce_if(literal)
            self._model.add(cut <= layer).only_enforce_if(~literal)
            self._comparisons[key] = literal
        return self._comparisons[key]

    def before(self, per_layer: Sequence[int], j: int) -> Expression:
        """Return prefix sums, looked up at the boundary."""
        prefix = np.concatenate([[0], np.cumsum(np.array(per_layer, dtype=np.int64))])
        return self._at(prefix.tolist(), j)

    def before_last(self, per_layer: Sequence[int], j: int) -> Expression:
        """Return the sum up to the layer before the boundary's last."""
        return self.before([0, *per_layer[:-1]], j + 1) - self.before(per_layer, j)

    def crossing(self, per_tensor: Sequence[int], j: int) -> Expression:
        """Return sums over the tensors that cross each position, looked up at the boundary."""
        change = np.zeros(self._length + 1, dtype=np.int64)
        for tensor, figure in zip(self._tensors, per_tensor, strict=True):
            change[tensor.producer + 1] += figure
            change[tensor.users[-1] + 1] -= figure
        return self._at(np.cumsum(change).tolist(), j)

    def _at(self, table: list[int], j: int) -> cp_model.IntVar:
        """Return the entry of a table at the position of boundary j."""
        key = (tuple(table), j)
        if key not in self._looked_up:
            value = self._model.new_int_var(min(table), max(table), "")
            self._model.add_element(self.boundary[j], table, value)
            self._looked_up[key] = value
        return self._looked_up[key]

    def differences(self, stages: LayersByStage) -> list[Literal]:
        """Return literals of which one is true if some boundary is elsewhere."""
        found: list[Literal] = []
        for j, begin in enumerate(self._begins(stages)):
            if 0 < j < len(self._stages):
                differs = self._model.new_bool_var("")
                self._model.add(self.boundary[j] != begin).only_enforce_if(differs)
                found.append(differs)
        return found

    def hints(self, stages: LayersByStage) -> Iterator[tuple[cp_model.IntVar, int]]:
        """Yield the boundaries."""
        return zip(self.boundary, self._begins(stages), strict=True)

    def _begins(self, stages: LayersByStage) -> list[int]:
        edges = [0]
        for layers in stages:
            edges.append(edges[-1] + len(layers))
        return edges + [self._length] * (len(self.boundary) - len(edges))

    def chosen(self, values: Values) -> list[tuple[int, ...]]:
        """Return the intervals between boundaries."""
        edges = [values.value(boundary) for boundary in self.boundary]
        return [tuple(range(edges[j], edges[j + 1])) for j in self._stages]
