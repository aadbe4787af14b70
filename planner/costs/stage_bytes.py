"""What stages hold and hand on, of all stages in one pass over layers and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from planner.artifacts.graph_record import Boundary
from planner.artifacts.layer_graph import LayerGraph
from planner.costs.workspace import split_workspace_bytes, workspace_bytes


class StageLayers(Protocol):
    """What is asked of a stage here."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of its layers."""

    @property
    def recompute(self) -> tuple[str, ...]:
        """Of these, the ones that run again in the backward."""


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage for one microbatch.

    Attributes:
        workspace: what stands beside whole stashes while layers run: gradients, temporaries, and
            what a recomputed layer makes again; see :func:`workspace_bytes`.
        split_workspace: the same while an input gradient runs apart, no less.
        stash: kept from forward until backward, the received input included; a recomputed layer
            keeps only its input.
        weight_stash: kept from a separate input gradient until the weight gradient; a recomputed
            layer has run again by then.
        input, output: activations received from and sent to the neighbours.
        input_gradient, output_gradient: gradients sent back and received.
    """

    workspace: int
    split_workspace: int
    stash: int
    weight_stash: int
    input: int
    output: int
    input_gradient: int
    output_gradient: int


def stage_bytes(graph: LayerGraph, stages: Sequence[StageLayers]) -> list[StageBytes]:
    """The figures of every stage.

    Args:
        graph: the layers.
        stages: in pipeline order; every layer in one at most, no edge backwards.
    """
    table = _Table(graph, stages)
    for tensor in graph.record.boundaries:
        table.add(tensor)
    return table.rows()


class _Table:
    """Sums by stage; what crosses a cut is added where it is made and taken off at its last use."""

    def __init__(self, graph: LayerGraph, stages: Sequence[StageLayers]) -> None:
        count = len(stages)
        self._stage_of = {name: j for j, stage in enumerate(stages) for name in stage.layers}
        self._rerun = {name for s in stages for name in set(s.recompute).intersection(s.layers)}
        self._crossing = [0] * (count + 1)
        self._gradients = [0] * (count + 1)
        # Received tensors that a layer of the stage keeps in its own stash anyway.
        self._saved = [0] * (count + 1)
        self._kept = [
            sum(graph.layers[name].stash_bytes for name in s.layers if name not in self._rerun)
            for s in stages
        ]
        layers = [self._held(graph, stage.layers) for stage in stages]
        self._workspace = [workspace_bytes((peak, kept) for peak, kept, _ in s) for s in layers]
        self._split = [split_workspace_bytes(stage) for stage in layers]
        self._kept_for_weights = [
            sum(graph.layers[name].kept_for_weights_bytes for name in s.layers) for s in stages
        ]

    def _held(self, graph: LayerGraph, names: Sequence[str]) -> list[tuple[int, int, int]]:
        """Of each layer: its peak, what it keeps, and what weight gradients keep."""
        peaks, inputs = graph.peak_bytes, graph.saved_input_bytes
        layers = [graph.layers[name] for name in names]
        return [
            (
                peaks[row.name],
                inputs[row.name] if row.name in self._rerun else row.stash_bytes,
                row.kept_for_weights_bytes,
            )
            for row in layers
        ]

    def add(self, tensor: Boundary) -> None:
        """Count a tensor in the stages that it concerns; layers in no stage come behind all."""
        nowhere = len(self._kept)
        first = self._stage_of.get(tensor.producer, nowhere)
        last = max(self._stage_of.get(user, nowhere) for user in tensor.users)
        saver = self._keeper(tensor)
        if first < last:
            self._pass_on(tensor, first, last)
            if saver is not None and first < saver <= last:
                self._saved[saver] += tensor.bytes
        # A tensor of its own that a stage starts again from; a received one is kept anyway.
        again = {self._stage_of[user] for user in tensor.users if user in self._rerun}
        for stage in again:
            if stage <= first and stage != saver:
                self._kept[stage] += tensor.bytes

    def _keeper(self, tensor: Boundary) -> int | None:
        """The stage that holds the tensor in the stash of one of its layers."""
        if tensor.saved_by is None or tensor.saved_by in self._rerun:
            return None
        return self._stage_of.get(tensor.saved_by)

    def _pass_on(self, tensor: Boundary, first: int, last: int) -> None:
        gradient = tensor.bytes if tensor.requires_grad else 0
        self._crossing[first] += tensor.bytes
        self._crossing[last] -= tensor.bytes
        self._gradients[first] += gradient
        self._gradients[last] -= gradient

    def rows(self) -> list[StageBytes]:
        """The figures of every stage."""
        outputs, gradients = (list(accumulate(x)) for x in (self._crossing, self._gradients))
        inputs, back = [0, *outputs], [0, *gradients]
        return [
            StageBytes(
                workspace=self._workspace[j],
                split_workspace=max(self._workspace[j], self._split[j]),
                stash=self._kept[j] + inputs[j] - self._saved[j],
                weight_stash=self._kept_for_weights[j] + inputs[j] - self._saved[j],
                input=inputs[j],
                output=outputs[j],
                input_gradient=back[j],
                output_gradient=gradients[j],
            )
            for j in range(len(self._kept))
        ]
