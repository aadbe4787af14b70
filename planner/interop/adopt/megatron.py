"""Megatron-LM's arguments as a layout of stages, groups, pipelines and microbatches.

Meanings are those of Megatron-LM d98e8a6: ``megatron/training/arguments.py``, for the layers of a
stage ``get_num_layers_to_build`` of ``megatron/core/transformer/transformer_block.py``, and for
experts ``megatron/core/parallel_state.py``.
"""

from __future__ import annotations

from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.deepspeed import DeepSpeedPartition
from planner.interop.adopt.layout import LayoutNames, RuntimeLayout
from planner.interop.adopt.megatron_arguments import MegatronArguments, read_arguments
from planner.interop.adopt.megatron_stages import MegatronStages
from planner.job import GradientPrecision, Precision

NAMES = LayoutNames(
    tensor="--tensor-model-parallel-size",
    pipeline="--pipeline-model-parallel-size",
    data="--replicas",
    microbatch="--micro-batch-size",
    batch="--global-batch-size",
)
_NOTES = {
    "no-overlap-p2p-communication": (
        "with --runtime megatron messages block as in megatron-blocking, where ranks hold several "
        "stages"
    ),
    "tp-comm-overlap": (
        "collectives inside a group are predicted as if nothing were computed meanwhile"
    ),
    "overlap-param-gather": (
        "parameters are gathered right after the optimizer's step here, and nothing hides that"
    ),
}
_EMPTY = (
    "stage {} is empty: Megatron-LM sends activations and gradients by way of its rank, where the "
    "plan sends them past it in one message"
)
_CORE = "core_attn"


def read_megatron_arguments(path: str | Path) -> RuntimeLayout:
    """Read Megatron-LM's arguments from a text file: a launch script, or the arguments alone.

    Arguments that do not divide the model, the devices or the batch are left out.

    Args:
        path: of the file, see :func:`planner.interop.adopt.megatron_arguments.read_arguments`.

    Raises:
        PipeplanError: naming every argument that is wrong, or that plans cannot express.
    """
    found = read_arguments(path)
    layout = _layout(found)
    if found.problems:
        raise PipeplanError(dict.fromkeys(found.problems))
    return layout


def _layout(found: MegatronArguments) -> RuntimeLayout:
    if (context := found.number("context-parallel-size")) not in (None, 1):
        found.wrong(
            "context-parallel-size",
            f"{context}: context parallel groups are not planned; set it to 1 and use tensor "
            "parallelism, pipelines or replicas instead",
        )
    degree = found.number("tensor-model-parallel-size") or 1
    size = found.number("pipeline-model-parallel-size") or 1
    samples, batch = found.number("micro-batch-size"), found.number("global-batch-size")
    partition = DeepSpeedPartition.of(found, size, degree)
    stages = MegatronStages(found, size)
    notes = [f"--{name}: {note}" for name, note in _NOTES.items() if found.has(name)]
    return RuntimeLayout(
        source=found.source,
        divide=partition.divide if partition else stages.divide,
        table=None if partition else stages.table,
        blocks_messages=not stages.overlaps,
        names=NAMES,
        tensor_parallel=degree,
        # Megatron-LM leaves sequence parallelism off where a group is one device.
        sequence_parallel=found.has("sequence-parallel") and degree > 1,
        expert_parallel=_has_whole_experts(found, degree),
        pipeline_size=size,
        samples_per_microbatch=samples,
        global_batch=batch,
        share=1 if samples is not None and batch is None else None,
        recompute_blocks=_recompute_blocks(found),
        recompute_attention=_recomputes_attention(found),
        shard_optimizer=found.has("use-distributed-optimizer") or _is_zero_1(found),
        overlap_reduction=found.has("overlap-grad-reduce"),
        precision=_precision(found),
        gradient_precision=_gradient_precision(found),
        notes=(*found.notes, *notes, *map(_EMPTY.format, stages.empty)),
    )


