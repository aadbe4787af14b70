"""The layers that run again in the backward, and what a stage then keeps of a microbatch.

The "member" form: a literal for each layer and stage. What is kept follows
planner.costs.placement exactly, up to rounding down; on graphs with very many tensors the smallest
count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortools.sat.python import cp_model

from planner.search.partition.cp_sat.decisions import Decisions
from planner.search.partition.cp_sat.stages import Expression, Literal
from planner.search.partition.cp_sat.tensors import ByteUnit, CutTensor

MOST_KEPT = 20_000
"""Literals of tensors that a stage keeps besides its layers' stashes."""


class RecomputeDecisions:
    """The layers that run again.

    Attributes:
        again: ``again[j, layer]``: stage j has the layer, by position, and recomputes it; for
            layers that recomputation can save anything of.
    """

    def __init__(self, decisions: Decisions) -> None:
        self._d = decisions
        self.again: dict[tuple[int, int], cp_model.IntVar] = {}
        stash = [layer.stash_bytes for layer in decisions.chain.problem.graph.record.layers]
        inputs = list(decisions.chain.problem.graph.saved_input_bytes.values())
        for layer in range(decisions.chain.length):
            if not decisions.job.recompute or stash[layer] <= inputs[layer]:
                continue
            for j in decisions.stages:
                literal = decisions.model.new_bool_var(f"stage {j} recomputes layer {layer}")
                decisions.model.add_implication(literal, decisions.holds(j, layer))
                self.again[j, layer] = literal

    def sums(self, per_layer: Sequence[int]) -> list[Expression]:
        """Return the sum of a figure over the recomputed layers of each stage."""
        return [
            sum(per_layer[layer] * literal for (i, layer), literal in self.again.items() if i == j)
            for j in self._d.stages
        ]


class StageStashes:
    """What each stage keeps of a microbatch from its forward to its backward, at least.

    Attributes:
        stash: by stage, in units.
    """

    def __init__(
        self, decisions: Decisions, recomputation: RecomputeDecisions, unit: ByteUnit
    ) -> None:
        self._d = decisions
        self._model = decisions.model
        self._again = recomputation.again
        graph = decisions.chain.problem.graph
        layers = unit.floor([layer.stash_bytes for layer in graph.record.layers])
        inputs = unit.floor(list(graph.saved_input_bytes.values()))
        saving = [max(0, a - b) for a, b in zip(layers, inputs, strict=True)]
        most = sum(layers) + sum(unit.floor([t.bytes for t in decisions.tensors]))
        besides = self._kept_besides(unit)
        self.stash: list[cp_model.IntVar] = []
        whole, saved = decisions.sums(layers), recomputation.sums(saving)
        for j in decisions.stages:
            stash = self._model.new_int_var(0, most, f"stash {j}")
            self._model.add(stash >= whole[j] - saved[j] + sum(besides[j]))
            self.stash.append(stash)

    def _kept_besides(self, unit: ByteUnit) -> list[list[Expression]]:
        """Return tensors that are kept on their own account, by stage, in units."""
        besides: list[list[Expression]] = [[] for _ in self._d.stages]
        tensors = [tensor for tensor in self._d.tensors if self._may_be_kept(tensor)]
        tensors.sort(key=lambda tensor: -tensor.bytes)
        for tensor in tensors[: MOST_KEPT // len(self._d.stages)]:
            for j in self._d.stages:
                reasons = list(self._reasons(tensor, j))
                if reasons and tensor.bytes >= unit.bytes:
                    kept = self._model.new_bool_var("")
                    for reason in reasons:
                        self._model.add_bool_or([kept, *(~literal for literal in reason)])
                    besides[j].append(tensor.bytes // unit.bytes * kept)
        return besides

    def _may_be_kept(self, tensor: CutTensor) -> bool:
        """No stage is between neighbours of the chain, so none keeps what it does not use."""
        besides = tensor.users == (tensor.producer + 1,)
        return not (besides and tensor.saver == tensor.producer + 1)

    def _reasons(self, tensor: CutTensor, j: int) -> Iterator[list[Literal]]:
        """Conditions each of which makes stage j keep a tensor that no layer's stash contains.

        It was received, or is made here for a layer that runs again; and its saver is elsewhere,
        or runs again. Of a saver that uses the tensor the latter is counted with the layer.
        """
        saver = tensor.saver
        elsewhere: list[list[Literal]] = [[]]
        if saver is not None:
            elsewhere = [[~self._d.holds(j, saver)]]
            if saver not in tensor.users and (j, saver) in self._again:
                elsewhere.append([self._again[j, saver]])
        for condition in elsewhere:
            for user in tensor.users[-1:] if j else ():
                made = self._d.layers.done_by(j - 1, tensor.producer)
                yield [made, ~self._d.layers.done_by(j - 1, user), *condition]
            for user in tensor.users:
                if user != saver and (j, user) in self._again:
                    yield [self._d.holds(j, tensor.producer), self._again[j, user], *condition]
