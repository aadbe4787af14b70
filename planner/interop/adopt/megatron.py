"""Megatron-LM's arguments as a layout of stages, groups, pipelines and microbatches.

Meanings are those of Megatron-LM d98e8a6: ``megatron/training/arguments.py`` and, for the layers of
a stage, ``get_num_layers_to_build`` of ``megatron/core/transformer/transformer_block.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.division import Division, divide
from planner.interop.adopt.layout import LayoutNames, RuntimeLayout
from planner.interop.adopt.megatron_arguments import MegatronArguments, read_arguments
from planner.interop.adopt.megatron_experts import has_whole_experts
from planner.interop.importing.megatron_layout import parse_layout, render_layout
from planner.job import Precision
from planner.model.blocks import block_stack
from planner.model.layer_graph import LayerGraph
from planner.units import plural

NAMES = LayoutNames(
    tensor="--tensor-model-parallel-size",
    pipeline="--pipeline-model-parallel-size",
    data="--replicas",
    microbatch="--micro-batch-size",
    batch="--global-batch-size",
)


def read_megatron_arguments(path: str | Path) -> RuntimeLayout:
    """Read Megatron-LM's arguments from a text file: a launch script, or the arguments alone.

    Arguments that do not divide the model, the devices or the batch are left out.

    Args:
        path: of the file, see :func:`planner.interop.adopt.megatron_arguments.read_arguments`.

    Raises:
        PipeplanError: naming every argument that is wrong, or that plans cannot express.
    """
    found = read_arguments(path)
    _refuse_inexpressible(found)
    layout = _layout(found)
    if found.problems:
        raise PipeplanError(dict.fromkeys(found.problems))
    return layout


def _refuse_inexpressible(found: MegatronArguments) -> None:
    name = "context-parallel-size"
    if (number := found.number(name)) not in (None, 1):
        found.wrong(
            name,
            f"{number}: context parallel groups are not planned; set it to 1 and use tensor "
            "parallelism, pipelines or replicas instead",
        )


def _layout(found: MegatronArguments) -> RuntimeLayout:
    degree = found.number("tensor-model-parallel-size") or 1
    size = found.number("pipeline-model-parallel-size") or 1
    samples, batch = found.number("micro-batch-size"), found.number("global-batch-size")
    return RuntimeLayout(
        source=found.source,
        divide=_Blocks.of(found, size).divide,
        names=NAMES,
        tensor_parallel=degree,
        # Megatron-LM leaves sequence parallelism off where a group is one device.
        sequence_parallel=found.has("sequence-parallel") and degree > 1,
        expert_parallel=has_whole_experts(found, degree),
        pipeline_size=size,
        is_pipeline_first=found.has("use-tp-pp-dp-mapping"),
        samples_per_microbatch=samples,
        global_batch=batch,
        share=1 if samples is not None and batch is None else None,
        recompute_blocks=_recompute_blocks(found),
        recompute_attention=_recomputes_attention(found),
        shard_optimizer=found.has("use-distributed-optimizer") or _zero_stage(found) == 1,
        overlap_reduction=found.has("overlap-grad-reduce"),
        precision=_precision(found),
        notes=tuple(_notes(found)),
    )


def _precision(found: MegatronArguments) -> Precision | None:
    if found.has("bf16") and found.has("fp16"):
        found.wrong("fp16", "--bf16 is given as well; give one of them")
    return "bfloat16" if found.has("bf16") else "float16" if found.has("fp16") else None


def _notes(found: MegatronArguments) -> Iterator[str]:
    if found.has("tp-comm-overlap"):
        yield (
            "--tp-comm-overlap: collectives inside a group are predicted as if nothing were "
            "computed meanwhile"
        )
    if found.has("overlap-param-gather"):
        yield (
            "--overlap-param-gather: parameters are gathered right after the optimizer's step "
            "here, and nothing hides that"
        )


def _recompute_blocks(found: MegatronArguments) -> int | None:
    """Return how many blocks of every stage run again; None for all."""
    granularity, method = found.word("recompute-granularity"), found.word("recompute-method")
    count = found.number("recompute-num-layers")
    if granularity not in (None, "full", "selective"):
        found.wrong("recompute-granularity", f"{shorten(granularity)}: expected full or selective")
    if found.has("checkpoint-activations"):  # Of Megatron-DeepSpeed, and of older Megatron-LM.
        if found.number("checkpoint-num-layers") not in (None, 1):
            found.wrong(
                "checkpoint-num-layers", "plans keep what every block starts from; set it to 1"
            )
        return None
    if granularity != "full":
        return 0
    if method not in ("uniform", "block") or count is None:
        found.wrong(
            "recompute-granularity",
            "full needs --recompute-method uniform or block, and --recompute-num-layers; add them",
        )
        return 0
    if method == "uniform" and count > 1:
        found.wrong(
            "recompute-num-layers",
            f"{count}: plans keep what every block starts from, not one in {count}; set it to 1",
        )
    return None if method == "uniform" else count


def _zero_stage(found: MegatronArguments) -> int:
    """Return DeepSpeed's stage of ZeRO; pipelines have 0 and 1."""
    text = found.word("zero-stage") or "0"
    if text not in ("0", "1"):
        found.wrong(
            "zero-stage",
            f"{shorten(text)}: expected 0, or 1 for an optimizer's state that pipelines share; "
            "gradients and parameters are whole in every pipeline",
        )
    return int(text == "1")


