"""Memory of stages and bytes at their boundaries, in one pass over layers and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from planner.model.graph_record import Boundary, Layer
from planner.model.layer_graph import LayerGraph


def workspace_bytes(layers: Iterable[tuple[int, int]]) -> int:
    """Return the most that a stage holds besides parameters and whole stashes, at any time.

    While a layer runs, the stage holds that layer's peak and what the layers before it keep. Of the
    running microbatch, what this layer and later ones keep is either part of the peak, gone, or not
    yet produced; it is counted with the stashes and subtracted here.

    Args:
        layers: of the stage, in executable order: peak bytes, and bytes kept from forward until
            backward.
    """
    most = 0
    for peak_bytes, kept_bytes in layers:
        most = max(most, peak_bytes) - kept_bytes
    return max(most, 0)


def split_workspace_bytes(layers: Iterable[tuple[int, int, int]]) -> int:
    """Return the same while input gradients run without the weight gradients.

    What weight gradients of later layers need is not gone then; and where it is more than the layer
    kept, it is produced in its input gradient.

    Args:
        layers: of the stage: peak bytes, bytes kept from forward until backward, and bytes kept
            from input gradient until weight gradient.
    """
    most = 0
    for peak_bytes, kept_bytes, late_bytes in layers:
        more_bytes = late_bytes - kept_bytes
        most = max(most + more_bytes, peak_bytes - kept_bytes + max(more_bytes, 0))
    return max(most, 0)


class StageLayers(Protocol):
    """The fields of a stage that are needed here."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of its layers."""

    @property
    def recompute(self) -> tuple[str, ...]:
        """Those of them that run again in the backward."""

    @property
    def offload(self) -> tuple[str, ...]:
        """Those of them whose stash goes to the host between forward and backward."""


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage for one microbatch.

    Attributes:
        workspace_bytes: held in addition to whole stashes while layers run: gradients, temporaries,
            and recomputed values; see :func:`workspace_bytes`.
        split_workspace_bytes: the same while a split input gradient runs; at least as much.
        stash_bytes: kept from forward until backward, including the received input; a recomputed
            layer keeps only its input.
        weight_stash_bytes: kept from a split input gradient until the weight gradient; a recomputed
            layer has run again by then.
        input_bytes, output_bytes: activations received from and sent to the neighbours.
        input_gradient_bytes, output_gradient_bytes: gradients sent back and received.
        sent_bytes, returned_bytes: activations and gradients sent, as many as the neighbour
            receives, in the mean over lengths of microbatches; all other figures are of the
            longest.
        gathered_bytes, returned_gathered_bytes: of these, what is sent in parts, which a
            tensor-parallel group gathers once it has received them.
        offload_bytes: of the stash, what is copied to the host after the forward and back before
            the backward.
    """

    workspace_bytes: int
    split_workspace_bytes: int
    stash_bytes: int
    weight_stash_bytes: int
    input_bytes: int
    output_bytes: int
    input_gradient_bytes: int
    output_gradient_bytes: int
    sent_bytes: int
    returned_bytes: int
    gathered_bytes: int = 0
    returned_gathered_bytes: int = 0
    offload_bytes: int = 0


def bytes_of_stages(
    graphs: Sequence[LayerGraph],
    stages: Sequence[StageLayers],
    divided: Sequence[Mapping[str, int]] = (),
) -> list[StageBytes]:
    """Return the figures of every stage where each may have the tensors and layers of its own type.

    A message has the bytes that its receiver holds of it: each member of a tensor-parallel group
    receives what it needs from one of the group before, whatever the sizes of the two.

    Args:
        graphs: of each stage, see :meth:`LayerGraph.on`.
        stages: in pipeline order; every layer in one at most, no edge backwards.
        divided: see :func:`stage_bytes`.
    """
    distinct = {id(graph): graph for graph in graphs}
    found = {key: stage_bytes(graph, stages, divided) for key, graph in distinct.items()}
    rows = [found[id(graph)] for graph in graphs]
    if len(found) <= 1:
        return rows[0] if rows else []
    last = len(stages) - 1
    return [
        replace(
            row[j],
            sent_bytes=rows[min(j + 1, last)][j].sent_bytes,
            returned_bytes=rows[max(j - 1, 0)][j].returned_bytes,
        )
        for j, row in enumerate(rows)
    ]


def stage_bytes(
    graph: LayerGraph,
    stages: Sequence[StageLayers],
    divided: Sequence[Mapping[str, int]] = (),
) -> list[StageBytes]:
    """Return the figures of every stage.

    Args:
        graph: the layers.
        stages: in pipeline order; every layer in one at most, no edge backwards.
        divided: of each stage, the bytes of weights that are put together around its layers while
            they run, and of their gradients, by layer
            (:func:`planner.costs.sharding.divided_bytes`).
    """
    nothing: list[Mapping[str, int]] = [{} for _ in stages]
    table = _Table(graph, stages, divided or nothing)
    for tensor in graph.record.boundaries:
        table.add(tensor)
    return table.rows()


def _without_batch(layer: Layer) -> int:
    """Return a layer's stash less what it reads of the batch, which others may hold too."""
    return max(0, layer.stash_bytes - layer.batch_bytes)


