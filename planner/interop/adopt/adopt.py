"""A plan made from given stages under a given schedule, without a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.assembly import plan_by_hand
from planner.cluster.group_packing import group_named
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.errors import DeadlockError, PipeplanError
from planner.interop.adopt.division import Division, divide
from planner.interop.adopt.orders import (
    PipelineDevices,
    Schedule,
    devices_in_order,
    orders_by,
    orders_that_apply,
    pipelines_on,
    ranks_of,
    schedule_name,
)
from planner.interop.importing.schedule_csv import ScheduleTable
from planner.job import Job
from planner.model.blocks import first_blocks
from planner.plan.operations import Orders, compress_devices, stages_label
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.plan.unsupported import require_decided
from planner.prediction import replay
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.units import format_bytes


@dataclass(frozen=True)
class Adopted:
    """A plan and what it was put together from.

    Attributes:
        plan: as it is run.
        schedule: its name.
        pipelines: the device of each stage, for each pipeline.
    """

    plan: Plan
    schedule: str
    pipelines: PipelineDevices


def adopt(
    problem: Problem,
    stages: str | Sequence[Sequence[str]],
    *,
    schedule: Schedule = None,
    pipeline_size: int | None = None,
    replicas: int = 1,
    devices: Sequence[str] | None = None,
    recompute: bool = False,
) -> Plan:
    """A plan of what already runs, in place of a search.

    Stage i is on pipeline rank i mod ``pipeline_size``, in a V for ``zb-v`` and ``dualpipe-v``, or
    where the table of a schedule says. The plan need not fit into memory: :func:`planner.verify`
    tells.

    Args:
        problem: the model, cluster and job.
        stages: a layout of Megatron-LM, such as ``"Et*3|(tt|)*4L"``, or the names of modules or
            layers for each stage, such as torchtitan's ``module_fqns_per_model_part``.
        schedule: a name of :data:`planner.interop.adopt.orders.SCHEDULES`, or a table; 1F1B if it
        is
            not told, interleaved where a rank holds several stages.
        pipeline_size: ranks of a pipeline; as many as stages if it is not told.
        replicas: equal pipelines, each on its share of the microbatches.
        devices: of rank 0's replicas, then rank 1's, and so on, those of a tensor-parallel group
            (``tensor_parallel`` of the job) next to each other; the cluster's if not told.
        recompute: whether every numbered block runs again in the backward; every layer where the
            model has none.

    Raises:
        PipeplanError: naming what of it is wrong.
    """
    return adopted(
        problem,
        divide(problem.graph, stages),
        schedule=schedule,
        pipeline_size=pipeline_size,
        replicas=replicas,
        devices=devices,
        recompute_blocks=None if recompute else 0,
    ).plan


def adopted(
    problem: Problem,
    division: Division,
    *,
    schedule: Schedule,
    pipeline_size: int | None,
    replicas: int,
    devices: Sequence[str] | None,
    recompute_blocks: int | None,
) -> Adopted:
    """Return the plan of :func:`adopt` for stages given by their layers, with its parts.

    Args:
        problem: see :func:`adopt`.
        division: the layers of each stage.
        schedule: see :func:`adopt`.
        pipeline_size: see :func:`adopt`.
        replicas: see :func:`adopt`.
        devices: see :func:`adopt`.
        recompute_blocks: numbered blocks at the start of every stage that run again; None: all, or
            every layer where the model has none.

    Raises:
        PipeplanError: naming what of it is wrong.
    """
    require_decided(problem.job, "adopt")
    degree = problem.job.tensor_parallel
    if degree == "any":
        raise PipeplanError(
            'tensor_parallel = "any": an adopted plan has one size of groups; set it to the number '
            "of devices of a tensor-parallel group"
        )
    ranks = ranks_of(schedule, len(division), pipeline_size)
    names = devices_in_order(problem.cluster, ranks, replicas, devices, degree)
    parallel = _groups_of(problem.job, names)
    on_groups = problem if parallel is None else grouped_problem(problem, parallel)
    held = names if parallel is None else [group.name for group in parallel.groups]
    pipelines = pipelines_on(held, ranks, replicas)
    pipeline = placed(on_groups, division, pipelines, recompute_blocks)
    name = schedule_name(schedule, ranks)
    table = schedule if isinstance(schedule, ScheduleTable) else name
    try:
        plan = plan_by_hand(pipeline, orders_by(pipeline, pipelines, table))
    except DeadlockError as error:
        raise PipeplanError(f"{name}: {error}; correct the order of one of them") from None
    solver = {"solver": f"none: adopted with {name}"}
    plan = plan.model_copy(update={"provenance": plan.provenance.model_copy(update=solver)})
    if parallel is not None:
        job = problem.job.model_copy(update={"backward": plan.job.backward})
        plan = plan.of_problem(replace(problem, job=job), parallel)
    return Adopted(plan, name, pipelines)


def _groups_of(job: Job, names: Sequence[str]) -> TensorParallel | None:
    """Return the groups that devices form, which are listed one group after the other."""
    degree = job.tensor_parallel
    if degree == 1 or degree == "any":
        return None
    groups = (names[first : first + degree] for first in range(0, len(names), degree))
    return TensorParallel(
        degree=degree, sequence=job.sequence_parallel, groups=tuple(map(group_named, groups))
    )


def placed(
    problem: Problem, division: Division, pipelines: PipelineDevices, recompute_blocks: int | None
) -> PlacedPipeline:
    """Return the stages on the devices of their pipelines.

    Args:
        problem: whose devices they are.
        division: the layers of each stage.
        pipelines: the device of each stage, for each pipeline.
        recompute_blocks: see :func:`adopted`.

    Raises:
        PipeplanError: if two devices that must exchange data have no path of links.
    """
    if recompute_blocks is None:
        blocks = [first_blocks(stage, len(stage)) for stage in division]
        again = blocks if any(blocks) else list(division)
    else:
        again = [first_blocks(stage, recompute_blocks) for stage in division]
    rows = zip(division, zip(*pipelines, strict=True), again, strict=True)
    pipeline = place(problem, [StageSpec(*row) for row in rows])
    if not is_connected(pipeline):
        raise PipeplanError(
            "devices: two of them that exchange data have no route between them; choose others "
            "or add links to the cluster file"
        )
    return pipeline


def overflow_problems(adopted: Adopted) -> list[str]:
    """Return a line for each device that exceeds memory and one of remedies; empty if all fits."""
    timeline = replay(adopted.plan)
    problems = list(_overflows(timeline))
    if problems:
        advice = _what_fits(adopted, timeline.pipeline)
        problems.append(
            f"{advice}; --allow-overflow writes the plan as it is, for `pipeplan explain`"
        )
    return problems


def _overflows(timeline: Timeline) -> Iterator[str]:
    """Yield a line for each group of replicas that exceeds memory by the same amount."""
    pipeline = timeline.pipeline
    alike: dict[tuple[tuple[int, ...], int, int], list[str]] = {}
    for device, over in timeline.overflow_bytes.items():
        row = (pipeline.stages_on[device], timeline.peak_memory_bytes[device], over)
        alike.setdefault(row, []).append(device)
    for (stages, peak, over), devices in alike.items():
        static = sum(pipeline.stages[stage].static_bytes for stage in stages)
        yield (
            f"{stages_label(stages)} on {compress_devices(devices)}: peak {format_bytes(peak)} (of "
            f"which {format_bytes(static)} weights, gradients and optimizer state), but the device "
            f"has {format_bytes(peak - over)}, {format_bytes(over)} too little"
        )


def _what_fits(adopted: Adopted, pipeline: PlacedPipeline) -> str:
    division = tuple(stage.layers for stage in adopted.plan.stages)
    problem, helps = adopted.plan.problem, _schedules_that_fit(pipeline, adopted)
    recomputes = any(stage.spec.recompute for stage in pipeline.stages)
    if problem.job.recompute and not recomputes:
        again = placed(problem, division, adopted.pipelines, None)
        if _fits(again, adopted.plan.parsed_orders()):
            helps = ["--recompute", *helps]
        elif not helps:
            helps = [f"--recompute {names}" for names in _schedules_that_fit(again, adopted)]
    if helps:
        return f"it would fit with {' or '.join(helps)}"
    return (
        "neither --recompute nor another schedule of these stages fits: use more stages, smaller "
        "microbatches (samples_per_microbatch), a lighter optimizer or larger devices"
    )


def _schedules_that_fit(pipeline: PlacedPipeline, adopted: Adopted) -> list[str]:
    """Return the option with published schedules of the same stages that fit, if there are any."""
    applying = orders_that_apply(pipeline, adopted.pipelines)
    names = [name for name, orders in applying if _fits(pipeline, orders)]
    return [f"--schedule {', '.join(names)}"] if names else []


def _fits(pipeline: PlacedPipeline, orders: Orders) -> bool:
    """Rules for other stages may deadlock with these."""
    try:
        return not simulate(pipeline, orders).overflow_bytes
    except DeadlockError:
        return False
