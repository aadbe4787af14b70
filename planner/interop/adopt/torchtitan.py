"""A configuration of torchtitan as a layout of stages, groups, pipelines and microbatches.

Names are those of torchtitan 0.3.0 (``ParallelismConfig`` and ``TrainingConfig`` of
``torchtitan/config/configs.py``, ``ActivationCheckpointingConfig`` of
``torchtitan/distributed/activation_checkpoint.py``), and of TOML files for 0.2 that have the same.
A field that is not known here is refused, unless it is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.layout import LayoutNames, RuntimeLayout
from planner.interop.adopt.megatron_arguments import MOST_SCRIPT_BYTES
from planner.interop.adopt.torchtitan_shards import DataParallel
from planner.interop.adopt.torchtitan_stages import (
    RENAMED,
    TorchtitanFields,
    division_of,
    schedule_of,
    torch_schedule,
)
from planner.interop.adopt.torchtitan_words import tables_of_words
from planner.job import Precision
from planner.records.document import read_text, read_toml_or_json

_DEGREES = {
    "context_parallel_degree": "context-parallel groups are not planned",
    "expert_parallel_degree": "expert-parallel groups are not planned",
}
_PARALLELISM = frozenset(
    f"parallelism.{name}"
    for name in (
        *_DEGREES,
        "context_parallel_load_balancer",
        "context_parallel_ptrr_mask_key",
        "context_parallel_rotate_method",
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "disable_loss_parallel",
        "enable_async_tensor_parallel",
        "enable_fsdp_symm_mem",
        "enable_sequence_parallel",
        "expert_tensor_parallel_degree",
        "fsdp_reshard_after_forward",
        "module_fqns_per_model_part",
        "pipeline_parallel_degree",
        "pipeline_parallel_expert_parallel_overlap",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "spmd_backend",
        "tensor_parallel_degree",
    )
)
_BATCHES = frozenset(("training.local_batch_size", "training.global_batch_size"))


def read_torchtitan_config(path: str | Path) -> RuntimeLayout:
    """Read the tables ``parallelism``, ``training`` and ``activation_checkpoint``.

    Args:
        path: of a TOML or JSON file, or of a launch script or arguments alone; a schedule file that
            it names is looked for beside it.

    Raises:
        PipeplanError: naming every field that is wrong, or that plans cannot express.
    """
    source = str(path)
    if source.endswith((".toml", ".json")):
        data = read_toml_or_json(path)
    else:
        data = tables_of_words(read_text(Path(path), MOST_SCRIPT_BYTES), source)
    found = TorchtitanFields(source, data if isinstance(data, Mapping) else {})
    _refuse_unknown(found)
    if "parallelism" not in found.data:
        found.problems.append(
            f"{source}: has no table 'parallelism'; give torchtitan's configuration as TOML, or "
            "as JSON"
        )
        raise PipeplanError(found.problems)
    _refuse_inexpressible(found)
    layout = _layout(found)
    if found.problems:
        raise PipeplanError(dict.fromkeys(found.problems))
    return layout


def _refuse_unknown(found: TorchtitanFields) -> None:
    """Note fields that could divide a model and are none of torchtitan's, unless they are off."""
    for section in ("parallelism", "training", "experimental"):
        for key, value in found.table(section).items():
            name = f"{section}.{key}"
            is_about = section == "parallelism" or any(part in key for part in _ABOUT)
            if name in _PARALLELISM | _BATCHES or not is_about or value in (None, False, 0, 1, ""):
                continue
            new = RENAMED.get(name, f"parallelism.{key}")
            known = new in _PARALLELISM | _BATCHES
            remedy = f"its name is {new}" if known else "leave it out"
            found.wrong(name, f"{shorten(value)}: torchtitan 0.3.0 has no such field; {remedy}")


_ABOUT = ("parallel", "batch", "shard", "tokens")


def _refuse_inexpressible(found: TorchtitanFields) -> None:
    if found.value("training.disable_cuda_graphs") is False:
        size = found.number("parallelism.pipeline_parallel_degree", 1)
        if size > 1:
            found.wrong(
                "training.disable_cuda_graphs",
                "false: torchtitan 0.3.0 refuses CUDA graphs in a pipeline; set it to true",
            )
    if (experts := found.number("parallelism.expert_tensor_parallel_degree", 1)) > 1:
        found.wrong(
            "parallelism.expert_tensor_parallel_degree",
            f"{experts}: torchtitan 0.3.0 has no such field; leave it out",
        )
    for name, reason in _DEGREES.items():
        if (degree := found.number(f"parallelism.{name}", 1)) > 1:
            found.wrong(f"parallelism.{name}", f"{degree}: {reason}; set it to 1")


