"""For torchtitan: which modules each model part keeps, and the schedule file.

Checked against torchtitan 0.3.0, ``torchtitan/distributed/pipeline_parallel.py``. It places stage s
on pipeline rank s mod D, or as a V with two stages a rank if the schedule's name is that of a V;
the schedule file then says the order, whatever the name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.export.cuts import crossing, loss_problems, tied_across_stages
from planner.export.exported import Exported
from planner.export.modules import lists_of, modules_of_stages
from planner.export.one_order import OneOrder, one_order
from planner.export.placement import Way, style_of, ways_of
from planner.export.receive_buffers import receive_buffer_notes
from planner.export.recomputation import recompute_notes
from planner.export.schedule_csv import last_forward_problems, schedule_csv
from planner.export.stage_table import stage_table
from planner.sync.lanes import lanes_of

TOOL = "torchtitan"
PLACEMENTS = {"loop": "PipelineScheduleMulti", "v": "ZBVZeroBubble"}
"""Names of schedules that stand for a placement of stages."""
DTYPES = ("float32", "bfloat16")
"""Of computation: torchtitan's weights stay in float32, as the masters do that a plan counts."""
USE = """\
in a config of yours (torchtitan 0.3):
  folder = "FOLDER"
  keys = json.load(open(folder + "/torchtitan.json"))
  keys["parallelism"]["pipeline_parallel_schedule_csv"] = folder + "/schedule.csv"
  config.parallelism = dataclasses.replace(config.parallelism, **keys["parallelism"])
  config.training = dataclasses.replace(config.training, **keys["training"])
start {ranks} processes; rank 0, 1, … must be the devices of "ranks" in FOLDER/stages.json"""


def export(plan: Plan) -> Exported:
    """A plan as ``torchtitan.json``, ``schedule.csv`` and ``stages.json``.

    Args:
        plan: verified.

    Raises:
        PipeplanError: if torchtitan cannot run it: every reason.
    """
    modules, problems = modules_of_stages(plan, TOOL)
    problems += [*loss_problems(plan, TOOL), *_cut_problems(plan), *_job_problems(plan)]
    problems += _one_stage_problems(plan)
    try:
        lanes = lanes_of(plan, otherwise="set replication = false in the job")
    except PipeplanError as error:
        raise PipeplanError([*error.problems, *problems]) from None
    ways, order = ways_of(plan, lanes), one_order(plan, lanes)
    problems += [*_placement_problems(ways), *_order_problems(plan, ways[0], order)]
    if problems:
        raise PipeplanError(problems)
    ranks = _ranks(ways)
    table = stage_table(plan, ranks, module_fqns_per_model_part=modules)
    return Exported(
        files={
            "torchtitan.json": json.dumps(_keys(plan, ways, modules), indent=1) + "\n",
            "schedule.csv": schedule_csv(order.orders[place] for place in dict.fromkeys(ways[0])),
            "stages.json": table,
        },
        use=tuple(USE.format(ranks=len(ranks)).splitlines()),
        notes=tuple(_notes(plan, ways, modules, order)),
    )


def _cut_problems(plan: Plan) -> Iterator[str]:
    for cut, tensors in enumerate(crossing(plan)):
        if len(tensors) > 1:
            names = ", ".join(repr(tensor.name) for tensor in tensors[:4])
            yield (
                f"stages[{cut}].layers: {len(tensors)} tensors cross the cut behind stage {cut} "
                f"({names}{', …' if len(tensors) > 4 else ''}), but a model part of {TOOL} hands "
                "on one; cut where a single tensor crosses (`pipeplan trace` shows the tensors)"
            )
    for name, stages in tied_across_stages(plan).items():
        held_by = " and ".join(map(str, stages))
        yield (
            f"stages: the parameter {name!r} is used by stages {held_by}, but {TOOL} ties no "
            "weights across stages; untie it in the model, or move its layers to one stage"
        )


def _job_problems(plan: Plan) -> Iterator[str]:
    if plan.job.precision not in DTYPES:
        yield (
            f"job.precision: {plan.job.precision!r}, but {TOOL} trains in "
            f"{' or '.join(DTYPES)}; plan again with one of these"
        )


