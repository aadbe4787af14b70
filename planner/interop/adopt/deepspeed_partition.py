"""How DeepSpeed deals out a list of layers to pipeline stages.

As ``PipelineModule._partition_layers`` of DeepSpeed 0.19.8 does (``runtime/pipe/module.py``, with
``runtime/utils.py``), over the list that Megatron-DeepSpeed makes (``GPTModelPipe`` in
``megatron/model/gpt_model.py``): a conversion of types, the embedding, a transposition, the blocks,
a transposition, the norm, the head, and with 16 bits a conversion again. The fork of
github.com/deepspeedai has no transpositions, and always partitions by ``type:transformer``, so that
these do not matter there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from planner.errors import PipeplanError
from planner.interop.adopt.division import Division
from planner.model.blocks import BlockStack, block_stack
from planner.model.layer_graph import LayerGraph
from planner.units import plural


def uniform_parts(count: int, parts: int) -> list[int]:
    """Return where each part of equal numbers of entries begins, and the end.

    The first parts have one more where the entries are no multiple; with fewer entries than parts
    the last parts are empty.
    """
    each, more = divmod(count, parts)
    return [0, *accumulate(each + (part < more) for part in range(parts))]


def balanced_parts(weights: Sequence[int], parts: int) -> list[int]:
    """Return where each part of about equal weight begins, and the end.

    DeepSpeed extends one partition of each prefix by a part: the one with the smallest difference
    between heaviest and lightest part, of equal ones that with the latest cut. That is not always
    the smallest difference of all.
    """
    count = len(weights)
    if count <= parts:
        return uniform_parts(count, parts)
    until = [0, *accumulate(weights)]
    best: list[tuple[int, int] | None] = [(0, until[-1] + 1), *[None] * count]
    cuts: list[list[int]] = []
    for _ in range(parts):
        extended: list[tuple[int, int] | None] = [None] * (count + 1)
        cut_of = [0] * (count + 1)
        for end in range(1, count + 1):
            for cut in range(end):
                before = best[cut]
                if before is None:
                    continue
                part = until[end] - until[cut]
                found = max(before[0], part), min(before[1], part)
                known = extended[end]
                if known is None or found[0] - found[1] <= known[0] - known[1]:
                    extended[end], cut_of[end] = found, cut
        best = extended
        cuts.append(cut_of)
    bounds = [count]
    for cut_of in reversed(cuts):
        bounds.append(cut_of[bounds[-1]])
    return bounds[::-1]


@dataclass(frozen=True)
class DeepSpeedPartition:
    """A method of DeepSpeed for Megatron-DeepSpeed's list of layers.

    Attributes:
        source: the file that says so, for messages.
        method: ``uniform``, ``parameters`` or ``type:NAME|NAME``.
        stages: pipeline stages.
        is_tied: whether the head is the embedding once more.
        converts: whether a conversion to float32 ends the list.
    """

    source: str
    method: str
    stages: int
    is_tied: bool
    converts: bool

    def divide(self, graph: LayerGraph) -> Division:
        """Return the layers of every stage of a model.

        Raises:
            PipeplanError: if the method is unknown, finds no layer, or leaves a stage without any.
        """
        entries = list(self._entries(graph, block_stack(graph)))
        bounds = self._bounds(entries)
        stages = [
            tuple(layer for entry in entries[begin:end] for layer in entry.layers)
            for begin, end in pairwise(bounds)
        ]
        empty = [number for number, layers in enumerate(stages) if not layers]
        if empty:
            raise PipeplanError(
                f"{self.source}: --pp-partition-method {self.method}: of {len(entries)} entries "
                f"DeepSpeed would leave stage {empty[0]} of {len(stages)} without a layer, and "
                "train nothing there; use fewer pipeline ranks, or type:transformer"
            )
        return tuple(stages)

    def _bounds(self, entries: Sequence[_Entry]) -> list[int]:
        method = self.method.lower()
        if method == "uniform":
            return uniform_parts(len(entries), self.stages)
        if method == "parameters":
            return balanced_parts([entry.elements for entry in entries], self.stages)
        kind, _, names = method.partition(":")
        wanted = names.split("|")
        if kind != "type" or not all(name.isidentifier() for name in wanted):
            raise PipeplanError(
                f"{self.source}: --pp-partition-method {self.method}: expected uniform, parameters "
                "or type:NAME, such as type:transformer or 'type:transformer|embedding'"
            )
        weights = [int(any(name in entry.kind.lower() for name in wanted)) for entry in entries]
        if sum(weights) < self.stages:
            raise PipeplanError(
                f"{self.source}: --pp-partition-method {self.method}: "
                f"{plural(sum(weights), 'layer')} of that type for {self.stages} pipeline ranks; "
                "use fewer ranks or another method"
            )
        return balanced_parts(weights, self.stages)

    def _entries(self, graph: LayerGraph, stack: BlockStack) -> Iterator[_Entry]:
        """Yield the entries of the list."""
        norm, head = _norm_and_head(graph, stack.after)
        embedding = _elements(graph, stack.before)
        yield _Entry("function")
        yield _Entry("EmbeddingPipe", stack.before, embedding)
        yield _Entry("function")
        for block in stack.blocks:
            elements = _elements(graph, block.layers)
            yield _Entry("ParallelTransformerLayerPipe", block.layers, elements)
        yield _Entry("function")
        if norm:
            yield _Entry("LayerNorm", norm, _elements(graph, norm))
        kind = "EmbeddingPipe" if self.is_tied else "LMHeadPipe"
        yield _Entry(kind, head, embedding if self.is_tied else _elements(graph, head))
        if self.converts:
            yield _Entry("function")


@dataclass(frozen=True)
class _Entry:
    """An entry of the list: its class, the layers of the model that it holds, its parameters."""

    kind: str
    layers: tuple[str, ...] = ()
    elements: int = 0


def _elements(graph: LayerGraph, layers: Sequence[str]) -> int:
    return sum(row.elements for row in graph.parameters_of(layers) if row.trainable)


def _norm_and_head(
    graph: LayerGraph, after: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the layers behind the blocks before the last one with parameters, and the rest."""
    held = [place for place, name in enumerate(after) if graph.layers[name].parameters]
    first = held[-1] if held else 0
    return after[:first], after[first:]