def _layout(found: TorchtitanFields) -> RuntimeLayout:
    degree = found.number("parallelism.tensor_parallel_degree", 1)
    size = found.number("parallelism.pipeline_parallel_degree", 1)
    batch, data = _Batch.of(found, size), DataParallel.of(found, size)
    sequence = found.value("parallelism.enable_sequence_parallel")
    return RuntimeLayout(
        source=found.source,
        divide=division_of(found, size),
        names=NAMES,
        tensor_parallel=degree,
        sequence_parallel=degree > 1 and sequence in (None, True),
        pipeline_size=size,
        replicas=data.replicas,
        schedule=schedule_of(found) if size > 1 else None,
        table=torch_schedule(found, size).table if size > 1 else None,
        samples_per_microbatch=batch.samples,
        global_batch=batch.total,
        share=batch.share,
        recompute_blocks=_recompute_blocks(found),
        shard_optimizer=data.shares_state,
        shard_parameters=data.shares_weights,
        precision=_precision(found),
        gradient_precision="float32",  # All that training.mixed_precision_reduce can be.
        objection=partial(_objection, found, degree, batch, data),
        notes=(*data.notes, *_notes(found)),
    )


def _objection(
    found: TorchtitanFields,
    degree: int,
    batch: _Batch,
    data: DataParallel,
    devices: int,
    replicas: int,
) -> str | None:
    """Return why plans cannot express what is left over by the degrees."""
    problem = data.problem(found, degree, replicas)
    if problem is not None:
        return problem
    if batch.share is not None and batch.total is not None and batch.samples is not None:
        once = batch.samples * batch.share * replicas
        if batch.total != once:
            return (
                f"{NAMES.batch}: {batch.total} is not the {once} that all pipelines take at "
                "once, so gradients are accumulated over several runs of the pipeline; a plan is "
                "of one: give each pipeline more microbatches"
            )
    return None


@dataclass(frozen=True)
class _Batch:
    """The batch of an iteration, in samples.

    Attributes:
        samples: of a microbatch; None: not told.
        share: microbatches of a pipeline; None: by the total.
        total: samples of an iteration; None: those that all pipelines take at once.
    """

    samples: int | None
    share: int | None
    total: int | None

    @classmethod
    def of(cls, found: TorchtitanFields, size: int) -> _Batch:
        """Return what the file says.

        Without a pipeline torchtitan runs what a rank has at once, and accumulates the rest.
        """
        local = found.number("training.local_batch_size", 0)
        given = found.number("training.global_batch_size", -1, -1)
        total = None if given == -1 else given
        each = local if size == 1 else found.number(NAMES.microbatch, 0)
        if not local:
            return cls(each or None, None, total)
        each = each or 1
        if local % each:
            found.wrong(
                "training.local_batch_size",
                f"{local} is no multiple of {NAMES.microbatch} {each}; correct one of them",
            )
        accumulates = size == 1 and total is not None
        return cls(each, None if accumulates else local // each, total)


NAMES = LayoutNames(
    tensor="parallelism.tensor_parallel_degree",
    pipeline="parallelism.pipeline_parallel_degree",
    data="parallelism.data_parallel_replicate_degree x data_parallel_shard_degree",
    microbatch="parallelism.pipeline_parallel_microbatch_size",
    batch="training.global_batch_size",
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
    if mode == "full":
        return None
    if mode not in (None, "none"):
        found.wrong(
            "activation_checkpoint",
            f"{shorten(mode)}: plans recompute whole blocks; use full or none",
        )
    return 0


_OTHER_POLICIES = frozenset(
    ("force_recompute_mm_shapes_by_fqns", "memory_budget", "selective_ac_option")
)


def _notes(found: TorchtitanFields) -> list[str]:
    notes = []
    if "activation_checkpoint" not in found.data:
        notes.append(
            "activation_checkpoint is not given, so nothing is recomputed; torchtitan's own "
            "default is to recompute selectively: set it to full or none"
        )
    for section in ("parallelism", "compile"):
        if found.value(f"{section}.enable_async_tensor_parallel"):
            notes.append(
                f"{section}.enable_async_tensor_parallel: collectives inside a group are predicted "
                "as if nothing were computed meanwhile"
            )
    return notes
