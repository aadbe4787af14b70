"""A configuration of torchtitan as a layout of stages, groups, pipelines and microbatches.

Names are those of torchtitan 0.1 to 0.3 and of its main branch of August 2026, b5bcd76: the classes
``Parallelism``, ``Training`` and ``ActivationCheckpoint`` of ``torchtitan/config``; older ones are
read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.layout import LayoutNames, RuntimeLayout
from planner.interop.adopt.torchtitan_shards import DataParallel
from planner.interop.adopt.torchtitan_stages import (
    OLDER,
    TorchtitanFields,
    division_of,
    schedule_of,
)
from planner.job import Precision
from planner.records.document import read_toml_or_json

_DEGREES = {
    "context_parallel_degree": "context-parallel groups are not planned",
    "expert_parallel_degree": "expert-parallel groups are not planned",
}


def read_torchtitan_config(path: str | Path) -> RuntimeLayout:
    """Read the tables ``parallelism``, ``training`` and ``activation_checkpoint``, TOML or JSON.

    Args:
        path: of the file; a schedule file that it names is looked for beside it.

    Raises:
        PipeplanError: naming every field that is wrong, or that plans cannot express.
    """
    source = str(path)
    data = read_toml_or_json(path)
    found = TorchtitanFields(source, data if isinstance(data, Mapping) else {})
    if "parallelism" not in found.data and not any(found.value(name) for name in OLDER):
        raise PipeplanError(
            f"{source}: has no table 'parallelism'; give torchtitan's configuration as TOML, or "
            "as JSON"
        )
    _refuse_inexpressible(found)
    layout = _layout(found)
    if found.problems:
        raise PipeplanError(dict.fromkeys(found.problems))
    return layout


def _refuse_inexpressible(found: TorchtitanFields) -> None:
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
        names=batch.names,
        tensor_parallel=degree,
        sequence_parallel=degree > 1 and sequence in (None, True),
        pipeline_size=size,
        replicas=data.replicas,
        schedule=schedule_of(found) if size > 1 else None,
        samples_per_microbatch=batch.samples,
        global_batch=batch.total,
        share=batch.share,
        recompute_blocks=_recompute_blocks(found),
        shard_optimizer=data.shares_state,
        shard_parameters=data.shares_weights,
        precision=_precision(found),
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
                f"{batch.names.batch}: {batch.total} is not the {once} that all pipelines take at "
                "once, so gradients are accumulated over several runs of the pipeline; a plan is "
                "of one: give each pipeline more microbatches"
            )
    return None


@dataclass(frozen=True)
class _Batch:
    """The batch of an iteration, in samples.

    Attributes:
        names: what the file calls its figures.
        samples: of a microbatch; None: not told.
        share: microbatches of a pipeline; None: by the total.
        total: samples of an iteration; None: those that all pipelines take at once.
    """

    names: LayoutNames
    samples: int | None
    share: int | None
    total: int | None

    @classmethod
    def of(cls, found: TorchtitanFields, size: int) -> _Batch:
        """Return what the file says, by the names of its version.

        Without a pipeline torchtitan runs what a rank has at once, and accumulates the rest.
        """
        newer = (f"training.{_TOKENS}", "parallelism.num_pp_microbatches")
        if any(found.value(name) is not None for name in newer):
            return cls._of_tokens(found, size)
        local = found.number("training.local_batch_size", 0)
        total = found.number("training.global_batch_size", -1, -1)
        each = local
        names = _names("parallelism.pipeline_parallel_microbatch_size", "global_batch_size")
        if size > 1:
            each = found.number("parallelism.pipeline_parallel_microbatch_size", 0)
            is_older = found.called(_DEGREE) != _DEGREE or found.value(_COUNT) is not None
            if is_older and local:
                return cls._of_count(found, names, local, size)
        return cls._made(found, names, local, total, each, size)

    @classmethod
    def _of_count(
        cls, found: TorchtitanFields, names: LayoutNames, local: int, size: int
    ) -> _Batch:
        """Return the batch by the number of microbatches, as before April 2025."""
        count = found.number(_COUNT, size)
        if local % count:
            found.wrong(
                "training.local_batch_size",
                f"{local} is no multiple of {found.called(_COUNT)} {count}; correct one of them",
            )
        return cls(names, max(1, local // count), count, None)

    @classmethod
    def _of_tokens(cls, found: TorchtitanFields, size: int) -> _Batch:
        """Return the batch where it is counted in tokens, after torchtitan 0.3.

        Without the tokens of a microbatch its samples are the job's.
        """
        length = found.number("training.max_context_length", 2048)
        tokens = found.number(f"training.{_TOKENS}", length)
        total = found.number("training.num_tokens_per_train_step", -1, -1)
        count = found.number("parallelism.num_pp_microbatches", 1) if size > 1 else 1
        for name, number in ((_TOKENS, tokens), ("num_tokens_per_train_step", total)):
            if number != -1 and number % length:
                found.wrong(
                    f"training.{name}",
                    f"{number} is no multiple of training.max_context_length {length}, a sample's "
                    "tokens; correct one of them",
                )
        each = tokens // length
        names = _names(f"training.{_TOKENS}", "num_tokens_per_train_step")
        if found.value(f"training.{_TOKENS}") is None:
            return cls(names, None, count, None)
        whole = total if total == -1 else total // length
        return cls._made(found, names, each * count, whole, each, size)

    @classmethod
    def _made(
        cls,
        found: TorchtitanFields,
        names: LayoutNames,
        local: int,
        total: int,
        each: int,
        size: int,
    ) -> _Batch:
        if not local:
            return cls(names, each or None, None, None if total == -1 else total)
        each = each or 1
        if local % each:
            found.wrong(
                "training.local_batch_size",
                f"{local} is no multiple of {names.microbatch} {each}; correct one of them",
            )
        accumulates = size == 1 and total != -1
        share = None if accumulates else local // each
        return cls(names, each, share, None if total == -1 else total)


_DEGREE = "parallelism.pipeline_parallel_degree"
_COUNT = "parallelism.pipeline_parallel_microbatches"
_TOKENS = "num_tokens_per_microbatch_per_dp_rank"


def _names(microbatch: str, batch: str) -> LayoutNames:
    return LayoutNames(
        tensor="parallelism.tensor_parallel_degree",
        pipeline="parallelism.pipeline_parallel_degree",
        data="parallelism.data_parallel_replicate_degree x data_parallel_shard_degree",
        microbatch=microbatch,
        batch=f"training.{batch}",
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
    """Return how many blocks of every stage run again; None for all."""
    mode = found.value("activation_checkpoint.mode")
    if mode == "full":
        return None
    if mode not in (None, "none"):
        found.wrong(
            "activation_checkpoint.mode",
            f"{shorten(mode)}: plans recompute whole blocks; use full or none",
        )
    return 0


def _notes(found: TorchtitanFields) -> list[str]:
    notes = []
    if found.value("activation_checkpoint.mode") is None:
        notes.append(
            "activation_checkpoint.mode is not given, so nothing is recomputed; torchtitan before "
            "0.3 would recompute selectively: set it"
        )
    if found.value("parallelism.enable_async_tensor_parallel"):
        notes.append(
            "parallelism.enable_async_tensor_parallel: collectives inside a group are predicted "
            "as if nothing were computed meanwhile"
        )
    return notes
