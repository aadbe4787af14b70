"""Plans made of given stages under a given schedule, without a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.cluster.group_packing import group_named
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.errors import DeadlockError, PipeplanError
from planner.interop.division import Division, divide
from planner.interop.torch_pipelining import ScheduleTable
from planner.model.blocks import first_blocks
from planner.plan.operations import Orders, compress_devices, stages_label
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.plan.unsupported import require_decided
from planner.prediction import replay
from planner.schedules.pipelines import largest_share, orders_of_pipelines, spread_over
from planner.schedules.placements import DoesNotApplyError
from planner.schedules.published import SPLIT, WHOLE, Rule
from planner.simulation.simulator import simulate
from planner.units import format_bytes, plural

PipelineDevices = tuple[tuple[str, ...], ...]
"""The device of each stage, for each pipeline."""
Schedule = str | ScheduleTable | None
SCHEDULES: dict[str, Rule] = {
    name.replace(" ", "-"): generator for name, generator in (WHOLE | SPLIT).items()
}
"""Published schedules by their names on the command line."""
V_SHAPED = ("zb-v", "dualpipe-v")
"""Their stages go down the ranks and up again."""


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
    """Return a plan of stages that already run, in place of a search.

    Stage i is on pipeline rank i mod ``pipeline_size``, in a V for ``zb-v`` and ``dualpipe-v``, or
    where the table of a schedule says. The plan need not fit into memory: :func:`planner.verify`
    tells.

    Args:
        problem: the model, cluster and job.
        stages: a layout of Megatron-LM, such as ``"Et*3|(tt|)*4L"``, or the names of modules or
            layers for each stage, such as torchtitan's ``module_fqns_per_model_part``.
        schedule: a name of :data:`SCHEDULES`, or a table; by default 1F1B, interleaved where a rank
            holds several stages.
        pipeline_size: ranks of a pipeline; by default as many as stages.
        replicas: equal pipelines, each on its share of the microbatches.
        devices: of rank 0's replicas, then rank 1's, and so on, those of a tensor-parallel group
            (``tensor_parallel`` of the job) next to each other; by default the cluster's.
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
    schedule: Schedule = None,
    pipeline_size: int | None = None,
    replicas: int = 1,
    devices: Sequence[str] | None = None,
    recompute_blocks: int | None = 0,
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
    rank_of = _ranks(schedule, len(division), pipeline_size)
    size = max(rank_of) + 1
    names = _devices(problem.cluster, size, replicas, degree, devices)
    groups = [names[first : first + degree] for first in range(0, len(names), degree)]
    on_groups, parallel = problem, None
    if degree > 1:
        named = tuple(map(group_named, groups))
        names = tuple(group.name for group in named)
        parallel = TensorParallel(
            degree=degree, sequence=problem.job.sequence_parallel, groups=named
        )
        on_groups = grouped_problem(problem, parallel)
    # Replicas of a rank are neighbours, in the order of ranks of Megatron-LM and torch.
    pipelines = tuple(
        tuple(names[rank * replicas + replica] for rank in rank_of) for replica in range(replicas)
    )
    pipeline = _placed(on_groups, division, pipelines, recompute_blocks)
    if isinstance(schedule, ScheduleTable):
        name = f"the table {schedule.source}"
    else:
        name = schedule or ("interleaved-1f1b" if len(rank_of) > size else "1f1b")
    try:
        plan = plan_by_hand(pipeline, _orders(pipeline, pipelines, schedule or name))
    except DeadlockError as error:
        raise PipeplanError(f"{name}: {error}; correct the order of one of them") from None
    solver = {"solver": f"none: adopted with {name}"}
    plan = plan.model_copy(update={"provenance": plan.provenance.model_copy(update=solver)})
    if parallel is not None:
        job = problem.job.model_copy(update={"backward": plan.job.backward})
        plan = plan.of_problem(replace(problem, job=job), parallel)
    return Adopted(plan, name, pipelines)


