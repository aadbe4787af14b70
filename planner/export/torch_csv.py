"""For torch's own pipelining: the schedule file of ``_PipelineScheduleRuntime``."""

from __future__ import annotations

from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.export.cuts import LOSS, loss_problems, skipping, tied_across_stages
from planner.export.exported import Exported
from planner.export.placement import replicated_problems
from planner.export.receive_buffers import receive_buffer_notes
from planner.export.recomputation import recompute_notes
from planner.export.schedule_csv import last_forward_problems, schedule_csv
from planner.export.stage_table import stage_table

TOOL = "torch's pipeline runtime"
USE = """\
in your script, on every rank, with the PipelineStages that FOLDER/stages.json gives it:
  folder = "FOLDER"
  from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
  schedule = _PipelineScheduleRuntime(my_stages, n_microbatches={microbatches}, loss_fn=loss_fn)
  schedule._load_csv(folder + "/schedule.csv", format="compute_only")
  schedule.step(batch, target=target)  # batch only with stage 0, target only with the last stage"""


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
            "stages.json": stage_table(plan, plan.ranks),
        },
        use=tuple(USE.format(microbatches=plan.microbatches).splitlines()),
        notes=tuple(_notes(plan)),
    )


def _notes(plan: Plan) -> list[str]:
    return [
        *_cut_notes(plan),
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
        held_by = " and ".join(map(str, stages))
        notes.append(
            f"parameter {name!r} is used by stages {held_by}; sum its gradients over their ranks "
            "before the optimizer's step"
        )
    return notes
