"""Megatron-LM's arguments as a layout of stages, groups, pipelines and microbatches.

Meanings are those of Megatron-LM d98e8a6: ``megatron/training/arguments.py`` and, for the layers of
a stage, ``get_num_layers_to_build`` of ``megatron/core/transformer/transformer_block.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.layout import LayoutNames, RuntimeLayout
from planner.interop.adopt.megatron_arguments import MegatronArguments, read_arguments
from planner.interop.adopt.megatron_experts import has_whole_experts
from planner.interop.adopt.megatron_stages import MegatronStages, deepspeed_partition
from planner.job import GradientPrecision, Precision

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
    partition, stages = deepspeed_partition(found, size, degree), MegatronStages.of(found, size)
    return RuntimeLayout(
        source=found.source,
        divide=partition.divide if partition else stages.divide,
        table=None if partition else stages.table,
        blocks_messages=not stages.overlaps,
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
        gradient_precision=_gradient_precision(found),
        notes=(*found.notes, *_notes(found), *(map(_EMPTY.format, stages.empty))),
    )


_EMPTY = (
    "stage {} is empty: Megatron-LM sends activations and gradients by way of its rank, where the "
    "plan sends them past it in one message"
)


def _precision(found: MegatronArguments) -> Precision | None:
    if found.has("bf16") and found.has("fp16"):
        found.wrong("fp16", "--bf16 is given as well; give one of them")
    return "bfloat16" if found.has("bf16") else "float16" if found.has("fp16") else None


def _gradient_precision(found: MegatronArguments) -> GradientPrecision | None:
    """Megatron-LM sums gradients in float32 with --bf16, and with --fp16 only if it is told to."""
    in_float32, in_bf16 = (found.has(name) for name in (_IN_FLOAT32, "grad-reduce-in-bf16"))
    if in_float32 and in_bf16:
        found.wrong("grad-reduce-in-bf16", f"--{_IN_FLOAT32} is given as well; give one of them")
    if in_float32 or (found.has("bf16") and not in_bf16):
        return "float32"
    return "weights" if in_bf16 or found.has("fp16") else None


_IN_FLOAT32 = "accumulate-allreduce-grads-in-fp32"


def _notes(found: MegatronArguments) -> Iterator[str]:
    if found.has("no-overlap-p2p-communication"):
        yield (
            "--no-overlap-p2p-communication: with --runtime megatron messages block as in "
            "megatron-blocking, where ranks hold several stages"
        )
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
