"""torchtitan's configuration as a layout of stages, groups, pipelines and microbatches.

Names are those of torchtitan 0.1 to 0.3 and of its main branch of August 2026, b5bcd76: the classes
``Parallelism``, ``Training`` and ``ActivationCheckpoint`` of ``torchtitan/config``. How stages are
made where none are named is ``torchtitan/distributed/pipeline_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.division import Division, divide
from planner.interop.adopt.layout import Divide, LayoutNames, RuntimeLayout
from planner.interop.adopt.orders import Schedule
from planner.interop.importing.megatron_layout import render_layout
from planner.interop.importing.schedule_csv import read_schedule_csv
from planner.job import Precision
from planner.model.blocks import block_stack
from planner.model.layer_graph import LayerGraph
from planner.records.document import read_toml_or_json
from planner.units import plural

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "loopedbfs": "looped-breadth-first",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
"""Our names of torch's schedules, which it compares without regard to case."""
_ONE_STAGE = ("1f1b", "gpipe", "pipelineschedulesingle")
_DEGREES = {
    "context_parallel_degree": "context-parallel groups are not planned",
    "expert_parallel_degree": "expert-parallel groups are not planned",
}


@dataclass
class _Config:
    """The fields of a file, by their dotted names.

    Attributes:
        source: the file.
        data: its contents.
        problems: what is wrong with them.
    """

    source: str
    data: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """Return the value of a field; None if it is not there."""
        section, _, key = name.partition(".")
        table = self.data.get(section) or {}
        if isinstance(table, Mapping):
            return table.get(key)
        self.wrong(section, f"{shorten(table)}: expected a table")
        return None

    def number(self, name: str, default: int, least: int = 1) -> int:
        """Return the value of a field as a whole number."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31:
            return value
        self.wrong(name, f"{shorten(value)}: expected a whole number of at least {least}")
        return max(default, 1)

    def wrong(self, name: str, problem: str) -> None:
        """Note a problem of a field."""
        self.problems.append(f"{self.source}: {name}: {problem}")


def read_torchtitan_config(path: str | Path) -> RuntimeLayout:
    """Read the tables ``parallelism``, ``training`` and ``activation_checkpoint``, TOML or JSON.

    Args:
        path: of the file; a schedule file that it names is looked for beside it.

    Raises:
        PipeplanError: naming every field that is wrong, or that plans cannot express.
    """
    source = str(path)
    data = read_toml_or_json(path)
    if not isinstance(data, Mapping) or "parallelism" not in data:
        raise PipeplanError(
            f"{source}: has no table 'parallelism'; give torchtitan's configuration as TOML, or "
            "as JSON"
        )
    found = _Config(source, data)
    _refuse_inexpressible(found)
    layout = _layout(found)
    if found.problems:
        raise PipeplanError(dict.fromkeys(found.problems))
    return layout


def _refuse_inexpressible(found: _Config) -> None:
    for name, reason in _DEGREES.items():
        if (degree := found.number(f"parallelism.{name}", 1)) > 1:
            found.wrong(f"parallelism.{name}", f"{degree}: {reason}; set it to 1")
    shards = found.number("parallelism.data_parallel_shard_degree", -1, -1)
    if shards not in (-1, 1):
        found.wrong("parallelism.data_parallel_shard_degree", f"{shards}: {_SHARDED}")


_SHARDED = (
    "FSDP shards parameters over the pipelines, but plans keep them whole in each; set it to 1 and "
    "data_parallel_replicate_degree to the number of pipelines"
)


def _layout(found: _Config) -> RuntimeLayout:
    degree = found.number("parallelism.tensor_parallel_degree", 1)
    size = found.number("parallelism.pipeline_parallel_degree", 1)
    batch = _Batch.of(found, size)
    sequence = found.value("parallelism.enable_sequence_parallel")
    return RuntimeLayout(
        source=found.source,
        divide=_division(found, size),
        names=batch.names,
        tensor_parallel=degree,
        sequence_parallel=degree > 1 and sequence in (None, True),
        pipeline_size=size,
        replicas=found.number("parallelism.data_parallel_replicate_degree", 1),
        schedule=_schedule(found) if size > 1 else None,
        samples_per_microbatch=batch.samples,
        global_batch=batch.total,
        share=batch.share,
        recompute_blocks=_recompute_blocks(found),
        precision=_precision(found),
        objection=partial(_objection, found, degree * size, batch),
        notes=tuple(_notes(found)),
    )


def _objection(found: _Config, each: int, batch: _Batch, devices: int, replicas: int) -> str | None:
    """Return why plans cannot express what is left over by the degrees."""
    sharded = found.number("parallelism.data_parallel_shard_degree", -1, -1) == -1
    if sharded and devices > each * replicas:
        return (
            f"parallelism.data_parallel_shard_degree: not 1, so the {devices} devices are "
            f"{devices // each // replicas} shards of {plural(replicas, 'pipeline')}: {_SHARDED}"
        )
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
    def of(cls, found: _Config, size: int) -> _Batch:
        """Return what the file says, by the names of its version.

        Without a pipeline torchtitan runs what a rank has at once, and accumulates the rest.
        """
        newer = (f"training.{_TOKENS}", "parallelism.num_pp_microbatches")
        if any(found.value(name) is not None for name in newer):
            return cls._of_tokens(found, size)
        local = found.number("training.local_batch_size", 0)
        total = found.number("training.global_batch_size", -1, -1)
        each = local
        if size > 1:
            each = found.number("parallelism.pipeline_parallel_microbatch_size", 0)
        names = _names("parallelism.pipeline_parallel_microbatch_size", "global_batch_size")
        return cls._made(found, names, local, total, each, size)

    @classmethod
    def _of_tokens(cls, found: _Config, size: int) -> _Batch:
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
        cls, found: _Config, names: LayoutNames, local: int, total: int, each: int, size: int
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


_TOKENS = "num_tokens_per_microbatch_per_dp_rank"


def _names(microbatch: str, batch: str) -> LayoutNames:
    return LayoutNames(
        tensor="parallelism.tensor_parallel_degree",
        pipeline="parallelism.pipeline_parallel_degree",
        data="parallelism.data_parallel_replicate_degree",
        microbatch=microbatch,
        batch=f"training.{batch}",
    )


def _precision(found: _Config) -> Precision | None:
    for name in ("training.mixed_precision_param", "training.dtype"):
        value = found.value(name)
        if value == "float32":
            return "float32"
        if value == "bfloat16":
            return "bfloat16"
        if value is not None:
            found.wrong(name, f"{shorten(value)}: expected float32 or bfloat16")
    return None


def _recompute_blocks(found: _Config) -> int | None:
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


def _notes(found: _Config) -> list[str]:
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


# --- stages and schedule --------------------------------------------------------------------------


def _schedule(found: _Config) -> Schedule:
    """Return the schedule file, or the schedule by its name."""
    table = found.value("parallelism.pipeline_parallel_schedule_csv")
    if table:
        return read_schedule_csv(Path(found.source).parent / str(table))
    name = _schedule_name(found)
    if name not in SCHEDULES:
        found.wrong(
            "parallelism.pipeline_parallel_schedule",
            f"{shorten(name)}: expected one of 1F1B, GPipe, Interleaved1F1B, LoopedBFS, "
            "ZBVZeroBubble, DualPipeV, or a file in pipeline_parallel_schedule_csv",
        )
    return SCHEDULES.get(name)


def _schedule_name(found: _Config) -> str:
    return str(found.value("parallelism.pipeline_parallel_schedule") or "1F1B").lower()


def _division(found: _Config, size: int) -> Divide:
    """Return how the model is divided: as named, at the points told, or equally."""
    named = found.value("parallelism.module_fqns_per_model_part")
    points = found.value("parallelism.pipeline_parallel_split_points")
    if size == 1:
        return lambda graph: (tuple(graph.layers),)
    if named:
        rows = _names_of(found, named)
        return partial(divide, stages=rows, source=f"{found.source}: module_fqns_per_model_part")
    if points:
        return partial(_divided_at, found.source, [str(point) for point in points])
    return _Equal.of(found, size).divide


def _names_of(found: _Config, named: Any) -> list[list[str]]:
    is_list = isinstance(named, list) and all(isinstance(row, list) for row in named)
    if is_list and all(isinstance(name, str) for row in named for name in row):
        return [list(row) for row in named]
    found.wrong(
        "parallelism.module_fqns_per_model_part",
        f"{shorten(named)}: expected a list of names for each stage",
    )
    return []


def _divided_at(source: str, points: Sequence[str], graph: LayerGraph) -> Division:
    """Return stages that begin at modules, besides the first (torchtitan 0.1)."""
    names, cuts = tuple(graph.layers), [0]
    for point in points:
        inside = [i for i, name in enumerate(names) if f"{name}.".startswith(f"{point}.")]
        if not inside or inside[0] <= cuts[-1]:
            raise PipeplanError(
                f"{source}: parallelism.pipeline_parallel_split_points: {shorten(point)} is no "
                f"module behind the one before it in {graph.name!r}; correct it"
            )
        cuts.append(inside[0])
    ends = [*cuts[1:], len(names)]
    return tuple(names[begin:end] for begin, end in zip(cuts, ends, strict=True))


@dataclass(frozen=True)
class _Equal:
    """Equal stages, where the embedding and the head count as some blocks.

    Attributes:
        source: the file, for messages.
        size: pipeline ranks.
        each: blocks of a stage; None: one stage a rank, or two for schedules of several.
        is_single: whether the schedule has one stage a rank.
        first: blocks that the embedding counts as.
        last: blocks that the head counts as.
    """

    source: str
    size: int
    each: int | None
    is_single: bool
    first: int
    last: int

    @classmethod
    def of(cls, found: _Config, size: int) -> _Equal:
        """Return what a file says of stages."""
        prefix = "parallelism.pipeline_parallel"
        each = found.number(f"{prefix}_layers_per_stage", 0)
        return cls(
            found.source,
            size,
            each or None,
            _schedule_name(found) in _ONE_STAGE,
            found.number(f"{prefix}_first_stage_less_layers", 1, 0),
            found.number(f"{prefix}_last_stage_less_layers", 1, 0),
        )

    def divide(self, graph: LayerGraph) -> Division:
        """Return the layers of every stage of a model.

        Raises:
            PipeplanError: if torchtitan would not divide its blocks so.
        """
        blocks = len(block_stack(graph).blocks)
        weight = blocks + self.first + self.last
        count = self.size * (1 if self.is_single else 2)
        if self.each is not None:
            count = -(-weight // self.each)
        least, more = divmod(weight, count)
        is_held = count == self.size if self.is_single else count > self.size
        if count % self.size or not is_held or least < max(self.first, self.last, 1):
            raise PipeplanError(
                f"{self.source}: {blocks} blocks, with {self.first} for the embedding and "
                f"{self.last} for the head, cannot be {plural(count, 'stage')} on {self.size} "
                "pipeline ranks; change parallelism.pipeline_parallel_layers_per_stage, or name "
                "the stages in module_fqns_per_model_part"
            )
        numbers = [least + (stage < more) for stage in range(count)]
        numbers[0] -= self.first
        numbers[-1] -= self.last
        rows = ["t" * number for number in numbers]
        rows[0] = "E" + rows[0]
        rows[-1] += "L"
        return divide(graph, render_layout(rows), self.source)
