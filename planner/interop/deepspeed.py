"""DeepSpeed: its partitions of layers as stages of plans, and plans as a PipelineModule.

Checked against DeepSpeed 0.19.8. Partitions are those of ``PipelineModule._partition_layers``
(``runtime/pipe/module.py``, with ``runtime/utils.py``) over the list that Megatron-DeepSpeed makes
(``GPTModelPipe`` in ``megatron/model/gpt_model.py``): a conversion of types, the embedding, a
transposition, the blocks, a transposition, the norm, the head, and with 16 bits a conversion again.
The fork of github.com/deepspeedai has no transpositions, and always partitions by
``type:transformer``, so that these do not matter there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from planner.errors import PipeplanError
from planner.interop.division import Division
from planner.model.blocks import block_stack
from planner.model.layer_graph import LayerGraph
from planner.units import plural

PARTITION_METHOD = "pp-partition-method"
"""The argument of Megatron-DeepSpeed that names a method."""


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
    count, until = len(weights), [0, *accumulate(weights)]
    if count <= parts:
        return uniform_parts(count, parts)
    # The heaviest and the lightest part of the partition of each prefix.
    best: dict[int, tuple[int, int]] = {0: (0, until[-1] + 1)}
    cuts: list[dict[int, int]] = []
    for _ in range(parts):
        extended: dict[int, tuple[int, int]] = {}
        cut_of: dict[int, int] = {}
        for end in range(1, count + 1):
            for cut, (heaviest, lightest) in best.items():
                part = until[end] - until[cut]
                found = max(heaviest, part), min(lightest, part)
                known = extended.get(end)
                if cut < end and (known is None or found[0] - found[1] <= known[0] - known[1]):
                    extended[end], cut_of[end] = found, cut
        best = extended
        cuts.append(cut_of)
    bounds = [count]
    for cut_of in reversed(cuts):
        bounds.append(cut_of[bounds[-1]])
    return bounds[::-1]


class _Entry(NamedTuple):
    """An entry of the list: its class, the layers of the model that it holds, its parameters."""

    kind: str
    layers: tuple[str, ...] = ()
    elements: int = 0


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
        entries = list(self._entries(graph))
        stages = tuple(
            tuple(layer for entry in entries[begin:end] for layer in entry.layers)
            for begin, end in pairwise(self._bounds(entries))
        )
        if empty := [number for number, layers in enumerate(stages) if not layers]:
            raise self._wrong(
                f"of {len(entries)} entries DeepSpeed would leave stage {empty[0]} of "
                f"{len(stages)} without a layer, and train nothing there; use fewer pipeline "
                "ranks, or type:transformer"
            )
        return stages

    def _bounds(self, entries: Sequence[_Entry]) -> list[int]:
        method = self.method.lower()
        if method == "uniform":
            return uniform_parts(len(entries), self.stages)
        if method == "parameters":
            return balanced_parts([entry.elements for entry in entries], self.stages)
        kind, _, names = method.partition(":")
        wanted = names.split("|")
        if kind != "type" or not all(name.isidentifier() for name in wanted):
            raise self._wrong(
                "expected uniform, parameters or type:NAME, such as type:transformer or "
                "'type:transformer|embedding'"
            )
        weights = [int(any(name in entry.kind.lower() for name in wanted)) for entry in entries]
        if sum(weights) < self.stages:
            raise self._wrong(
                f"{plural(sum(weights), 'layer')} of that type for {self.stages} pipeline ranks; "
                "use fewer ranks or another method"
            )
        return balanced_parts(weights, self.stages)

    def _wrong(self, problem: str) -> PipeplanError:
        return PipeplanError(f"{self.source}: --{PARTITION_METHOD} {self.method}: {problem}")

    def _entries(self, graph: LayerGraph) -> Iterator[_Entry]:
        """Yield the entries; the head is the last layer with parameters and what follows it."""

        def entry(kind: str, layers: tuple[str, ...]) -> _Entry:
            held = graph.parameters_of(layers)
            return _Entry(kind, layers, sum(row.elements for row in held if row.trainable))

        stack = block_stack(graph)
        held = [place for place, name in enumerate(stack.after) if graph.layers[name].parameters]
        norm, head = stack.after[: max(held, default=0)], stack.after[max(held, default=0) :]
        embedding = entry("EmbeddingPipe", stack.before)
        yield _Entry("function")
        yield embedding
        yield _Entry("function")
        yield from (entry("ParallelTransformerLayerPipe", block.layers) for block in stack.blocks)
        yield _Entry("function")
        if norm:
            yield entry("LayerNorm", norm)
        yield embedding._replace(layers=head) if self.is_tied else entry("LMHeadPipe", head)
        if self.converts:
            yield _Entry("function")
