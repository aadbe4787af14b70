"""Pipeline ranks, devices and orders of an adopted schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import PipeplanError
from planner.interop.importing.schedule_csv import ScheduleTable
from planner.plan.operations import Orders
from planner.schedules.pipelines import largest_share, orders_of_pipelines, spread_over
from planner.schedules.placements import DoesNotApplyError
from planner.schedules.published import SPLIT, WHOLE, Rule
from planner.units import plural

PipelineDevices = tuple[tuple[str, ...], ...]
"""The device of each stage, for each pipeline."""


SCHEDULES: dict[str, Rule] = {
    name.replace(" ", "-"): generator for name, generator in (WHOLE | SPLIT).items()
}
"""Published schedules by their names on the command line."""
V_SHAPED = ("zb-v", "dualpipe-v")
"""They have stages go down the ranks and up again."""
Schedule = str | ScheduleTable | None


class RankLayout(NamedTuple):
    """The ranks of a pipeline, and the rank of each stage."""

    size: int
    rank_of: tuple[int, ...]


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


def ranks_of(schedule: Schedule, stages: int, size: int | None) -> RankLayout:
    """Return the rank of each stage: from the table, or by the schedule's placement.

    Stage i is on rank i mod the number of ranks, or in a V: down the ranks and up again.

    Args:
        schedule: its name or table.
        stages: their number.
        size: ranks; None for as many as stages, or half as many of a V.

    Raises:
        PipeplanError: if stages, ranks and schedule do not fit together.
    """
    if isinstance(schedule, ScheduleTable):
        return _ranks_of_table(schedule, stages, size)
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
    return RankLayout(size, turn + turn[::-1] if is_v else turn * (stages // size))


def pipelines_on(names: Sequence[str], ranks: RankLayout, replicas: int) -> PipelineDevices:
    """Return the device of every stage in every pipeline, in Megatron-LM's and torch's rank order.

    Device number ``rank * replicas + replica`` is that replica of the rank's stages: replicas of a
    rank are neighbours.

    Args:
        names: of the devices, of single ones or groups, one for each rank of each replica.
        ranks: of one pipeline.
        replicas: equal pipelines.
    """
    return tuple(
        tuple(names[rank * replicas + replica] for rank in ranks.rank_of)
        for replica in range(replicas)
    )


def devices_in_order(
    cluster: Cluster,
    ranks: RankLayout,
    replicas: int,
    devices: Sequence[str] | None,
    degree: int = 1,
) -> tuple[str, ...]:
    """Return the devices of all ranks, those of a tensor-parallel group next to each other.

    Args:
        cluster: whose devices they are.
        ranks: of one pipeline.
        replicas: equal pipelines.
        devices: by name; None for the cluster's first, in its order.
        degree: devices of a group.

    Raises:
        PipeplanError: if they are unknown, named twice, or not as many as are needed.
    """
    if replicas < 1:
        raise PipeplanError(f"replicas {replicas}: expected 1 or more")
    needed = ranks.size * replicas * degree
    named = tuple(cluster.device_names if devices is None else devices)
    problems = [] if devices is None else _wrong(cluster, named)
    if len(named) < needed or (devices is not None and len(named) > needed):
        where = f"the cluster {cluster.name!r} has" if devices is None else "devices names"
        of_groups = f" in groups of {degree}" if degree > 1 else ""
        problems.append(
            f"{where} {plural(len(named), 'device')}, {plural(ranks.size, 'pipeline rank')} of "
            f"{plural(replicas, 'replica')}{of_groups} are {needed}; use other pipeline_size, "
            "replicas or devices"
        )
    if problems:
        raise PipeplanError(problems)
    return named[:needed]


def _wrong(cluster: Cluster, named: Sequence[str]) -> list[str]:
    known = set(cluster.device_names)
    problems = [
        f"devices: the cluster {cluster.name!r} has no device {name!r}; it has "
        f"{', '.join(cluster.device_names[:8])}{', …' if len(known) > 8 else ''}"
        for name in dict.fromkeys(named)
        if name not in known
    ]
    twice = [name for name in dict.fromkeys(named) if named.count(name) > 1]
    if twice:
        problems.append(f"devices: {', '.join(twice)} named several times; name each once")
    return problems


def _ranks_of_table(table: ScheduleTable, stages: int, size: int | None) -> RankLayout:
    problems = list(_stage_problems(table, stages))
    if size not in (None, len(table.rows)):
        problems.append(
            f"pipeline_size {size}: {table.source} has {plural(len(table.rows), 'row')}, one "
            "for each rank; leave pipeline_size out"
        )
    if problems:
        raise PipeplanError(problems)
    return RankLayout(len(table.rows), tuple(table.rank_of[stage] for stage in range(stages)))


def _stage_problems(table: ScheduleTable, stages: int) -> Iterator[str]:
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


def schedule_name(schedule: Schedule, ranks: RankLayout) -> str:
    """Return the schedule's name: 1F1B by default, interleaved if ranks hold several stages."""
    if isinstance(schedule, ScheduleTable):
        return f"the table {schedule.source}"
    is_interleaved = len(ranks.rank_of) > ranks.size
    return schedule or ("interleaved-1f1b" if is_interleaved else "1f1b")


def orders_by(
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
        others = ", ".join(name for name, _ in orders_that_apply(pipeline, pipelines)) or "none"
        raise PipeplanError(
            f"schedule {schedule}: {error}; defined for these stages are: {others}"
        ) from None


def orders_that_apply(
    pipeline: PlacedPipeline, pipelines: PipelineDevices
) -> Iterator[tuple[str, Orders]]:
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