class _Table:
    """Sums by stage; a tensor is added where it is produced and subtracted at its last use."""

    def __init__(
        self,
        graph: LayerGraph,
        stages: Sequence[StageLayers],
        divided: Sequence[Mapping[str, int]],
    ) -> None:
        count = len(stages)
        self._stage_of = {name: j for j, stage in enumerate(stages) for name in stage.layers}
        self._rerun = {name for s in stages for name in set(s.recompute).intersection(s.layers)}
        self._crossing = [0] * (count + 1)
        self._gradients = [0] * (count + 1)
        self._moved = [0] * (count + 1)
        self._moved_back = [0] * (count + 1)
        self._gathered = [0] * (count + 1)
        self._gathered_back = [0] * (count + 1)
        # Received tensors that a layer of the stage keeps in its own stash anyway.
        self._saved = [0] * (count + 1)
        self._kept = [
            sum(graph.layers[name].stash_bytes for name in s.layers if name not in self._rerun)
            for s in stages
        ]
        rows = zip(stages, divided, strict=True)
        layers = [self._held(graph, stage.layers, more) for stage, more in rows]
        self._workspace = [workspace_bytes((peak, kept) for peak, kept, _ in s) for s in layers]
        self._split = [split_workspace_bytes(stage) for stage in layers]
        self._offload = [{*stage.offload} for stage in stages]
        self._offloaded = [
            sum(_without_batch(graph.layers[name]) for name in names) for names in self._offload
        ]
        self._kept_for_weights = [
            sum(graph.layers[name].kept_for_weights_bytes for name in s.layers) for s in stages
        ]

    def _held(
        self, graph: LayerGraph, names: Sequence[str], divided: Mapping[str, int]
    ) -> list[tuple[int, int, int]]:
        """Return each layer's peak, what it keeps, and what its weight gradient keeps.

        Layers are in the order of the graph. A layer whose weights are put together holds all of
        them, and in its backward all of their gradients.
        """
        peaks, inputs = graph.peak_bytes, graph.saved_input_bytes
        layers = [graph.layers[name] for name in graph.in_order(names)]
        return [
            (
                peaks[row.name] + divided.get(row.name, 0),
                inputs[row.name] if row.name in self._rerun else row.stash_bytes,
                row.kept_for_weights_bytes,
            )
            for row in layers
        ]

    def add(self, tensor: Boundary) -> None:
        """Count a tensor in its stages; layers in no stage come after all of them."""
        nowhere = len(self._kept)
        first = self._stage_of.get(tensor.producer, nowhere)
        last = max(self._stage_of.get(user, nowhere) for user in tensor.users)
        saver = self._keeper(tensor)
        if first < last:
            self._pass_on(tensor, first, last)
            if saver is not None and first < saver <= last:
                self._saved[saver] += tensor.bytes
        self._keep_if_shared(tensor)
        # A tensor produced by the stage that it recomputes from; a received one is kept anyway.
        again = {self._stage_of[user] for user in tensor.users if user in self._rerun}
        for stage in again:
            if stage <= first and stage != saver:
                self._kept[stage] += tensor.bytes

    def _keep_if_shared(self, tensor: Boundary) -> None:
        """Take a tensor off what its saver's stage offloads if others of the stage hold it too.

        These are the stage before, which sent it, and layers that make or use it and do not
        offload.
        """
        saver = self._stage_of.get(tensor.saved_by or "")
        if saver is None or tensor.saved_by not in self._offload[saver]:
            return
        inside = [name for name in tensor.users if self._stage_of.get(name) == saver]
        if not self._offload[saver].issuperset((tensor.producer, *inside)):
            self._offloaded[saver] -= tensor.bytes

    def _keeper(self, tensor: Boundary) -> int | None:
        """Return the stage that holds the tensor in the stash of one of its layers."""
        if tensor.saved_by is None or tensor.saved_by in self._rerun:
            return None
        return self._stage_of.get(tensor.saved_by)

    def _pass_on(self, tensor: Boundary, first: int, last: int) -> None:
        sent = tensor.message_bytes
        gathered = sent if tensor.parts > 1 else 0
        rows = [(self._crossing, tensor.bytes), (self._moved, sent), (self._gathered, gathered)]
        if tensor.requires_grad:
            rows += [(self._gradients, tensor.bytes), (self._moved_back, sent)]
            rows.append((self._gathered_back, gathered))
        for sums, bytes_ in rows:
            sums[first] += bytes_
            sums[last] -= bytes_

    def rows(self) -> list[StageBytes]:
        """Return the figures of every stage."""
        outputs, gradients = (list(accumulate(x)) for x in (self._crossing, self._gradients))
        inputs, back = [0, *outputs], [0, *gradients]
        moved, moved_back = (list(accumulate(x)) for x in (self._moved, self._moved_back))
        gathered = list(accumulate(self._gathered))
        gathered_back = [0, *accumulate(self._gathered_back)]
        return [
            StageBytes(
                workspace_bytes=self._workspace[j],
                split_workspace_bytes=max(self._workspace[j], self._split[j]),
                stash_bytes=self._kept[j] + inputs[j] - self._saved[j],
                weight_stash_bytes=self._kept_for_weights[j] + inputs[j] - self._saved[j],
                input_bytes=inputs[j],
                output_bytes=outputs[j],
                input_gradient_bytes=back[j],
                output_gradient_bytes=gradients[j],
                sent_bytes=moved[j],
                returned_bytes=[0, *moved_back][j],
                gathered_bytes=gathered[j],
                returned_gathered_bytes=gathered_back[j],
                offload_bytes=max(0, self._offloaded[j]),
            )
            for j in range(len(self._kept))
        ]