def _recomputes_attention(found: MegatronArguments) -> bool:
    """Return whether the core of attention runs again: ``core_attn``, the default module."""
    granularity = found.word("recompute-granularity")
    if found.has("recompute-activations") and granularity == "full":
        found.wrong("recompute-activations", "is selective, but --recompute-granularity is full")
    if not found.has("recompute-activations") and granularity != "selective":
        return False
    modules = (found.word("recompute-modules") or _CORE).split()
    if modules != [_CORE]:
        found.wrong(
            "recompute-modules",
            f"{shorten(' '.join(modules))}: of selective recomputation plans have {_CORE} alone, "
            f"the core of attention; set it to {_CORE}, or use --recompute-granularity full",
        )
    return True


_CORE = "core_attn"


@dataclass(frozen=True)
class _Blocks:
    """How blocks are dealt out to stages.

    Attributes:
        source: the file, for messages.
        size: pipeline ranks.
        layout: of all stages; None: by the numbers.
        blocks: of the model; None: not told.
        each: blocks of a stage; None: by the number of stages.
        chunks: stages of a rank; None: not told.
        first: blocks of the first rank; None: as the others.
        last: blocks of the last rank; None: as the others.
        embedding: whether the embedding counts as a block.
        loss: whether the head counts as a block.
        turn: microbatches that a stage runs in turn; None: as many as ranks.
    """

    source: str
    size: int
    layout: str | None
    blocks: int | None
    each: int | None
    chunks: int | None
    first: int | None
    last: int | None
    embedding: bool
    loss: bool
    turn: int | None

    @classmethod
    def of(cls, found: MegatronArguments, size: int) -> _Blocks:
        """Return what arguments say of stages."""
        layout = found.word("pipeline-model-parallel-layout")
        each, chunks = found.number(_EACH), found.number("num-virtual-stages-per-pipeline-rank")
        if sum(row is not None for row in (layout, each, chunks)) > 1:
            found.wrong(
                _EACH if each is not None else "pipeline-model-parallel-layout",
                f"give one of --pipeline-model-parallel-layout, --{_EACH} and "
                "--num-virtual-stages-per-pipeline-rank",
            )
        if layout is not None:
            _check_layout(found, layout, size)
        method = found.word("pp-partition-method")
        by_embedding = method == "type:transformer|embedding"
        if method not in (None, "type:transformer") and not by_embedding:
            found.wrong(
                "pp-partition-method",
                f"{shorten(method)}: expected 'type:transformer', or 'type:transformer|embedding' "
                "to count embedding and head as blocks; or give --pipeline-model-parallel-layout",
            )
        return cls(
            source=found.source,
            size=size,
            layout=layout,
            blocks=found.number("num-layers"),
            each=each,
            chunks=chunks,
            first=found.number("decoder-first-pipeline-num-layers"),
            last=found.number("decoder-last-pipeline-num-layers"),
            embedding=found.has("account-for-embedding-in-pipeline-split") or by_embedding,
            loss=found.has("account-for-loss-in-pipeline-split") or by_embedding,
            turn=found.number("microbatch-group-size-per-virtual-pipeline-stage"),
        )

    def divide(self, graph: LayerGraph) -> Division:
        """Return the layers of every stage of a model.

        Raises:
            PipeplanError: if its blocks cannot be dealt out so.
        """
        layout = self.layout
        if layout is None:
            layout = self._equal(len(block_stack(graph).blocks))
        division = divide(graph, layout, self.source)
        if len(division) > self.size and self.turn not in (None, self.size):
            raise PipeplanError(
                f"{self.source}: --microbatch-group-size-per-virtual-pipeline-stage {self.turn}: "
                "interleaved 1F1B takes as many microbatches in turn as there are pipeline ranks "
                f"here; set it to {self.size}"
            )
        return division

    def _equal(self, count: int) -> str:
        """Return the layout of equal stages of a model with so many blocks."""
        if self.blocks not in (None, count):
            raise PipeplanError(
                f"{self.source}: --num-layers {self.blocks}: the model has {count} blocks; make "
                "them equal"
            )
        rows = ["t" * blocks for blocks in self._counts(count)]
        rows[0] = "E" + rows[0]
        rows[-1] += "L"
        return render_layout(rows)

    def _counts(self, blocks: int) -> list[int]:
        """Return the number of blocks of every stage, as ``get_num_layers_to_build`` does."""
        of_rank: list[int | None] = [None] * self.size
        of_rank[0] = self.first
        of_rank[-1] = of_rank[-1] if self.last is None else self.last
        left = blocks + self.embedding + self.loss - sum(row or 0 for row in of_rank)
        each, rest = divmod(left, of_rank.count(None)) if None in of_rank else (0, left)
        numbers = [each if row is None else row for row in of_rank]
        chunks = max(each // self.each, 1) if self.each else self.chunks or 1
        of_stage = self.each or 0
        if (
            rest
            or each < 0
            or any(number % chunks for number in numbers)
            or (of_stage and any(number != of_stage * chunks for number in numbers))
        ):
            raise PipeplanError(
                f"{self.source}: {plural(blocks, 'block')} cannot be dealt out equally to "
                f"{plural(self.size * chunks, 'stage')} on {plural(self.size, 'pipeline rank')}; "
                "change --pipeline-model-parallel-size or the virtual stages, or give "
                "--pipeline-model-parallel-layout"
            )
        rows = [number // chunks for _ in range(chunks) for number in numbers]
        rows[0] -= self.embedding
        rows[-1] -= self.loss
        return rows


_EACH = "num-layers-per-virtual-pipeline-stage"


def _check_layout(found: MegatronArguments, layout: str, size: int) -> None:
    name = "pipeline-model-parallel-layout"
    try:
        stages = len(parse_layout(layout, f"{found.source}: --{name}"))
    except PipeplanError as error:
        found.problems += error.problems
        return
    if stages % size:
        found.wrong(name, f"{plural(stages, 'stage')} on {size} pipeline ranks; make it a multiple")