def _placed(
    problem: Problem, division: Division, pipelines: PipelineDevices, recompute_blocks: int | None
) -> PlacedPipeline:
    """Return the stages on the devices of their pipelines.

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


# --- ranks and devices ----------------------------------------------------------------------------


def require_schedule(name: str | None) -> None:
    """Refuse an unknown published schedule; None is allowed.

    Raises:
        PipeplanError: naming those that there are.
    """
    if name is not None and name not in SCHEDULES:
        raise PipeplanError(
            f"schedule {name}: no such schedule; choose from {', '.join(SCHEDULES)}, or give its "
            "table (--schedule)"
        )


def _ranks(schedule: Schedule, stages: int, size: int | None) -> tuple[int, ...]:
    """Return the rank of each stage: as the table says, or in turn, or in a V.

    Raises:
        PipeplanError: if stages, ranks and schedule do not fit together.
    """
    if isinstance(schedule, ScheduleTable):
        problems = list(_table_problems(schedule, stages, size))
        if problems:
            raise PipeplanError(problems)
        return tuple(schedule.rank_of[stage] for stage in range(stages))
    require_schedule(schedule)
    is_v = schedule in V_SHAPED
    if size is None:
        size = stages // 2 if is_v and stages > 1 else stages
    if size < 1 or stages % size:
        raise PipeplanError(
            f"pipeline_size {size}: does not divide the {plural(stages, 'stage')}; every rank "
            "holds equally many"
        )
    if is_v and stages != 2 * size:
        raise PipeplanError(
            f"pipeline_size {size}: a schedule in the form of a V has two stages on every rank, "
            f"there are {plural(stages, 'stage')}; use another schedule or {2 * size} stages"
        )
    turn = tuple(range(size))
    return turn + turn[::-1] if is_v else turn * (stages // size)


def _table_problems(table: ScheduleTable, stages: int, size: int | None) -> Iterator[str]:
    """Yield what is wrong with the table's stages; each must be in exactly one row."""
    rows_of: dict[int, list[int]] = {}
    for number, row in enumerate(table.rows, start=1):
        for stage in dict.fromkeys(op.stage for op in row):
            rows_of.setdefault(stage, []).append(number)
    unknown = sorted(stage for stage in rows_of if stage >= stages)
    if unknown:
        yield (
            f"{table.source}: row {rows_of[unknown[0]][0]} runs stage {unknown[0]}, there are "
            f"{plural(stages, 'stage')}, numbered from 0; divide the model into as many as the "
            "schedule has"
        )
    missing = [stage for stage in range(stages) if stage not in rows_of]
    if missing:
        yield (
            f"{table.source}: no row runs stage {missing[0]} of {stages}; divide the model into as "
            "many stages as the schedule has"
        )
    for stage, rows in sorted(rows_of.items()):
        if len(rows) > 1:
            yield (
                f"{table.source}: stage {stage} is in rows {', '.join(map(str, rows))}; a stage is "
                "on one rank, for data parallelism give one pipeline's table and replicas"
            )
    if size not in (None, len(table.rows)):
        yield (
            f"pipeline_size {size}: {table.source} has {plural(len(table.rows), 'row')}, one for "
            "each rank; leave pipeline_size out"
        )


def _devices(
    cluster: Cluster, size: int, replicas: int, degree: int, given: Sequence[str] | None
) -> tuple[str, ...]:
    """Return the devices of all ranks: those that were given, or the cluster's first.

    Raises:
        PipeplanError: if they are unknown, named twice, or not as many as are needed.
    """
    if replicas < 1:
        raise PipeplanError(f"replicas {replicas}: expected 1 or more")
    needed, known = size * replicas * degree, cluster.device_names
    named = tuple(known if given is None else given)
    problems = [
        f"devices: the cluster {cluster.name!r} has no device {name!r}; it has "
        f"{', '.join(known[:8])}{', …' if len(known) > 8 else ''}"
        for name in dict.fromkeys(named)
        if name not in known
    ]
    if twice := [name for name in dict.fromkeys(named) if named.count(name) > 1]:
        problems.append(f"devices: {', '.join(twice)} named several times; name each once")
    if len(named) < needed or (given is not None and len(named) > needed):
        where = f"the cluster {cluster.name!r} has" if given is None else "devices names"
        of_groups = f" in groups of {degree}" if degree > 1 else ""
        problems.append(
            f"{where} {plural(len(named), 'device')}, {plural(size, 'pipeline rank')} of "
            f"{plural(replicas, 'replica')}{of_groups} are {needed}; use other pipeline_size, "
            "replicas or devices"
        )
    if problems:
        raise PipeplanError(problems)
    return named[:needed]


# --- orders ---------------------------------------------------------------------------------------


def _orders(
    pipeline: PlacedPipeline, pipelines: PipelineDevices, schedule: str | ScheduleTable
) -> Orders:
    """Return the orders of all devices.

    Raises:
        PipeplanError: if the schedule is not defined for the stages, naming those that are, or the
            table is not one of these microbatches.
    """
    if isinstance(schedule, ScheduleTable):
        problems = list(_microbatch_problems(schedule, pipeline.microbatches, len(pipelines)))
        if problems:
            raise PipeplanError(problems)
        return spread_over(pipelines, schedule.rows, pipeline.microbatches)
    try:
        return orders_of_pipelines(pipeline, pipelines, SCHEDULES[schedule])
    except DoesNotApplyError as error:
        others = ", ".join(name for name, _ in _applying(pipeline, pipelines)) or "none"
        raise PipeplanError(
            f"schedule {schedule}: {error}; defined for these stages are: {others}"
        ) from None


