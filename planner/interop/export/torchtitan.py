"""Export to torchtitan: the modules of each model part, and the schedule file.

Checked against torchtitan 0.3.0, ``torchtitan/distributed/pipeline_parallel.py``. It places stage s
on pipeline rank s mod D, or as a V with two stages a rank if the schedule's name is that of a V;
the schedule file then says the order, whatever the name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from planner.costs.placement import place_plan
from planner.errors import PipeplanError
from planner.interop.export.cuts import (
    StageDevices,
    crossing,
    loss_problems,
    stage_devices_of,
    style_of,
    tied_across_stages,
)
from planner.interop.export.exported import (
    Exported,
    split_notes,
    split_problems,
    stage_table,
)
from planner.interop.export.notes import (
    against,
    overfull,
    receive_buffer_notes,
    recompute_notes,
    reduction_notes,
)
from planner.interop.export.torch_csv import last_forward_problems, schedule_csv
from planner.model.blocks import LOSS, module_of
from planner.plan.operations import Operation, Orders
from planner.plan.plan import Plan
from planner.plan.runtimes import inside_another
from planner.simulation.simulator import simulate
from planner.sync.pipeline_replicas import PipelineReplica, pipeline_replicas_of
from planner.units import listed, plural

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

    Args:
        plan: verified.

    Raises:
        PipeplanError: if torchtitan cannot run it: every reason.
    """
    if reason := inside_another(plan.problem.graph.layers):
        raise PipeplanError(f"torchtitan cannot cut {plan.model.name!r}: {reason}")
    problems = [*_module_problems(plan), *loss_problems(plan, TOOL), *_cut_problems(plan)]
    problems += [*_job_problems(plan), *_pipeline_problems(plan), *split_problems(plan, TOOL)]
    try:
        replicas = pipeline_replicas_of(plan, otherwise="set replication = false in the job")
    except PipeplanError as error:
        raise PipeplanError([*error.problems, *problems]) from None
    by_pipeline, order = stage_devices_of(plan, replicas), _one_order(plan, replicas)
    places = list(dict.fromkeys(by_pipeline[0]))
    mine = dict(zip(replicas[0].devices, order.rows, strict=True))
    problems += _placement_problems(by_pipeline[0])
    problems += last_forward_problems(mine, len(plan.stages) - 1, TOOL)
    problems += [f"orders: with {order.name}, {full}" for full in order.overfull]
    if problems:
        raise PipeplanError(problems)
    modules = _modules(plan)
    # The place in the pipeline counts first, the pipeline's number next.
    rows = [list(dict.fromkeys(devices)) for devices in by_pipeline]
    names = [name for row in zip(*rows, strict=True) for name in row]
    ranks = [device for name in names for device in plan.members(name)]
    files = {
        "torchtitan.json": json.dumps(_keys(plan, by_pipeline, modules), indent=1) + "\n",
        "stages.json": stage_table(plan, ranks, module_fqns_per_model_part=modules),
    }
    lines = USE.format(ranks=len(ranks)).splitlines()
    if _is_fsdp_alone(plan):
        lines = [line for line in lines if "schedule.csv" not in line]
    else:
        files["schedule.csv"] = schedule_csv(mine[place] for place in places)
    return Exported(files, tuple(lines), tuple(_notes(plan, by_pipeline, modules, order)))


def _cut_problems(plan: Plan) -> Iterator[str]:
    for cut, tensors in enumerate(crossing(plan)):
        if len(tensors) > 1:
            names = ", ".join(repr(tensor.name) for tensor in tensors[:4])
            yield (
                f"stages[{cut}].layers: {len(tensors)} tensors cross the cut after stage {cut} "
                f"({names}{', …' if len(tensors) > 4 else ''}), but a {TOOL} model part passes on "
                f"only one; cut where a single tensor crosses, as `plan --runtime torchtitan` does"
            )
    for name, stages in tied_across_stages(plan).items():
        held_by = listed(stages)
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
    if plan.job.gradient_precision == "weights" and plan.job.precision == "bfloat16":
        yield (
            f'job.gradient_precision: "weights", but {TOOL} reduces gradients in float32 '
            "(training.mixed_precision_reduce); leave it out and plan again"
        )


