"""A configuration of torchtitan as a layout of stages, groups, pipelines and microbatches.

Names are those of torchtitan 0.3.0 (``ParallelismConfig`` and ``TrainingConfig`` of
``torchtitan/config/configs.py``, ``ActivationCheckpointingConfig`` of
``torchtitan/distributed/activation_checkpoint.py``).

Without a pipeline FSDP gathers a layer for its forward and again for its backward and reduces its
gradients then, for every microbatch: :attr:`planner.space.Space.shard_parameters`. In a pipeline
torch reduces gradients once, after the last backward (``_PipelineStageBase.perform_reduce_grad``
and ``backward_maybe_with_nosync``, torch 2.13), and weights that are not resharded after a forward
are gathered once as well (``get_fsdp_reshard_after_forward_policy``, torchtitan b5bcd76). A rank
holds whole weights and gradients until then, which is :attr:`planner.space.Space.shard_optimizer`
but for FSDP's own share of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.layout import LayoutNames, RuntimeLayout
from planner.interop.adopt.torchtitan_fields import TorchtitanFields
from planner.interop.adopt.torchtitan_stages import TorchSchedule, division_of, schedule_of
from planner.job import Precision

_SHARDS = "parallelism.data_parallel_shard_degree"
_COPIES = "parallelism.data_parallel_replicate_degree"
_RESHARDS = "parallelism.fsdp_reshard_after_forward"
NAMES = LayoutNames(
    tensor="parallelism.tensor_parallel_degree",
    pipeline="parallelism.pipeline_parallel_degree",
    data="parallelism.data_parallel_replicate_degree x data_parallel_shard_degree",
    microbatch="parallelism.pipeline_parallel_microbatch_size",
    batch="training.global_batch_size",
)
_OTHER_POLICIES = frozenset(
    ("force_recompute_mm_shapes_by_fqns", "memory_budget", "selective_ac_option")
)


def read_torchtitan_config(path: str | Path) -> RuntimeLayout:
    """Read the tables ``parallelism``, ``training`` and ``activation_checkpoint``.

    Args:
        path: of a TOML or JSON file, or of a launch script or arguments alone; a schedule file that
            it names is looked for beside it.

    Raises:
        PipeplanError: naming every field that is wrong, or that plans cannot express.
    """
    found = TorchtitanFields.read(path)
    layout = _layout(found)
    if found.problems:
        raise PipeplanError(dict.fromkeys(found.problems))
    return layout


def _layout(found: TorchtitanFields) -> RuntimeLayout:
    for kind in ("context", "expert"):
        name = f"parallelism.{kind}_parallel_degree"
        if (degree := found.number(name, 1)) > 1:
            found.wrong(name, f"{degree}: {kind}-parallel groups are not planned; set it to 1")
    degree = found.number(NAMES.tensor, 1)
    size = found.number(NAMES.pipeline, 1)
    if size > 1 and found.value("training.disable_cuda_graphs") is False:
        found.wrong(
            "training.disable_cuda_graphs",
            "false: torchtitan 0.3.0 refuses CUDA graphs in a pipeline; set it to true",
        )
    batch, data = _batch(found, size), _data_parallel(found)
    is_shared = data.copies == 1 and data.shards != 1
    return RuntimeLayout(
        source=found.source,
        divide=division_of(found, size),
        names=NAMES,
        tensor_parallel=degree,
        sequence_parallel=degree > 1
        and found.value("parallelism.enable_sequence_parallel") in (None, True),
        pipeline_size=size,
        replicas=None if data.shards is None else data.copies * data.shards,
        schedule=schedule_of(found) if size > 1 else None,
        table=TorchSchedule.of(found, size).table if size > 1 else None,
        samples_per_microbatch=batch.samples,
        global_batch=batch.total,
        share=batch.share,
        recompute_blocks=_recompute_blocks(found),
        shard_optimizer=is_shared and size > 1,
        shard_parameters=is_shared and size == 1,
        precision=_precision(found),
        gradient_precision="float32",  # All that training.mixed_precision_reduce can be.
        objections=partial(_objections, (size, degree), batch, data),
        notes=tuple(_notes(found, is_shared=is_shared and size > 1)),
    )


class _Batch(NamedTuple):
    """Samples of a microbatch, microbatches of a pipeline, samples of an iteration.

    ``share`` is None if it follows from the total, ``total`` if all pipelines take it at once.
    """

    samples: int | None
    share: int | None
    total: int | None


def _batch(found: TorchtitanFields, size: int) -> _Batch:
    """Without a pipeline torchtitan runs what a rank has at once, and accumulates the rest."""
    local = found.number("training.local_batch_size", 0)
    given = found.number("training.global_batch_size", -1, -1)
    total = None if given == -1 else given
    each = local if size == 1 else found.number(NAMES.microbatch, 0)
    if not local:
        return _Batch(each or None, None, total)
    each = each or 1
    if local % each:
        found.wrong(
            "training.local_batch_size",
            f"{local} is no multiple of {NAMES.microbatch} {each}; correct one of them",
        )
    accumulates = size == 1 and total is not None
    return _Batch(each, None if accumulates else local // each, total)


class _DataParallel(NamedTuple):
    """Copies of the model, and the ranks that share each; None for as many as there are devices.

    ``policy`` says whether weights are resharded after a forward: default, always, never.
    """

    copies: int
    shards: int | None
    policy: str


def _data_parallel(found: TorchtitanFields) -> _DataParallel:
    copies, shards = found.number(_COPIES, 1), found.number(_SHARDS, -1, -1)
    if shards == 0:
        found.wrong(_SHARDS, "0: expected a whole number of at least 1, or -1 for the rest")
    policy = found.value(_RESHARDS) or "default"
    if policy not in ("default", "always", "never"):
        found.wrong(_RESHARDS, f"{shorten(policy)}: expected default, always or never")
    return _DataParallel(copies, None if shards == -1 else shards, str(policy))


def _objections(
    degrees: tuple[int, int], batch: _Batch, data: _DataParallel, replicas: int
) -> Iterator[str]:
    """Yield why plans cannot express what is left over by the degrees."""
    yield from _sharding_problems(degrees, data, replicas)
    if batch.share is None or batch.total is None or batch.samples is None:
        return
    once = batch.samples * batch.share * replicas
    if batch.total != once:
        yield (
            f"{NAMES.batch}: {batch.total} is not the {once} that all pipelines take at once, so "
            "gradients are accumulated over several runs of the pipeline; a plan is of one: give "
            "each pipeline more microbatches"
        )


def _sharding_problems(
    degrees: tuple[int, int], data: _DataParallel, replicas: int
) -> Iterator[str]:
    """Yield why plans cannot express how data-parallel ranks hold the model."""
    size, degree = degrees
    if replicas % data.copies:
        yield (
            f"{_COPIES}: {data.copies} copies cannot share {replicas} data-parallel ranks equally; "
            "correct one of them"
        )
    elif replicas == data.copies:
        return
    elif data.copies > 1:
        yield (
            f"{_SHARDS}: {replicas // data.copies} shards of {data.copies} copies (HSDP), but in "
            "plans all pipelines share one; set data_parallel_replicate_degree to 1, or "
            "data_parallel_shard_degree to 1"
        )
    elif size > 1 and data.policy == "always":
        yield (
            f"{_RESHARDS}: always: a pipeline gathers weights for every microbatch then, but keeps "
            "whole gradients, and whole weights after a backward; plans have neither without the "
            'other, and it saves no memory: set it to "default"'
        )
    elif size == 1 and data.policy == "never":
        yield (
            f"{_RESHARDS}: never: weights are gathered for a microbatch's forward and kept until "
            "its backward, but plans gather them again or keep them for an iteration; set it to "
            '"default"'
        )
    elif size == 1 and degree > 1:
        yield (
            f"{_SHARDS}: FSDP without a pipeline gathers each layer of tensor-parallel groups for "
            "every microbatch, but plans divide weights over single devices alone; set "
            "tensor_parallel_degree or data_parallel_shard_degree to 1"
        )


def _precision(found: TorchtitanFields) -> Precision | None:
    for name in ("training.mixed_precision_param", "training.dtype"):
        value = found.value(name)
        if value == "float32":
            return "float32"
        if value == "bfloat16":
            return "bfloat16"
        if value is not None:
            found.wrong(name, f"{shorten(value)}: expected float32 or bfloat16")
    return None


def _recompute_blocks(found: TorchtitanFields) -> int | None:
    """Return how many blocks of every stage run again; None for all.

    A configuration that 0.3.0 saved (``debug.save_config_file``) has the fields of the policy's
    class and not its name: selective checkpointing alone has shapes of products, a budget of memory
    its figure, and full checkpointing only what all have.
    """
    policy = found.table("activation_checkpoint")
    mode = policy.get("mode")
    if mode is None and policy:
        is_full = "determinism_check" in policy and not _OTHER_POLICIES & policy.keys()
        mode = "full" if is_full else "selective"
    if mode not in (None, "none", "full"):
        found.wrong(
            "activation_checkpoint",
            f"{shorten(mode)}: plans recompute whole blocks; use full or none",
        )
    return None if mode == "full" else 0


def _notes(found: TorchtitanFields, *, is_shared: bool) -> Iterator[str]:
    if is_shared:
        yield (
            f"{_SHARDS}: in a pipeline FSDP keeps weights gathered and gradients whole until "
            "the end of an iteration, so several pipelines share the optimizer's state "
            "(shard_optimizer) here; FSDP's own share of weights and gradients, which a rank "
            "holds besides, is not counted"
        )
    if "activation_checkpoint" not in found.data:
        yield (
            "activation_checkpoint is not given, so nothing is recomputed; torchtitan's own "
            "default is to recompute selectively: set it to full or none"
        )
    for section in ("parallelism", "compile"):
        if found.value(f"{section}.enable_async_tensor_parallel"):
            yield (
                f"{section}.enable_async_tensor_parallel: collectives inside a group are predicted "
                "as if nothing were computed meanwhile"
            )