def _one_stage_problems(plan: Plan) -> Iterator[str]:
    if len(plan.stages) > 1:
        return
    devices = plan.stages[0].devices
    if len(devices) > 1:
        yield (
            f"stages: one stage with {len(devices)} replicas ({_shown(devices)}), so there is "
            f"nothing to pipeline; {TOOL} pipelines over two stages and more: set replication = "
            "false in the job and plan again, or adopt a layout of two stages or more "
            "(`pipeplan adopt`)"
        )
    else:
        yield (
            f"stages: one stage on one device ({devices[0]!r}), so there is nothing to pipeline; "
            f"{TOOL} pipelines over two ranks and more: plan for more devices, or adopt a layout "
            "of two stages or more (`pipeplan adopt`)"
        )


def _placement_problems(ways: tuple[Way, ...]) -> Iterator[str]:
    way = ways[0]
    if len(way) == 1:
        return  # Told already.
    if len(set(way)) == 1:
        where, remedy = f"({way[0]!r})", "plan for more devices"
        if len(ways) > 1:
            where = f"in each of {len(ways)} pipelines ({_shown([way[0] for way in ways])})"
            remedy = "set replication = false in the job and plan again"
        yield (
            f"stages: all on one device {where}; {TOOL} pipelines over two ranks and more: {remedy}"
        )
    elif style_of(way) is None:
        yield (
            f"stages: on the devices {_shown(way)} in turn, but {TOOL} goes round D ranks (stage s "
            "on rank s mod D), or down and up again with two stages a rank; plan again with "
            "max_stages_per_device = 1 in the job, or move stages to other devices"
        )


def _shown(devices: Sequence[str]) -> str:
    return ", ".join(devices[:12]) + (", …" if len(devices) > 12 else "")


def _order_problems(plan: Plan, way: Way, order: OneOrder) -> list[str]:
    mine = {place: order.orders[place] for place in dict.fromkeys(way)}
    return [
        *last_forward_problems(mine, len(plan.stages) - 1, TOOL),
        *(f"orders: with {order.told}, {full}" for full in order.overfull),
    ]


def _ranks(ways: tuple[Way, ...]) -> list[str]:
    """The device of each rank: the pipeline's place counts first, its number next."""
    places = [list(dict.fromkeys(way)) for way in ways]
    return [device for row in zip(*places, strict=True) for device in row]


def _keys(plan: Plan, ways: tuple[Way, ...], modules: list[list[str]]) -> dict[str, Any]:
    style = style_of(ways[0])
    assert style is not None
    samples = plan.job.samples_per_microbatch
    return {
        "parallelism": {
            "pipeline_parallel_degree": len(set(ways[0])),
            "data_parallel_replicate_degree": len(ways),
            "data_parallel_shard_degree": 1,
            "pipeline_parallel_schedule": PLACEMENTS[style],
            "pipeline_parallel_schedule_csv": "schedule.csv",
            "pipeline_parallel_microbatch_size": samples,
            "module_fqns_per_model_part": modules,
        },
        "training": {
            "local_batch_size": plan.microbatches // len(ways) * samples,
            "global_batch_size": plan.microbatches * samples,
            "dtype": "float32",
            "mixed_precision_param": plan.job.precision,
            "mixed_precision_reduce": "float32",
        },
    }


def _notes(
    plan: Plan, ways: tuple[Way, ...], modules: list[list[str]], order: OneOrder
) -> Iterator[str]:
    yield from order.notes
    for name in lists_of(modules):
        yield (
            f"{name!r} is taken for a ModuleList or ModuleDict; of another container, such as "
            f"Sequential, {TOOL} would keep nothing"
        )
    if len(ways) > 1 and plan.sync.strategy != "all_reduce":
        yield f"sync: {plan.sync.strategy!r} is not carried; {TOOL} averages gradients every step"
    yield from recompute_notes(plan, "config.activation_checkpoint = FullAC.Config()")
    if not any(stage.recompute for stage in plan.stages):
        yield "the plan recomputes nothing: set config.activation_checkpoint = None"
    yield from receive_buffer_notes(plan, plan.microbatches // len(ways))
