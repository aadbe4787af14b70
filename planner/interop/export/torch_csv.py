"""Export to torch's own pipelining: the schedule file of ``_PipelineScheduleRuntime``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import pairwise

from planner.costs.gradients import sums_in_float32
from planner.errors import PipeplanError
from planner.interop.export.cuts import (
    loss_problems,
    replicated_problems,
    skipping,
    tied_across_stages,
)
from planner.interop.export.exported import Exported, stage_table
from planner.interop.export.notes import receive_buffer_notes, recompute_notes
from planner.model.blocks import LOSS
from planner.plan.operations import Operation, Orders
from planner.plan.plan import Plan
from planner.units import listed


def schedule_csv(orders: Iterable[Sequence[Operation]]) -> str:
    """Return the text of a schedule file, for ``_load_csv(…, format="compute_only")``.

    No cell is blank: torch reads blanks as idle time and drops them when it adds communication.

    Args:
        orders: of rank 0, rank 1, ….
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(str, order) for order in orders)
    return text.getvalue()


def last_forward_problems(orders: Orders, last: int, tool: str) -> list[str]:
    """Return a line if a forward of the last stage follows one of a later microbatch.

    torch keeps the losses in the order in which they are made, and takes microbatch m's to be the
    m-th (``_PipelineSchedule._maybe_get_loss``, torch 2.13): other orders fail or, worse, train on
    wrong gradients.

    Args:
        orders: of one pipeline, by device.
        last: the last stage.
        tool: as the line names it.
    """
    for device, order in orders.items():
        forwards = [row.microbatch for row in order if row.stage == last and row.kind == "F"]
        for before, after in pairwise(forwards):
            if after < before:
                return [
                    f"orders[{device!r}]: {last}F{after} comes after {last}F{before}, but {tool} "
                    "takes the losses to be in the order of microbatches; number the "
                    "microbatches in the order of the last stage's forwards"
                ]
    return []


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
    """A plan as ``schedule.csv`` and ``stages.json``.

    Args:
        plan: verified.

    Raises:
        PipeplanError: if torch's runtime cannot run it: every reason.
    """
    problems = [
        *replicated_problems(plan, TOOL),
        *last_forward_problems(plan.parsed_orders(), len(plan.stages) - 1, TOOL),
        *loss_problems(plan, TOOL),
    ]
    if problems:
        raise PipeplanError(problems)
    orders = plan.parsed_orders()
    return Exported(
        files={
            "schedule.csv": schedule_csv(orders[device] for device in plan.ranks),
            "stages.json": stage_table(plan, plan.rank_devices),
        },
        use=tuple(_use(plan)),
        notes=tuple(_notes(plan)),
    )


def _use(plan: Plan) -> list[str]:
    lines = USE.format(microbatches=plan.microbatches).splitlines()
    if plan.degree > 1:
        sizes = {"degree": plan.degree, "last": plan.degree - 1, "rows": len(plan.ranks)}
        lines += GROUPS_USE.format(**sizes).splitlines()
    return lines


_IN_FLOAT32 = (
    "torch sums gradients in the type of the weights: set parameter.grad_dtype of each trainable "
    "parameter to torch.float32, as the plan counts them"
)


def _notes(plan: Plan) -> list[str]:
    return [
        *_cut_notes(plan),
        *([_IN_FLOAT32] * sums_in_float32(plan.job)),
        *recompute_notes(plan, "torch.utils.checkpoint"),
        *receive_buffer_notes(plan, plan.microbatches),
    ]


def _cut_notes(plan: Plan) -> list[str]:
    notes = []
    if any(LOSS in stage.layers for stage in plan.stages):
        notes.append(f"the layer {LOSS!r} is no module: give it as loss_fn")
    skips = skipping(plan)
    if skips:
        tensor, first, last = skips[0]
        more = f", and {len(skips) - 1} more tensors skip stages" if skips[1:] else ""
        notes.append(
            f"tensor {tensor.name!r} goes from stage {first} to stage {last}{more}; torch sends to "
            "the next stage only, so stages between hand it on (stages.json: receives, sends)"
        )
    for name, stages in tied_across_stages(plan).items():
        held_by = listed(stages)
        notes.append(
            f"parameter {name!r} is used by stages {held_by}; sum its gradients over their ranks "
            "before the optimizer's step"
        )
    return notes
