"""torchtitan: its configuration as a layout of plans, and plans as its configuration.

Names are those of torchtitan 0.3.0 (``ParallelismConfig`` and ``TrainingConfig`` of
``torchtitan/config/configs.py``, ``ActivationCheckpointingConfig`` of
``torchtitan/distributed/activation_checkpoint.py``). It reads no file: a function makes the
configuration, and ``--section.field value`` overrides it; ``activation-checkpoint:full`` names a
policy (``torchtitan/config/manager.py``). Files in TOML are those of 0.2 with the same names.

Without a pipeline FSDP gathers a layer for its forward and again for its backward and reduces its
gradients then, for every microbatch: :attr:`planner.space.Space.shard_parameters`. In a pipeline
torch reduces gradients once, after the last backward (``_PipelineStageBase.perform_reduce_grad``
and ``backward_maybe_with_nosync``, torch 2.13), and weights that are not resharded after a forward
are gathered once as well (``get_fsdp_reshard_after_forward_policy``, torchtitan b5bcd76). A rank
holds whole weights and gradients until then, which is :attr:`planner.space.Space.shard_optimizer`
but for FSDP's own share of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from planner.costs.placement import place_plan
from planner.errors import PipeplanError, shorten
from planner.interop.adopted import Schedule
from planner.interop.arguments import PASTE, ArgumentFile, read_arguments
from planner.interop.division import Division, divide, divide_by_symbols, stages_of_counts
from planner.interop.exported import (
    Exported,
    StageDevices,
    against,
    crossing,
    devices_by_stage,
    last_forward_problems,
    loss_problems,
    overfull,
    precision_problems,
    ranks_of,
    receive_buffer_notes,
    recompute_notes,
    reduction_notes,
    split_notes,
    split_problems,
    stage_table,
    sync_notes,
    tied_across_stages,
)
from planner.interop.layout import LayoutNames, RuntimeLayout
from planner.interop.torch_pipelining import ScheduleTable, read_schedule_csv, schedule_csv
from planner.job import Precision
from planner.model.blocks import LOSS, block_stack, module_of
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation, Orders, in_turn
from planner.plan.plan import Plan
from planner.plan.runtimes import inside_another
from planner.simulation.simulator import simulate
from planner.sync.pipeline_replicas import PipelineReplica, pipeline_replicas_of
from planner.units import listed, plural

NAMES = LayoutNames(
    tensor="parallelism.tensor_parallel_degree",
    pipeline="parallelism.pipeline_parallel_degree",
    data="parallelism.data_parallel_replicate_degree x data_parallel_shard_degree",
    microbatch="parallelism.pipeline_parallel_microbatch_size",
    batch="training.global_batch_size",
)
_SHARDS = "parallelism.data_parallel_shard_degree"
_COPIES = "parallelism.data_parallel_replicate_degree"
_RESHARDS = "parallelism.fsdp_reshard_after_forward"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PARTS = "parallelism.module_fqns_per_model_part"
_LOCAL = "training.local_batch_size"
_FIELDS = {
    "parallelism": frozenset(
        """context_parallel_degree context_parallel_load_balancer context_parallel_ptrr_mask_key
        context_parallel_rotate_method data_parallel_replicate_degree data_parallel_shard_degree
        disable_loss_parallel enable_async_tensor_parallel enable_fsdp_symm_mem
        enable_sequence_parallel expert_parallel_degree fsdp_reshard_after_forward
        module_fqns_per_model_part pipeline_parallel_degree
        pipeline_parallel_expert_parallel_overlap pipeline_parallel_first_stage_less_layers
        pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage
        pipeline_parallel_microbatch_size pipeline_parallel_schedule
        pipeline_parallel_schedule_csv spmd_backend tensor_parallel_degree""".split()
    ),
    "training": frozenset(("local_batch_size", "global_batch_size")),
    "experimental": frozenset[str](),
}
_ABOUT = ("parallel", "batch", "shard", "tokens")
"""Words of fields of other tables that could divide a model."""
_OTHER_POLICIES = frozenset(
    ("force_recompute_mm_shapes_by_fqns", "memory_budget", "selective_ac_option")
)
_POLICY = re.compile(r"activation[-_]checkpoint:([\w-]+)")


# --- the fields -----------------------------------------------------------------------------------


def read_torchtitan_config(path: str | Path) -> RuntimeLayout:
    """Read the tables ``parallelism``, ``training`` and ``activation_checkpoint`` as a layout.

    Args:
        path: of a TOML, JSON or YAML file, or of a launch script or arguments alone; a schedule
            file that it names is looked for beside it.

    Raises:
        PipeplanError: naming every field that is wrong, or that plans cannot express.
    """
    found = _Fields.read(path)
    layout = _layout(found)
    found.file.require_right()
    return layout


@dataclass
class _Fields:
    """The tables of a file, and what is wrong with their fields."""

    file: ArgumentFile
    data: Mapping[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> _Fields:
        """Read a file, and note fields that could divide a model and are none of torchtitan's.

        Raises:
            PipeplanError: if it cannot be read, or lays out no model.
        """
        file = read_arguments(path, "torchtitan", ())
        found = cls(file, _tables(file) if file.mapping is None else file.mapping)
        for section, known in _FIELDS.items():
            for key, value in found.table(section).items():
                is_about = section == "parallelism" or any(part in key for part in _ABOUT)
                if is_about and key not in known and value not in (None, False, 0, 1, ""):
                    of = [f"{other}.{key}" for other, names in _FIELDS.items() if key in names]
                    remedy = f"its name is {of[0]}" if of else "leave it out"
                    found.wrong(
                        f"{section}.{key}",
                        f"{shorten(value)}: torchtitan 0.3.0 has no such field; {remedy}",
                    )
        if "parallelism" not in found.data:
            file.problems.append(
                f"{path}: has no table 'parallelism'; give torchtitan's configuration as TOML, or "
                "as JSON"
            )
            file.require_right()
        return found

    def table(self, section: str) -> Mapping[str, Any]:
        """Return a table of the file; an empty one if it has none."""
        table = self.data.get(section) or {}
        if isinstance(table, Mapping):
            return table
        self.wrong(section, f"{shorten(table)}: expected a table")
        return {}

    def value(self, name: str) -> Any:
        """Return the value of a field, by section and key; None if it is not given."""
        section, _, key = name.partition(".")
        return self.table(section).get(key)

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
        self.file.wrong(name, problem)


def _tables(file: ArgumentFile) -> dict[str, Any]:
    """Return the tables that a command line sets.

    Raises:
        PipeplanError: if it sets none, or a value depends on more than the file.
    """
    tables: dict[str, Any] = {}
    for name, given, _, is_literal in file.given:
        section, _, key = name.replace("-", "_").partition(".")
        if section not in ("parallelism", "training", "compile", "activation_checkpoint"):
            continue
        if not is_literal:
            raise PipeplanError(f"{file.source}: --{name}: {shorten(given or '')}: {PASTE}")
        value: Any = True
        if given is not None:
            value = _typed(given)
        elif key.startswith("no_"):
            key, value = key.removeprefix("no_"), False
        tables.setdefault(section, {})[key] = value
    for policy in filter(None, map(_POLICY.fullmatch, file.words)):
        tables["activation_checkpoint"] = {"mode": policy[1]}
    if not tables:
        raise PipeplanError(
            f"{file.source}: has no argument of torchtitan that lays out a model, such as "
            "--parallelism.pipeline_parallel_degree; paste the arguments of the run"
        )
    return {"parallelism": {}, **tables}


def _typed(text: str) -> Any:
    """Return a value as JSON has it, or as it stands."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return None if text == "None" else text


