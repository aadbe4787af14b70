"""How torchtitan's configuration divides a model into stages, and in which schedule they run.

Where no stages are named, ``torchtitan/distributed/pipeline_parallel.py`` makes them (0.3.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.division import Division, divide
from planner.interop.adopt.layout import Divide
from planner.interop.adopt.orders import Schedule
from planner.interop.adopt.torchtitan_fields import TorchtitanFields
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
_ONE_STAGE = ("1f1b", "gpipe", "pipelineschedulesingle")
_V = ("zbvzerobubble", "dualpipev")


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

    @classmethod
    def of(cls, found: TorchtitanFields, size: int) -> TorchSchedule:
        """Return the schedule by torch's name of it."""
        is_table = bool(found.value("parallelism.pipeline_parallel_schedule_csv"))
        return cls(found.source, _schedule_name(found), is_table, size)

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
    return _equal(found, size)


def _names_of(found: TorchtitanFields, named: Any) -> list[list[str]]:
    is_list = isinstance(named, list) and all(isinstance(row, list) for row in named)
    if is_list and all(isinstance(name, str) for row in named for name in row):
        return [list(row) for row in named]
    found.wrong(
        "parallelism.module_fqns_per_model_part",
        f"{shorten(named)}: expected a list of names for each stage",
    )
    return []


def _equal(found: TorchtitanFields, size: int) -> Divide:
    """Return equal stages, where the embedding and the head count as some blocks."""
    prefix = "parallelism.pipeline_parallel"
    each = found.number(f"{prefix}_layers_per_stage", 0)
    first = found.number(f"{prefix}_first_stage_less_layers", 1, 0)
    last = found.number(f"{prefix}_last_stage_less_layers", 1, 0)
    is_single = _schedule_name(found) in _ONE_STAGE

    def division(graph: LayerGraph) -> Division:
        blocks = len(block_stack(graph).blocks)
        weight = blocks + first + last
        count = -(-weight // each) if each else size * (1 if is_single else 2)
        least, more = divmod(weight, count)
        is_held = count == size if is_single else count > size
        if count % size or not is_held or least < max(first, last, 1):
            raise PipeplanError(
                f"{found.source}: {blocks} blocks, with {first} for the embedding and {last} for "
                f"the head, cannot be {plural(count, 'stage')} on {size} pipeline ranks; change "
                "parallelism.pipeline_parallel_layers_per_stage, or name the stages in "
                "module_fqns_per_model_part"
            )
        numbers = [least + (stage < more) for stage in range(count)]
        numbers[0] -= first
        numbers[-1] -= last
        rows = ["t" * number for number in numbers]
        rows[0] = "E" + rows[0]
        rows[-1] += "L"
        return divide(graph, render_layout(rows), found.source)

    return division
