"""How torchtitan's configuration divides a model into stages, and in which schedule they run.

Where no stages are named, ``torchtitan/distributed/pipeline_parallel.py`` makes them (0.3.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.division import Division, divide
from planner.interop.adopt.layout import Divide
from planner.interop.adopt.orders import Schedule
from planner.interop.importing.megatron_layout import render_layout
from planner.interop.importing.schedule_csv import ScheduleTable, read_schedule_csv
from planner.model.blocks import block_stack
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation, in_turn
from planner.units import plural

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "interleavedzerobubble": "interleaved-1f1b",
    "loopedbfs": "looped-breadth-first",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
"""Our names of torch's schedules, compared without regard to case; the orders of two are torch's
own, :meth:`TorchSchedule.table`."""
RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_type": "parallelism.data_parallel_shard_degree",
    "parallelism.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "parallelism.num_pp_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "training.num_tokens_per_microbatch_per_dp_rank": "training.local_batch_size",
    "training.num_tokens_per_train_step": "training.global_batch_size",
}
"""Fields of other versions that 0.3.0 has by another name."""
_ONE_STAGE = ("1f1b", "gpipe", "pipelineschedulesingle")
_V = ("zbvzerobubble", "dualpipev")


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
        """Return the value of a field; None if it is not there."""
        section, _, key = name.partition(".")
        return self.table(section).get(key)

    def table(self, section: str) -> Mapping[str, Any]:
        """Return a table of the file; an empty one if it has none."""
        table = self.data.get(section) or {}
        if isinstance(table, Mapping):
            return table
        self.wrong(section, f"{shorten(table)}: expected a table")
        return {}

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


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule of torch by its name, with the numbers that it takes (torch 2.13, schedules.py).

    Attributes:
        source: the file, for messages.
        name: in lower case.
        is_table: whether a file has the order, and the name only places stages.
        size: pipeline ranks.
    """

    source: str
    name: str
    is_table: bool
    size: int

    def table(self, stages: int, share: int) -> ScheduleTable | None:
        """Return the order where it is not that of the schedule's name here.

        torch's looped breadth-first schedule runs backwards from the last microbatch to the first,
        Lamy-Poirier's from the first to the last. Its interleaved zero-bubble schedule is
        interleaved 1F1B with half as long a warm-up, whose rank r runs the weight gradients of the
        backward r before.

        Args:
            stages: of all ranks.
            share: microbatches of a pipeline.

        Raises:
            PipeplanError: with the numbers that work, if torch refuses these.
        """
        each = stages // self.size
        takes_one = self.name in _ONE_STAGE and not self.is_table
        wanted = "one stage" if takes_one else "two stages" if self.name in _V else "several stages"
        if stages % self.size or (takes_one != (each == 1) and not self.is_table):
            raise self._wrong(
                f"{plural(stages, 'stage')} on {plural(self.size, 'rank')}, but it has {wanted} on "
                "every rank; change pipeline_parallel_layers_per_stage or "
                "module_fqns_per_model_part, or the schedule"
            )
        if self.name in _V and each != 2:
            raise self._wrong(f"{each} stages on every rank, but it has two; name two for each")
        works = None if self.is_table else self._numbers(stages, share)
        if works:
            raise self._wrong(
                f"torch does not run it on {plural(share, 'microbatch', 'es')}, but on {works}; "
                "change training.local_batch_size or "
                "parallelism.pipeline_parallel_microbatch_size"
            )
        make = {"loopedbfs": _breadth_first, "interleavedzerobubble": _zero_bubble}.get(self.name)
        if make is None or self.is_table:
            return None
        held = [range(rank, stages, self.size) for rank in range(self.size)]
        rows = (tuple(make(row, rank, self.size, share)) for rank, row in enumerate(held))
        return ScheduleTable(tuple(rows), self.name)

    def _numbers(self, stages: int, share: int) -> str | None:
        """Return the numbers of microbatches that work; None if this one does."""
        if self.name in ("1f1b", "dualpipev") and share < stages:
            return f"{stages} or more"
        if self.name.startswith("interleaved") and share % max(1, share // self.size):
            works = [n for n in range(1, share + self.size) if not n % max(1, n // self.size)]
            return " or ".join(map(str, (max(n for n in works if n < share), works[-1])))
        return None

    def _wrong(self, problem: str) -> PipeplanError:
        return PipeplanError(
            f"{self.source}: parallelism.pipeline_parallel_schedule: {self.name}: {problem}"
        )


def _breadth_first(held: Sequence[int], rank: int, size: int, share: int) -> Iterator[Operation]:
    del rank, size
    forward = [Operation(stage, "F", m) for stage in held for m in range(share)]
    yield from (*forward, *(row._replace(kind="B") for row in reversed(forward)))


def _zero_bubble(held: Sequence[int], rank: int, size: int, share: int) -> Iterator[Operation]:
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


def schedule_of(found: TorchtitanFields) -> Schedule:
    """Return the schedule file, or the schedule by its name."""
    table = found.value("parallelism.pipeline_parallel_schedule_csv")
    if table:
        return read_schedule_csv(Path(found.source).parent / str(table))
    name = _schedule_name(found)
    if name not in SCHEDULES:
        found.wrong(
            "parallelism.pipeline_parallel_schedule",
            f"{shorten(name)}: expected one of 1F1B, GPipe, Interleaved1F1B, "
            "InterleavedZeroBubble, LoopedBFS, ZBVZeroBubble, DualPipeV, or a file in "
            "pipeline_parallel_schedule_csv",
        )
    return SCHEDULES.get(name)


def torch_schedule(found: TorchtitanFields, size: int) -> TorchSchedule:
    """Return the schedule by torch's name of it."""
    is_table = bool(found.value("parallelism.pipeline_parallel_schedule_csv"))
    return TorchSchedule(found.source, _schedule_name(found), is_table, size)


def _schedule_name(found: TorchtitanFields) -> str:
    return str(found.value("parallelism.pipeline_parallel_schedule") or "1F1B").lower()


def division_of(found: TorchtitanFields, size: int) -> Divide:
    """Return how the model is divided: as named, or equally."""
    named = found.value("parallelism.module_fqns_per_model_part")
    if size == 1:
        return lambda graph: (tuple(graph.layers),)
    if named:
        rows = _names_of(found, named)
        return partial(divide, stages=rows, source=f"{found.source}: module_fqns_per_model_part")
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
