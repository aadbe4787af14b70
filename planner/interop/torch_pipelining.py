"""torch.distributed.pipelining: its schedule files read, and plans exported to its runtime.

A file has a row for each rank and cells such as ``2F0``: stage, one of F B I W, microbatch.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.costs.gradients import sums_in_float32
from planner.errors import PipeplanError, shorten
from planner.interop.exported import (
    Exported,
    last_forward_problems,
    loss_problems,
    receive_buffer_notes,
    recompute_notes,
    spans,
    stage_table,
    tied_across_stages,
)
from planner.model.blocks import LOSS
from planner.plan.operations import Operation, parse_operation
from planner.plan.plan import Plan
from planner.records.document import read_text
from planner.units import and_more, listed

_COMMUNICATION = re.compile(r"[0-9]+(?:(?:SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class ScheduleTable:
    """The operations of each rank of a pipeline, in order.

    Attributes:
        rows: operations by rank; a stage is on the rank whose row names it.
        source: where the table stands, for messages.
    """

    rows: tuple[tuple[Operation, ...], ...]
    source: str = "schedule"

    @property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {op.stage: rank for rank, row in enumerate(self.rows) for op in row}


def read_schedule_csv(path: Path) -> ScheduleTable:
    """Read a schedule file, of computations alone or lowered with communication.

    Communication (SEND, RECV, UNSHARD, RESHARD, REDUCE_GRAD) is left out: what is sent follows from
    the stages. An overlapped pair, ``(0F1;1B0)OVERLAP_F_B``, counts as its two operations one after
    the other.

    Raises:
        PipeplanError: naming row, cell and word of what is no action, or a row without any.
    """
    try:
        cells = list(csv.reader(read_text(path).splitlines()))
    except csv.Error as error:
        raise PipeplanError(f"{path}: {error}; expected a CSV file, a row for each rank") from None
    if not cells:
        raise PipeplanError(f"{path}: it is empty; expected a row of actions for each rank")
    problems: list[str] = []
    rows = tuple(
        tuple(_operations(row, f"{path}: row {number}", problems))
        for number, row in enumerate(cells, start=1)
    )
    if not problems:
        problems = [
            f"{path}: row {rank + 1} (rank {rank}) has no F, B, I or W; remove it, or give it some"
            for rank, operations in enumerate(rows)
            if not operations
        ]
    if problems:
        raise PipeplanError(problems)
    return ScheduleTable(rows, str(path))


def _operations(row: list[str], place: str, problems: list[str]) -> Iterator[Operation]:
    for number, cell in enumerate(row, start=1):
        word = cell.strip()
        pair = _PAIR.fullmatch(word)
        for part in map(str.strip, pair[1].split(";") if pair else [word]):
            operation = parse_operation(part)
            if operation is not None:
                yield operation
            elif part and not _COMMUNICATION.fullmatch(part):
                problems.append(
                    f"{place}, cell {number} is {shorten(word)}: expected an action such as 2F0 "
                    "(stage, one of F B I W, microbatch), or nothing for idle time"
                )


def schedule_csv(orders: Iterable[Sequence[Operation]]) -> str:
    """Return the text of a schedule file, for ``_load_csv(…, format="compute_only")``.

    No cell is blank: torch reads blanks as idle time and drops them when it adds communication.

    Args:
        orders: of rank 0, rank 1, ….
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(str, order) for order in orders)
    return text.getvalue()


# --- export ---------------------------------------------------------------------------------------

TOOL = "torch's pipeline runtime"
USE = """\
in your script, on every rank, with the PipelineStages that FOLDER/stages.json gives it:
  folder = "FOLDER"
  from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
  schedule = _PipelineScheduleRuntime(my_stages, n_microbatches={microbatches}, loss_fn=loss_fn)
  schedule._load_csv(folder + "/schedule.csv", format="compute_only")
  schedule.step(batch, target=target)  # batch only with stage 0, target only with the last stage"""
GROUPS_USE = """\
row r of schedule.csv is for ranks {degree}r to {degree}r + {last}, a tensor-parallel group
  mesh = init_device_mesh(device, ({rows}, {degree}), mesh_dim_names=("pp", "tp"))
  parallelize_module(my_module, mesh["tp"], my_plan)  # as pipeplan trace --split {degree} says
  PipelineStage(my_module, …, group=mesh.get_group("pp"))"""


def export(plan: Plan) -> Exported:
    """Return a plan as ``schedule.csv`` and ``stages.json``, for ``_PipelineScheduleRuntime``.

    Args:
        plan: verified.

    Raises:
        PipeplanError: if torch's runtime cannot run it: every reason.
    """
    orders = plan.parsed_orders()
    problems = [
        *_replica_problems(plan),
        *last_forward_problems(orders, len(plan.stages) - 1, TOOL),
        *loss_problems(plan, TOOL),
    ]
    if problems:
        raise PipeplanError(problems)
    use = USE.format(microbatches=plan.microbatches).splitlines()
    if plan.degree > 1:
        sizes = {"degree": plan.degree, "last": plan.degree - 1, "rows": len(plan.ranks)}
        use += GROUPS_USE.format(**sizes).splitlines()
    return Exported(
        files={
            "schedule.csv": schedule_csv(orders[device] for device in plan.ranks),
            "stages.json": stage_table(plan, plan.rank_devices),
        },
        use=tuple(use),
        notes=tuple(_notes(plan)),
    )


def _replica_problems(plan: Plan) -> Iterator[str]:
    found = [stage for stage in plan.stages if len(stage.devices) > 1]
    if found:
        devices = found[0].devices
        yield (
            f"stages[{found[0].index}].devices: {len(devices)} replicas "
            f"({', '.join(devices[:4])}{', …' if len(devices) > 4 else ''})"
            f"{and_more(len(found) - 1, 'stage')}, but {TOOL} has one rank per stage; plan again "
            "with replication = false in the job"
        )


def _notes(plan: Plan) -> Iterator[str]:
    if any(LOSS in stage.layers for stage in plan.stages):
        yield f"the layer {LOSS!r} is no module: give it as loss_fn"
    if skips := [row for row in spans(plan) if row[2] - row[1] > 1]:
        tensor, first, last = skips[0]
        more = f", and {len(skips) - 1} more tensors skip stages" if skips[1:] else ""
        yield (
            f"tensor {tensor.name!r} goes from stage {first} to stage {last}{more}; torch sends to "
            "the next stage only, so stages between hand it on (stages.json: receives, sends)"
        )
    for name, stages in tied_across_stages(plan).items():
        yield (
            f"parameter {name!r} is used by stages {listed(stages)}; sum its gradients over their "
            "ranks before the optimizer's step"
        )
    if sums_in_float32(plan.job):
        yield (
            "torch sums gradients in the type of the weights: set parameter.grad_dtype of each "
            "trainable parameter to torch.float32, as the plan counts them"
        )
    yield from recompute_notes(plan, "torch.utils.checkpoint")
    yield from receive_buffer_notes(plan, plan.microbatches)