def _layout(found: _Fields) -> RuntimeLayout:
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
    pipeline = _Pipeline(found, size) if size > 1 else None
    return RuntimeLayout(
        source=found.file.source,
        names=NAMES,
        divide=pipeline.divide if pipeline else lambda graph: (tuple(graph.layers),),
        table=pipeline.table if pipeline else None,
        tensor_parallel=degree,
        sequence_parallel=degree > 1
        and found.value("parallelism.enable_sequence_parallel") in (None, True),
        pipeline_size=size,
        replicas=None if data.shards is None else data.copies * data.shards,
        schedule=pipeline.schedule if pipeline else None,
        samples_per_microbatch=batch.samples,
        global_batch=batch.total,
        share=batch.share,
        recompute_blocks=_recompute_blocks(found),
        shard_optimizer=is_shared and size > 1,
        shard_parameters=is_shared and size == 1,
        precision=_precision(found),
        gradient_precision="float32",  # All that training.mixed_precision_reduce can be.
        objections=partial(_objections, (size, degree), batch, data),
        notes=(*found.file.notes, *_notes(found, is_shared=is_shared and size > 1)),
    )


class _Batch(NamedTuple):
    """Samples of a microbatch, microbatches of a pipeline, samples of an iteration.

    ``share`` is None if it follows from the total, ``total`` if all pipelines take it at once.
    """

    samples: int | None
    share: int | None
    total: int | None