def _has_whole_experts(found: MegatronArguments, degree: int) -> bool:
    """Return whether the devices of a tensor-parallel group have whole experts.

    An expert-parallel group has ranks that follow each other, those of tensor-parallel groups first
    if the experts' own tensor degree is 1; by default it is that of all layers.
    """
    size, inside = "expert-model-parallel-size", "expert-tensor-parallel-size"
    experts, tensor = found.number(size) or 1, found.number(inside) or degree
    if experts == 1:
        if tensor != degree:
            found.wrong(
                inside,
                f"{tensor}: experts in other shares than the rest are not planned; set it to "
                f"{degree}, or to 1 with --{size} {degree}",
            )
        return False
    if (experts, tensor) != (degree, 1):
        found.wrong(
            size,
            f"{experts} with --{inside} {tensor}: plans give whole experts to the devices of a "
            f"tensor-parallel group, {degree} here; set --{size} and --tensor-model-parallel-size "
            f"to one number and --{inside} to 1, or --{size} to 1",
        )
    if not found.has("sequence-parallel"):
        found.wrong(
            size, "Megatron-LM takes it beside tensor parallelism with --sequence-parallel; add it"
        )
    dispatcher = found.values.get("moe-token-dispatcher-type", "allgather, the default")
    if dispatcher != "alltoall":
        found.wrong(
            "moe-token-dispatcher-type",
            f"{shorten(dispatcher)}: rows go to experts by all-to-all in plans; set it to alltoall",
        )
    if found.has("moe-expert-capacity-factor"):
        found.wrong("moe-expert-capacity-factor", "plans drop no tokens; leave it out")
    return True


def _precision(found: MegatronArguments) -> Precision | None:
    if found.has("bf16") and found.has("fp16"):
        found.wrong("fp16", "--bf16 is given as well; give one of them")
    return "bfloat16" if found.has("bf16") else "float16" if found.has("fp16") else None


def _gradient_precision(found: MegatronArguments) -> GradientPrecision | None:
    """Megatron-LM sums gradients in float32 with --bf16, and with --fp16 only if it is told to."""
    float32 = "accumulate-allreduce-grads-in-fp32"
    in_float32, in_bf16 = found.has(float32), found.has("grad-reduce-in-bf16")
    if in_float32 and in_bf16:
        found.wrong("grad-reduce-in-bf16", f"--{float32} is given as well; give one of them")
    if in_float32 or (found.has("bf16") and not in_bf16):
        return "float32"
    return "weights" if in_bf16 or found.has("fp16") else None


def _recompute_blocks(found: MegatronArguments) -> int | None:
    """Return how many blocks of every stage run again; None for all."""
    granularity = found.values.get("recompute-granularity")
    method, count = found.values.get("recompute-method"), found.number("recompute-num-layers")
    if granularity not in (None, "full", "selective"):
        found.wrong("recompute-granularity", f"{shorten(granularity)}: expected full or selective")
    if found.has("checkpoint-activations"):  # Of Megatron-DeepSpeed.
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
    elif method == "uniform" and count > 1:
        found.wrong(
            "recompute-num-layers",
            f"{count}: plans keep what every block starts from, not one in {count}; set it to 1",
        )
    return None if method == "uniform" else count


def _is_zero_1(found: MegatronArguments) -> bool:
    """Return whether pipelines share the optimizer's state; DeepSpeed's take stages 0 and 1."""
    text = found.values.get("zero-stage", "0")
    if text not in ("0", "1"):
        found.wrong(
            "zero-stage",
            f"{shorten(text)}: expected 0, or 1 for an optimizer's state that pipelines share; "
            "gradients and parameters are whole in every pipeline",
        )
    return text == "1"


def _recomputes_attention(found: MegatronArguments) -> bool:
    """Return whether the core of attention runs again: ``core_attn``, the default module."""
    granularity = found.values.get("recompute-granularity")
    if found.has("recompute-activations") and granularity == "full":
        found.wrong("recompute-activations", "is selective, but --recompute-granularity is full")
    if not found.has("recompute-activations") and granularity != "selective":
        return False
    modules = found.values.get("recompute-modules", _CORE)
    if modules != _CORE:
        found.wrong(
            "recompute-modules",
            f"{shorten(modules)}: of selective recomputation plans have {_CORE} alone, the core of "
            f"attention; set it to {_CORE}, or use --recompute-granularity full",
        )
    return True