def _is_fsdp_alone(plan: Plan) -> bool:
    """Return whether it is one stage whose replicas divide weights, which needs no pipeline."""
    return len(plan.stages) == 1 and plan.job.shards_parameters


def _pipeline_problems(plan: Plan) -> Iterator[str]:
    """Yield why there is nothing to pipeline, or why a pipeline cannot hold the weights so."""
    if len(plan.stages) > 1 and plan.job.shards_parameters:
        yield (
            f"job.shard_parameters: true in {len(plan.stages)} stages, but in a pipeline {TOOL} "
            "keeps weights gathered and gradients whole until the end of an iteration; plan with "
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
        f"stages: {plural(len(plan.stages), 'stage')} on {where}, so there is nothing to pipeline; "
        f"{TOOL} pipelines over two ranks and more: {remedy}, or adopt a layout of two stages or "
        "more on as many devices (`pipeplan adopt`)"
    )


def _placement_problems(by_stage: StageDevices) -> Iterator[str]:
    if style_of(by_stage) is None:
        yield (
            f"stages: are on devices {_shown(by_stage)}, but {TOOL} supports only a loop (stage s "
            "on rank s mod D) or a V with two stages per rank; plan again with "
            "max_stages_per_device = 1 in the job, or move stages to other devices"
        )


def _shown(devices: Sequence[str]) -> str:
    return ", ".join(devices[:12]) + (", …" if len(devices) > 12 else "")


def _keys(
    plan: Plan, by_pipeline: tuple[StageDevices, ...], modules: list[list[str]]
) -> dict[str, Any]:
    style = style_of(by_pipeline[0])
    assert style is not None
    samples, parallel = plan.job.samples_per_microbatch, plan.tensor_parallel
    groups = {}
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
            **_data_parallel(plan, len(by_pipeline)),
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


def _data_parallel(plan: Plan, pipelines: int) -> dict[str, Any]:
    """Return how pipelines hold the model: whole, or in shards of FSDP.

    By default these gather weights once an iteration in a pipeline, and for every forward and every
    backward without one.
    """
    if pipelines == 1 or not plan.job.shards_state:
        return {"data_parallel_replicate_degree": pipelines, "data_parallel_shard_degree": 1}
    return {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": pipelines,
        "fsdp_reshard_after_forward": "default",
    }


def _notes(
    plan: Plan, by_pipeline: tuple[StageDevices, ...], modules: list[list[str]], order: _OneOrder
) -> Iterator[str]:
    yield from order.notes
    cut_by_entry = (name.partition(".") for stage in modules for name in stage)
    for name in dict.fromkeys(first for first, dot, _ in cut_by_entry if dot):
        yield (
            f"{name!r} is assumed to be a ModuleList or ModuleDict; {TOOL} would drop the contents "
            f"of other containers, such as Sequential"
        )
    if len(by_pipeline) > 1 and plan.sync.strategy != "all_reduce":
        yield f"sync: {plan.sync.strategy!r} is not exported; {TOOL} averages gradients every step"
    yield from reduction_notes(plan, f"{TOOL} reduces those of a stage after its last backward")
    yield from recompute_notes(plan, "config.activation_checkpoint = FullAC.Config()")
    if not any(stage.recompute for stage in plan.stages):
        yield "the plan recomputes nothing: set config.activation_checkpoint = None"
    yield from split_notes(plan, f"{TOOL} splits it unevenly")
    if len(by_pipeline) > 1 and plan.job.shards_state and not plan.job.shards_parameters:
        yield (
            "shard_optimizer: in a pipeline FSDP gathers weights and reduces gradients once an "
            "iteration, as the plan does; besides whole weights and gradients a rank holds its "
            f"share of both, 1/{len(by_pipeline)}, which the plan does not count"
        )
    yield from receive_buffer_notes(plan, plan.microbatches // len(by_pipeline))


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
        note = f"{name}: {against(seconds, plan.predicted.iteration_time_s)}"
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