def _batch(found: _Fields, size: int) -> _Batch:
    """Without a pipeline torchtitan runs what a rank has at once, and accumulates the rest."""
    local = found.number(_LOCAL, 0)
    given = found.number("training.global_batch_size", -1, -1)
    total = None if given == -1 else given
    each = local if size == 1 else found.number(NAMES.microbatch, 0)
    if not local:
        return _Batch(each or None, None, total)
    each = each or 1
    if local % each:
        found.wrong(
            _LOCAL,
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


def _data_parallel(found: _Fields) -> _DataParallel:
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


def _precision(found: _Fields) -> Precision | None:
    for name in ("training.mixed_precision_param", "training.dtype"):
        value = found.value(name)
        if value == "float32":
            return "float32"
        if value == "bfloat16":
            return "bfloat16"
        if value is not None:
            found.wrong(name, f"{shorten(value)}: expected float32 or bfloat16")
    return None


def _recompute_blocks(found: _Fields) -> int | None:
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


def _notes(found: _Fields, *, is_shared: bool) -> Iterator[str]:
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


# --- stages and orders ----------------------------------------------------------------------------


def _at_least_stages(stages: int, size: int, share: int) -> str | None:
    del size
    return f"{stages} or more" if share < stages else None


def _whole_rounds(stages: int, size: int, share: int) -> str | None:
    del stages
    if share % max(1, share // size) == 0:
        return None
    works = [n for n in range(1, share + size) if not n % max(1, n // size)]
    return f"{max(n for n in works if n < share)} or {works[-1]}"


def _breadth_first(held: Sequence[int], rank: int, size: int, share: int) -> Iterator[Operation]:
    """Backwards run from the last microbatch to the first; Lamy-Poirier's from the first on."""
    del rank, size
    forward = [Operation(stage, "F", m) for stage in held for m in range(share)]
    yield from (*forward, *(row._replace(kind="B") for row in reversed(forward)))


def _zero_bubble(held: Sequence[int], rank: int, size: int, share: int) -> Iterator[Operation]:
    """Interleaved 1F1B with half as long a warm-up; rank r delays weight gradients by r backwards.

    Each backward is I; the weight gradients of the backward r before follow.
    """
    each = share // max(1, share // size)
    rounds = [range(first, first + each) for first in range(0, share, each)]
    ahead = (len(held) - 1) * each + size - 1 - rank
    late: list[Operation] = []
    for row in in_turn(held, rounds, ahead):
        yield row if row.kind == "F" else row._replace(kind="I")
        if row.kind == "B":
            late.append(row._replace(kind="W"))
            if len(late) > rank:
                yield late.pop(0)
    yield from late


class _TorchSchedule(NamedTuple):
    """A schedule of torch 2.13 (``schedules.py``).

    Attributes:
        ours: its name here.
        held: stages on a rank; None: two or more.
        works: returns the numbers of microbatches that torch runs with so many stages and ranks,
            None if a number is one of them.
        order: yields the operations of a rank, where they are not those of our name.
    """

    ours: str
    held: int | None
    works: Callable[[int, int, int], str | None] | None = None
    order: Callable[[Sequence[int], int, int, int], Iterator[Operation]] | None = None


SCHEDULES = {
    "1f1b": _TorchSchedule("1f1b", 1, _at_least_stages),
    "gpipe": _TorchSchedule("gpipe", 1),
    "interleaved1f1b": _TorchSchedule("interleaved-1f1b", None, _whole_rounds),
    "interleavedzerobubble": _TorchSchedule("interleaved-1f1b", None, _whole_rounds, _zero_bubble),
    "loopedbfs": _TorchSchedule("looped-breadth-first", None, None, _breadth_first),
    "zbvzerobubble": _TorchSchedule("zb-v", 2),
    "dualpipev": _TorchSchedule("dualpipe-v", 2, _at_least_stages),
}
"""By torch's names, compared without regard to case."""
_IN_FILES = {"pipelineschedulesingle": 1, "pipelineschedulemulti": None}
"""Stages on a rank by further names, which only place stages: their order is a file's."""


class _Pipeline:
    """How a model is divided into stages, and in which order they run.

    Args:
        found: the fields, which note what is wrong with them.
        size: pipeline ranks.
    """

    def __init__(self, found: _Fields, size: int) -> None:
        self._source, self._size = found.file.source, size
        self._name = str(found.value(_SCHEDULE) or "1F1B").lower()
        file = found.value("parallelism.pipeline_parallel_schedule_csv")
        self._file = read_schedule_csv(Path(self._source).parent / str(file)) if file else None
        self._known = SCHEDULES.get(self._name)
        if self._known is None and self._file is None:
            found.wrong(
                _SCHEDULE,
                f"{shorten(self._name)}: expected one of 1F1B, GPipe, Interleaved1F1B, "
                "InterleavedZeroBubble, LoopedBFS, ZBVZeroBubble, DualPipeV, or a file in "
                "pipeline_parallel_schedule_csv",
            )
        self._held = self._known.held if self._known else _IN_FILES.get(self._name)
        self._named = _names(found)
        prefix = "parallelism.pipeline_parallel"
        self._each = found.number(f"{prefix}_layers_per_stage", 0)
        self._first = found.number(f"{prefix}_first_stage_less_layers", 1, 0)
        self._last = found.number(f"{prefix}_last_stage_less_layers", 1, 0)

    @property
    def schedule(self) -> Schedule:
        """The schedule file, or the schedule by our name."""
        return self._file or (self._known and self._known.ours)

    def divide(self, graph: LayerGraph) -> Division:
        """Return the layers of every stage: as named, or equally.

        Equal stages are those of ``torchtitan/distributed/pipeline_parallel.py``, where the
        embedding and the head count as some blocks.

        Raises:
            PipeplanError: if its blocks cannot be divided so.
        """
        if self._named is not None:
            return divide(graph, self._named, f"{self._source}: module_fqns_per_model_part")
        blocks, is_single = len(block_stack(graph).blocks), self._held == 1
        weight = blocks + self._first + self._last
        count = -(-weight // self._each) if self._each else self._size * (1 if is_single else 2)
        least, more = divmod(weight, count)
        is_held = count == self._size if is_single else count > self._size
        if count % self._size or not is_held or least < max(self._first, self._last, 1):
            raise PipeplanError(
                f"{self._source}: {blocks} blocks, with {self._first} for the embedding and "
                f"{self._last} for the head, cannot be {plural(count, 'stage')} on {self._size} "
                "pipeline ranks; change parallelism.pipeline_parallel_layers_per_stage, or name "
                "the stages in module_fqns_per_model_part"
            )
        counts = [least + (stage < more) for stage in range(count)]
        counts[0] -= self._first
        counts[-1] -= self._last
        return divide_by_symbols(graph, stages_of_counts(counts), self._source)

    def table(self, stages: int, share: int) -> ScheduleTable | None:
        """Return the order where it is not that of the schedule's name here.

        Args:
            stages: of all ranks.
            share: microbatches of a pipeline.

        Raises:
            PipeplanError: with the numbers that work, if torch refuses these.
        """
        each, known = stages // self._size, self._known
        is_v = known is not None and known.held == 2
        is_right = (each == 1) == (self._held == 1) or self._file is not None
        if stages % self._size or not is_right or (is_v and each != 2):
            wanted = {1: "one stage", 2: "two stages", None: "several stages"}[self._held]
            raise self._wrong(
                f"{plural(stages, 'stage')} on {plural(self._size, 'rank')}, but it has {wanted} "
                "on every rank; change pipeline_parallel_layers_per_stage or "
                "module_fqns_per_model_part, or the schedule"
            )
        if self._file is not None or known is None:
            return None
        if known.works is not None and (works := known.works(stages, self._size, share)):
            raise self._wrong(
                f"torch does not run it on {plural(share, 'microbatch', 'es')}, but on {works}; "
                f"change {_LOCAL} or {NAMES.microbatch}"
            )
        if known.order is None:
            return None
        held = [range(rank, stages, self._size) for rank in range(self._size)]
        rows = (tuple(known.order(row, r, self._size, share)) for r, row in enumerate(held))
        return ScheduleTable(tuple(rows), self._name)

    def _wrong(self, problem: str) -> PipeplanError:
        return PipeplanError(f"{self._source}: {_SCHEDULE}: {self._name}: {problem}")


def _names(found: _Fields) -> list[list[str]] | None:
    """Return the names of each stage's modules; None if they are not given."""
    named = found.value(_PARTS)
    if not named:
        return None
    is_list = isinstance(named, list) and all(isinstance(row, list) for row in named)
    if is_list and all(isinstance(name, str) for row in named for name in row):
        return [list(row) for row in named]
    found.wrong(_PARTS, f"{shorten(named)}: expected a list of names for each stage")
    return None


# --- export ---------------------------------------------------------------------------------------

TOOL = "torchtitan"
Rows = Sequence[Sequence[Operation]]
"""Operations of each place of a pipeline."""
MOST_TRIED = 16
"""Pipelines whose order is tried for all."""
PLACEMENTS = {"loop": "PipelineScheduleMulti", "v": "ZBVZeroBubble"}
"""Names of schedules that stand for a placement of stages."""
DTYPES = ("float32", "bfloat16")
"""Types of computation: torchtitan's weights stay in float32, as a plan's masters do."""
USE = """\
in the function that makes your configuration (torchtitan 0.3):
  folder = "FOLDER"
  keys = json.load(open(folder + "/torchtitan.json"))
  keys["parallelism"]["pipeline_parallel_schedule_csv"] = folder + "/schedule.csv"
  config.parallelism = dataclasses.replace(config.parallelism, **keys["parallelism"])
  config.training = dataclasses.replace(config.training, **keys["training"])
start {ranks} processes; rank 0, 1, … must be the devices of "ranks" in FOLDER/stages.json"""


def export(plan: Plan) -> Exported:
    """Return a plan as torchtitan's options, ``schedule.csv`` and ``stages.json``.

    torchtitan places stage s on pipeline rank s mod D, or as a V with two stages a rank if the
    schedule's name is that of a V; the schedule file then says the order, whatever the name
    (``torchtitan/distributed/pipeline_parallel.py``, 0.3.0).

    Args:
        plan: verified.

    Raises:
        PipeplanError: if torchtitan cannot run it: every reason.
    """
    if reason := inside_another(plan.problem.graph.layers):
        raise PipeplanError(f"torchtitan cannot cut {plan.model.name!r}: {reason}")
    problems = [*_module_problems(plan), *loss_problems(plan, TOOL), *_cut_problems(plan)]
    problems += [*_job_problems(plan), *split_problems(plan, TOOL)]
    try:
        replicas = pipeline_replicas_of(plan, otherwise="set replication = false in the job")
    except PipeplanError as error:
        raise PipeplanError([*error.problems, *problems]) from None
    by_pipeline, order = devices_by_stage(plan, replicas), _one_order(plan, replicas)
    places = list(dict.fromkeys(by_pipeline[0]))
    mine = dict(zip(replicas[0].devices, order.rows, strict=True))
    if style_of(by_pipeline[0]) is None:
        problems.append(
            f"stages: are on devices {_shown(by_pipeline[0])}, but {TOOL} supports only a loop "
            "(stage s on rank s mod D) or a V with two stages per rank; plan again with "
            "max_stages_per_device = 1 in the job, or move stages to other devices"
        )
    problems += last_forward_problems(mine, len(plan.stages) - 1, TOOL)
    problems += [f"orders: with {order.name}, {full}" for full in order.overfull]
    if problems:
        raise PipeplanError(problems)
    modules = _modules(plan)
    # The place in the pipeline counts first, the pipeline's number next.
    ranks = ranks_of(plan, by_pipeline)
    files = {
        "torchtitan.json": json.dumps(_keys(plan, by_pipeline, modules), indent=1) + "\n",
        "stages.json": stage_table(plan, ranks, module_fqns_per_model_part=modules),
    }
    use = USE.format(ranks=len(ranks)).splitlines()
    if _is_fsdp_alone(plan):
        use = [line for line in use if "schedule.csv" not in line]
    else:
        files["schedule.csv"] = schedule_csv(mine[place] for place in places)
    return Exported(
        files, tuple(use), (*order.notes, *_export_notes(plan, len(by_pipeline), modules))
    )


def style_of(by_stage: StageDevices) -> Literal["loop", "v"] | None:
    """Return whether stages form a loop (stage s on device s mod D) or a V (down and up again).

    One stage per device is a loop of one round. None if the stages are placed otherwise.
    """
    loop = tuple(dict.fromkeys(by_stage))
    rounds, rest = divmod(len(by_stage), len(loop))
    if not rest and by_stage == loop * rounds:
        return "loop"
    half = by_stage[: len(by_stage) // 2]
    return "v" if by_stage == half + half[::-1] and len(set(half)) == len(half) else None


def _cut_problems(plan: Plan) -> Iterator[str]:
    for cut, tensors in enumerate(crossing(plan)):
        if len(tensors) > 1:
            names = ", ".join(repr(tensor.name) for tensor in tensors[:4])
            yield (
                f"stages[{cut}].layers: {len(tensors)} tensors cross the cut after stage {cut} "
                f"({names}{', …' if len(tensors) > 4 else ''}), but a {TOOL} model part passes on "
                "only one; cut where a single tensor crosses, as `plan --runtime torchtitan` does"
            )
    for name, stages in tied_across_stages(plan).items():
        yield (
            f"stages: the parameter {name!r} is used by stages {listed(stages)}, but {TOOL} ties "
            "no weights across stages; untie it in the model, or move its layers to one stage"
        )


def _job_problems(plan: Plan) -> Iterator[str]:
    """Yield precisions, divided weights in a pipeline, and plans with nothing to pipeline."""
    job, stages = plan.job, len(plan.stages)
    yield from precision_problems(plan, TOOL, DTYPES, " or ".join(DTYPES))
    if job.gradient_precision == "weights" and job.precision == "bfloat16":
        yield (
            f'job.gradient_precision: "weights", but {TOOL} reduces gradients in float32 '
            "(training.mixed_precision_reduce); leave it out and plan again"
        )
    if stages > 1 and job.shards_parameters:
        yield (
            f"job.shard_parameters: true in {stages} stages, but in a pipeline {TOOL} keeps "
            "weights gathered and gradients whole until the end of an iteration; plan with "
            "shard_optimizer = true instead, or with max_stages = 1"
        )
    if _is_fsdp_alone(plan) or len({frozenset(stage.devices) for stage in plan.stages}) > 1:
        return
    devices = plan.stages[0].devices
    where, remedy = f"one device ({devices[0]!r})", "plan for more devices"
    if len(devices) > 1:
        where = f"each of {len(devices)} devices ({_shown(devices)})"
        remedy = "set replication = false in the job and plan again"
    yield (
        f"stages: {plural(stages, 'stage')} on {where}, so there is nothing to pipeline; {TOOL} "
        f"pipelines over two ranks and more: {remedy}, or adopt a layout of two stages or more on "
        "as many devices (`pipeplan adopt`)"
    )


def _is_fsdp_alone(plan: Plan) -> bool:
    """Return whether it is one stage whose replicas divide weights, which needs no pipeline."""
    return len(plan.stages) == 1 and plan.job.shards_parameters


def _shown(devices: Sequence[str]) -> str:
    return ", ".join(devices[:12]) + (", …" if len(devices) > 12 else "")


def _keys(
    plan: Plan, by_pipeline: tuple[StageDevices, ...], modules: list[list[str]]
) -> dict[str, Any]:
    style = style_of(by_pipeline[0])
    assert style is not None
    samples, parallel = plan.job.samples_per_microbatch, plan.tensor_parallel
    groups, shards = {}, len(by_pipeline) if plan.job.shards_state else 1
    # By default FSDP gathers weights once an iteration in a pipeline, and for every forward and
    # every backward without one.
    data = {
        "data_parallel_replicate_degree": len(by_pipeline) // shards,
        "data_parallel_shard_degree": shards,
        **({"fsdp_reshard_after_forward": "default"} if shards > 1 else {}),
    }
    if parallel is not None:
        groups = {
            "tensor_parallel_degree": parallel.degree,
            "enable_sequence_parallel": parallel.sequence,
        }
    pipeline = {
        "pipeline_parallel_schedule": PLACEMENTS[style],
        "pipeline_parallel_schedule_csv": "schedule.csv",
        "pipeline_parallel_microbatch_size": samples,
        "module_fqns_per_model_part": modules,
    }
    # Without a pipeline microbatches are accumulated one by one.
    share = 1 if _is_fsdp_alone(plan) else plan.microbatches // len(by_pipeline)
    return {
        "parallelism": {
            **groups,
            "pipeline_parallel_degree": len(set(by_pipeline[0])),
            **data,
            **({} if _is_fsdp_alone(plan) else pipeline),
        },
        "training": {
            "local_batch_size": share * samples,
            "global_batch_size": plan.microbatches * samples,
            "dtype": "float32",
            "mixed_precision_param": plan.job.precision,
            "mixed_precision_reduce": "float32",
            # torchtitan 0.3.0 refuses CUDA graphs, which are on by default, in a pipeline.
            **({} if _is_fsdp_alone(plan) else {"disable_cuda_graphs": True}),
        },
    }


def _export_notes(plan: Plan, pipelines: int, modules: list[list[str]]) -> Iterator[str]:
    cut_by_entry = (name.partition(".") for stage in modules for name in stage)
    for name in dict.fromkeys(first for first, dot, _ in cut_by_entry if dot):
        yield (
            f"{name!r} is assumed to be a ModuleList or ModuleDict; {TOOL} would drop the contents "
            "of other containers, such as Sequential"
        )
    yield from sync_notes(plan, TOOL)
    yield from reduction_notes(plan, f"{TOOL} reduces those of a stage after its last backward")
    yield from recompute_notes(plan, "config.activation_checkpoint = FullAC.Config()")
    if not any(stage.recompute for stage in plan.stages):
        yield "the plan recomputes nothing: set config.activation_checkpoint = None"
    yield from split_notes(plan, f"{TOOL} splits it unevenly")
    if pipelines > 1 and plan.job.shards_state and not plan.job.shards_parameters:
        yield (
            "shard_optimizer: in a pipeline FSDP gathers weights and reduces gradients once an "
            "iteration, as the plan does; besides whole weights and gradients a rank holds its "
            f"share of both, 1/{pipelines}, which the plan does not count"
        )
    yield from receive_buffer_notes(plan, plan.microbatches // pipelines)


def _modules(plan: Plan) -> list[list[str]]:
    """Return the modules of each stage."""
    return [
        list(dict.fromkeys(module_of(layer) for layer in stage.layers if layer != LOSS))
        for stage in plan.stages
    ]


def _module_problems(plan: Plan) -> Iterator[str]:
    """Yield the modules that the plan's cuts divide."""
    held: dict[str, list[tuple[int, str]]] = {}
    for stage in plan.stages:
        for layer in stage.layers:
            if layer != LOSS:
                held.setdefault(module_of(layer), []).append((stage.index, layer))
    for module, rows in held.items():
        stages = sorted({stage for stage, _ in rows})
        if len(stages) > 1:
            shown = ", ".join(repr(layer) for _, layer in rows[:4])
            which = listed(stages) if len(stages) < 3 else f"{stages[0]} to {stages[-1]}"
            yield (
                f"stages: the module {module!r} (layers {shown}{', …' if len(rows) > 4 else ''}) "
                f"lies in stages {which}, but {TOOL} cuts only at top-level modules and at the "
                f"entries of a top-level ModuleList or ModuleDict; move the layers of {module!r} "
                "to one stage"
            )


class _OneOrder(NamedTuple):
    """The order that all pipelines run.

    Attributes:
        rows: operations of each place of a pipeline, microbatches numbered from 0.
        name: the order as a message names it.
        notes: its predicted cost, if it is not that of every pipeline.
        overfull: devices that need more memory than they have with it.
    """

    rows: Rows
    name: str = "the plan's order"
    notes: tuple[str, ...] = ()
    overfull: tuple[str, ...] = ()


def _one_order(plan: Plan, replicas: Sequence[PipelineReplica]) -> _OneOrder:
    """Return the order of the pipeline that is fastest if all pipelines run it."""
    orders, numbered = plan.parsed_orders(), list[Rows]()
    for replica in replicas:
        number = {microbatch: index for index, microbatch in enumerate(replica.microbatches)}
        mine = [orders[place] for place in replica.devices]
        numbered.append([[Operation(s, k, number[m]) for s, k, m in row] for row in mine])
    if all(rows == numbered[0] for rows in numbered):
        return _OneOrder(numbered[0])
    found = []
    for replica, rows in list(zip(replicas, numbered, strict=True))[:MOST_TRIED]:
        timeline = simulate(place_plan(plan), _on_all(plan, rows, replicas))
        seconds, full = timeline.iteration_time_s, tuple(overfull(timeline))
        name = f"the order of pipeline {replica.index} in all pipelines"
        note = f"{name}: {against(seconds, plan)}"
        found.append(((bool(full), seconds), _OneOrder(rows, name, (note,), full)))
    return min(found, key=lambda row: row[0])[1]


def _on_all(plan: Plan, rows: Rows, replicas: Sequence[PipelineReplica]) -> Orders:
    """Return the same orders of all pipelines, with the plan's own microbatch numbers."""
    found = {
        device: [Operation(s, k, replica.microbatches[m]) for s, k, m in row]
        for replica in replicas
        for device, row in zip(replica.devices, rows, strict=True)
    }
    return {device: found[device] for device in plan.orders}
