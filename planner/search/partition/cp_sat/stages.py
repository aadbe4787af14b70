"""What the model asks of the decision which stage each layer is in, whatever its form.

Stages as intervals of the chain: the positions of their boundaries.

The "position" form: a boundary is an integer, sums over layers are looked up by position.

Stages as any sets of layers that no edge leaves backwards: a monotone stage index per layer.

Order-encoded: a literal for each layer and stage, "in this stage or an earlier one". Needed where
branches of the graph make every order of the layers bad; larger than the chain's form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

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


class LayerStages(Protocol):
    """Every layer in one stage, no edge backwards, existing stages first, none of them empty."""

    @property
    def active(self) -> Sequence[cp_model.IntVar]:
        """Whether each stage exists."""
        ...

    def done_by(self, j: int, layer: int) -> Literal:
        """Return the literal that a layer is in stage j or an earlier one; j may be -1 or last."""
        ...

    def before(self, per_layer: Sequence[int], j: int) -> Expression:
        """Return the sum of a figure over the layers of all stages before stage j."""
        ...

    def before_last(self, per_layer: Sequence[int], j: int) -> Expression:
        """Return at least the sum of a figure over the layers of stage j but the last."""
        ...

    def crossing(self, per_tensor: Sequence[int], j: int) -> Expression:
        """Return a lower bound on the sum over the tensors that cross the cut before stage j."""
        ...

    def latest(self, layers: Sequence[int]) -> Sequence[int]:
        """Return those of some layers of which one is in the latest stage of them all."""
        ...

    def differences(self, stages: LayersByStage) -> list[Literal]:
        """Return literals that imply these are not the stages; if they are not, one can be true."""
        ...

    def hints(self, stages: LayersByStage) -> Iterator[tuple[cp_model.IntVar, int]]:
        """Yield the decisions' values for these stages."""
        ...

    def chosen(self, values: Values) -> list[tuple[int, ...]]:
        """Return the layers of each stage of a solution."""
        ...


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

    def latest(self, layers: Sequence[int]) -> Sequence[int]:
        """Return the last one."""
        return layers[-1:]

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


class GraphStages:
    """A stage index for each layer; see :class:`ChainCuts`."""

    def __init__(
        self,
        model: cp_model.CpModel,
        length: int,
        tensors: Sequence[CutTensor],
        edges: Sequence[tuple[int, int]],
        max_stages: int,
    ) -> None:
        self._model = model
        self._length = length
        self._tensors = tensors
        self._stages = range(max_stages)
        self._crosses: dict[tuple[int, int], cp_model.IntVar] = {}
        self._sums: dict[tuple[tuple[int, ...], int, bool], cp_model.IntVar] = {}
        self.active = [model.new_bool_var(f"active {j}") for j in self._stages]
        self._done = [
            [model.new_bool_var(f"layer {layer} by stage {j}") for layer in range(length)]
            for j in range(max_stages - 1)
        ]
        self._order_layers(edges)
        self._fill_stages()

    def _order_layers(self, edges: Sequence[tuple[int, int]]) -> None:
        model = self._model
        for j in range(1, len(self._done)):
            for layer in range(self._length):
                model.add_implication(self._done[j - 1][layer], self._done[j][layer])
        for done in self._done:
            for source, target in edges:
                model.add_implication(done[target], done[source])

    def _fill_stages(self) -> None:
        """Let stages that exist come first, each with a layer not done by the one before."""
        model, layers = self._model, range(self._length)
        model.add(self.active[0] == 1)
        for j in self._stages:
            if j:
                model.add_implication(self.active[j], self.active[j - 1])
                # What a stage that does not exist would hold is done already.
                for layer in layers:
                    model.add_bool_or([self.active[j], self.done_by(j - 1, layer)])
            inside = []
            for layer in layers:
                new = model.new_bool_var("")
                model.add_implication(new, self.done_by(j, layer))
                model.add_implication(new, ~self.done_by(j - 1, layer))
                inside.append(new)
            model.add_bool_or([~self.active[j], *inside])

    def done_by(self, j: int, layer: int) -> Literal:
        """Return one of the decisions, or a constant beyond the first and the last stage."""
        if 0 <= j < len(self._done):
            return self._done[j][layer]
        return self._model.new_constant(int(j >= 0))

    def before(self, per_layer: Sequence[int], j: int) -> Expression:
        """Return the sum over the layers done by the stage before."""
        if j in (0, len(self._stages)):
            return sum(per_layer) if j else 0
        terms = [figure * self.done_by(j - 1, layer) for layer, figure in enumerate(per_layer)]
        return self._sum((tuple(per_layer), j, False), terms, sum(per_layer))

    def before_last(self, per_layer: Sequence[int], j: int) -> Expression:
        """Return the sum over all layers: any of them may be the last."""
        return self.before(per_layer, j + 1) - self.before(per_layer, j)

    def crossing(self, per_tensor: Sequence[int], j: int) -> Expression:
        """Return the sum over the tensors made before stage j and used in it or later."""
        if j in (0, len(self._stages)):
            return 0
        terms = [f * self._crossing_one(n, j) for n, f in enumerate(per_tensor) if f]
        return self._sum((tuple(per_tensor), j, True), terms, sum(per_tensor))

    def _sum(
        self, key: tuple[tuple[int, ...], int, bool], terms: list[Expression], most: int
    ) -> cp_model.IntVar:
        if key not in self._sums:
            value = self._model.new_int_var(0, most, "")
            self._model.add(value == sum(terms))
            self._sums[key] = value
        return self._sums[key]

    def _crossing_one(self, number: int, j: int) -> cp_model.IntVar:
        """Return whether a tensor crosses the cut before stage j."""
        if (number, j) not in self._crosses:
            literal = self._model.new_bool_var("")
            made = self.done_by(j - 1, self._tensors[number].producer)
            used = [self.done_by(j - 1, user) for user in self._tensors[number].users]
            for user in used:
                self._model.add_bool_or([literal, ~made, user])
            self._model.add_implication(literal, made)
            self._model.add_bool_or([~literal, *(~user for user in used)])
            self._crosses[number, j] = literal
        return self._crosses[number, j]

    def latest(self, layers: Sequence[int]) -> Sequence[int]:
        """Return any of them."""
        return layers

    def differences(self, stages: LayersByStage) -> list[Literal]:
        """Return literals of which one is true if some layer is done by another stage."""
        return [~literal if value else literal for literal, value in self.hints(stages)]

    def hints(self, stages: LayersByStage) -> Iterator[tuple[cp_model.IntVar, int]]:
        """Yield which layers are done by which stage."""
        done: set[int] = set()
        for j, literals in enumerate(self._done):
            done.update(stages[j] if j < len(stages) else ())
            for layer, literal in enumerate(literals):
                yield literal, int(layer in done)

    def chosen(self, values: Values) -> list[tuple[int, ...]]:
        """Return the layers that each stage adds."""
        found, before = [], set[int]()
        for j in self._stages:
            done = {x for x in range(self._length) if values.boolean_value(self.done_by(j, x))}
            found.append(tuple(sorted(done - before)))
            before = done
        return found
