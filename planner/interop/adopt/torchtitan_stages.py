"""How torchtitan's configuration divides a model into stages, and in which schedule they run.

Where no stages are named, ``torchtitan/distributed/pipeline_parallel.py`` makes them (b5bcd76).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.division import Division, divide
from planner.interop.adopt.layout import Divide
from planner.interop.adopt.orders import Schedule
from planner.interop.importing.megatron_layout import render_layout
from planner.interop.importing.schedule_csv import read_schedule_csv
from planner.model.blocks import block_stack
from planner.model.layer_graph import LayerGraph
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
_PIPELINES = tuple(
    f"pipeline_parallel_{name}"
    for name in (
        "degree",
        "split_points",
        "schedule",
        "schedule_csv",
        "layers_per_stage",
        "microbatches",
    )
)
OLDER: Mapping[str, tuple[str, ...]] = {
    **{f"parallelism.{name}": (f"experimental.{name}",) for name in _PIPELINES},
    "parallelism.context_parallel_degree": ("experimental.context_parallel_degree",),
    "parallelism.enable_async_tensor_parallel": ("experimental.enable_async_tensor_parallel",),
    **{
        f"parallelism.{name}": (f"training.{name}",)
        for name in (
            "data_parallel_replicate_degree",
            "fsdp_reshard_after_forward",
            "tensor_parallel_degree",
        )
    },
    "parallelism.data_parallel_shard_degree": (
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",
    ),
    "training.local_batch_size": ("training.batch_size",),
}
"""Names before torchtitan 0.1, where degrees were part of the training (git history of
``torchtitan/config_manager.py``: db6b39a of September 2024 has those of HSDP, 5940dde of February
2025 the resharding)."""
_ONE_STAGE = ("1f1b", "gpipe", "pipelineschedulesingle")


@dataclass
class TorchtitanFields:
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
        """Return the value of a field, perhaps by an older name; None if it is not there."""
        return self.data_at(self.called(name))

    def called(self, name: str) -> str:
        """Return what the file calls a field: by its name if it has neither that nor an older."""
        names = (name, *OLDER.get(name, ()))
        return next((known for known in names if self.data_at(known) is not None), name)

    def data_at(self, name: str) -> Any:
        """Return the value of a field by this name alone."""
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
        called = self.called(name) if "." in name else name
        self.problems.append(f"{self.source}: {called}: {problem}")


def schedule_of(found: TorchtitanFields) -> Schedule:
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


def _schedule_name(found: TorchtitanFields) -> str:
    return str(found.value("parallelism.pipeline_parallel_schedule") or "1F1B").lower()


def division_of(found: TorchtitanFields, size: int) -> Divide:
    """Return how the model is divided: as named, at the points told, or equally."""
    named = found.value("parallelism.module_fqns_per_model_part")
    points = found.value("parallelism.pipeline_parallel_split_points")
    if size == 1:
        return lambda graph: (tuple(graph.layers),)
    if named:
        rows = _names_of(found, named)
        return partial(divide, stages=rows, source=f"{found.source}: module_fqns_per_model_part")
    if points:
        listed = points.split(",") if isinstance(points, str) else points
        return partial(_divided_at, found.source, [str(point) for point in listed])
    return _Equal.of(found, size).divide


def _names_of(found: TorchtitanFields, named: Any) -> list[list[str]]:
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
    def of(cls, found: TorchtitanFields, size: int) -> _Equal:
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
