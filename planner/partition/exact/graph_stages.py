"""Stages as any sets of layers that no edge leaves backwards: a monotone stage index per layer.

Order-encoded: a literal for each layer and stage, "in this stage or an earlier one". Needed where
branches of the graph make every order of the layers bad; larger than the chain's form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortools.sat.python import cp_model

from planner.partition.exact.layer_stages import Expression, LayersByStage, Literal, Values
from planner.partition.exact.tensors import CutTensor


class GraphStages:
    """A stage index for each layer; see :class:`planner.partition.exact.cuts.ChainCuts`."""

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
        """Existing stages first; each has a layer that is not done by the one before."""
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
        """One of the decisions, or a constant beyond the first and the last stage."""
        if 0 <= j < len(self._done):
            return self._done[j][layer]
        return self._model.new_constant(int(j >= 0))

    def before(self, per_layer: Sequence[int], j: int) -> Expression:
        """The sum over the layers done by the stage before."""
        if j in (0, len(self._stages)):
            return sum(per_layer) if j else 0
        terms = [figure * self.done_by(j - 1, layer) for layer, figure in enumerate(per_layer)]
        return self._sum((tuple(per_layer), j, False), terms, sum(per_layer))

    def crossing(self, per_tensor: Sequence[int], j: int) -> Expression:
        """The sum over the tensors made before stage j and used in it or later."""
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
        """Whether a tensor crosses the cut before stage j."""
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
        """Any of them."""
        return layers

    def differences(self, stages: LayersByStage) -> list[Literal]:
        """Some layer is done by another stage."""
        return [~literal if value else literal for literal, value in self.hints(stages)]

    def hints(self, stages: LayersByStage) -> Iterator[tuple[cp_model.IntVar, int]]:
        """Which layers are done by which stage."""
        done: set[int] = set()
        for j, literals in enumerate(self._done):
            done.update(stages[j] if j < len(stages) else ())
            for layer, literal in enumerate(literals):
                yield literal, int(layer in done)

    def chosen(self, values: Values) -> list[tuple[int, ...]]:
        """The layers that each stage adds."""
        found, before = [], set[int]()
        for j in self._stages:
            done = {x for x in range(self._length) if values.boolean_value(self.done_by(j, x))}
            found.append(tuple(sorted(done - before)))
            before = done
        return found