def _applying(pipeline: PlacedPipeline, pipelines: PipelineDevices) -> Iterator[tuple[str, Orders]]:
    """Yield all published schedules that are defined for the placed stages, by name."""
    for name, generator in SCHEDULES.items():
        try:
            yield name, orders_of_pipelines(pipeline, pipelines, generator)
        except DoesNotApplyError:
            continue


def _microbatch_problems(table: ScheduleTable, microbatches: int, pipelines: int) -> Iterator[str]:
    """Yield stages that do not run each microbatch once: F and B, or F, I and W."""
    share = largest_share(microbatches, pipelines)
    found = 1 + max(op.microbatch for row in table.rows for op in row)
    if found != share:
        each = f" of each of {pipelines} pipelines" if pipelines > 1 else ""
        yield (
            f"{table.source}: runs {plural(found, 'microbatch', 'es')}, the job has {share}{each}; "
            f"set microbatches = {found * pipelines} in the job file, or give a schedule of {share}"
        )
        return
    kinds: dict[tuple[int, int], list[str]] = {}
    for op in (op for row in table.rows for op in row):
        kinds.setdefault((op.stage, op.microbatch), []).append(op.kind)
    for (stage, rank), microbatch in product(sorted(table.rank_of.items()), range(share)):
        has = sorted(kinds.get((stage, microbatch), ()), key="FBIW".index)
        if "".join(has) not in ("FB", "FIW"):
            yield (
                f"{table.source}: row {rank + 1}: stage {stage} runs "
                f"{', '.join(has) or 'nothing'} of microbatch {microbatch}; it needs F and then B, "
                "or F, I and W, once each"
            )


# --- memory ---------------------------------------------------------------------------------------


def overflow_problems(found: Adopted) -> list[str]:
    """Return a line for each device that exceeds memory and one of remedies; empty if all fits."""
    timeline = replay(found.plan)
    pipeline = timeline.pipeline
    alike: dict[tuple[tuple[int, ...], int, int], list[str]] = {}
    for device, over in timeline.overflow_bytes.items():
        row = (pipeline.stages_on[device], timeline.peak_memory_bytes[device], over)
        alike.setdefault(row, []).append(device)
    problems = []
    for (stages, peak, over), devices in alike.items():
        static = sum(pipeline.stages[stage].static_bytes for stage in stages)
        problems.append(
            f"{stages_label(stages)} on {compress_devices(devices)}: peak {format_bytes(peak)} (of "
            f"which {format_bytes(static)} weights, gradients and optimizer state), but the device "
            f"has {format_bytes(peak - over)}, {format_bytes(over)} too little"
        )
    if problems:
        problems.append(
            f"{_what_fits(found, pipeline)}; --allow-overflow writes the plan as it is, for "
            "`pipeplan explain`"
        )
    return problems


def _what_fits(found: Adopted, pipeline: PlacedPipeline) -> str:
    """Return the options with which these stages fit: recomputation, other schedules, or both."""
    problem, pipelines = found.plan.problem, found.pipelines

    def schedules(of: PlacedPipeline) -> list[str]:
        names = [name for name, orders in _applying(of, pipelines) if _fits(of, orders)]
        return [f"--schedule {', '.join(names)}"] if names else []

    helps = schedules(pipeline)
    if problem.job.recompute and not any(stage.spec.recompute for stage in pipeline.stages):
        division = tuple(stage.layers for stage in found.plan.stages)
        again = _placed(problem, division, pipelines, None)
        if _fits(again, found.plan.parsed_orders()):
            helps = ["--recompute", *helps]
        elif not helps:
            helps = [f"--recompute {names}" for names in schedules(again)]
    if helps:
        return f"it would fit with {' or '.join(helps)}"
    return (
        "neither --recompute nor another schedule of these stages fits: use more stages, smaller "
        "microbatches (samples_per_microbatch), a lighter optimizer or larger devices"
    )


def _fits(pipeline: PlacedPipeline, orders: Orders) -> bool:
    """Rules for other stages may deadlock with these."""
    try:
        return not simulate(pipeline, orders).overflow_bytes
    except DeadlockError:
        return False
