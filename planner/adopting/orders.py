"""The orders of an adopted schedule: a published one by name, or a table."""

from __future__ import annotations

from collections.abc import Iterator

from planner.adopting.ranks import Lanes, Ranks, ranks_in_turn
from planner.costs.placement import PlacedPipeline
from planner.errors import PipeplanError
from planner.importing.schedule_csv import ScheduleTable
from planner.schedule.classics import SPLIT, WHOLE, DoesNotApplyError, Generator
from planner.schedule.equal_pipelines import orders_of_pipelines, share_of, spread_over
from planner.simulator import Orders
from planner.units import plural

SCHEDULES: dict[str, Generator] = {
    name.replace(" ", "-"): generator for name, generator in (WHOLE | SPLIT).items()
}
"""Published schedules by their names on the command line."""
V_SHAPED = ("zb-v", "dualpipe-v")
"""They have stages go down the ranks and up again."""
Schedule = str | ScheduleTable | None


def ranks_of(schedule: Schedule, stages: int, size: int | None) -> Ranks:
    """How stages lie on ranks: as the table says, or in turn as the schedule asks.

    Raises:
        PipeplanError: if stages, ranks and schedule do not fit together.
    """
    if isinstance(schedule, ScheduleTable):
        return _ranks_of_table(schedule, stages, size)
    require_schedule(schedule)
    return ranks_in_turn(stages, size, is_v=schedule in V_SHAPED)


def require_schedule(name: str | None) -> None:
    """Raise unless there is such a published schedule, or none is told.

    Raises:
        PipeplanError: naming those that there are.
    """
    if name is not None and name not in SCHEDULES:
        raise PipeplanError(
            f"schedule {name}: no such schedule; choose from {', '.join(SCHEDULES)}, or give its "
            "table (--schedule-csv)"
        )


def _ranks_of_table(table: ScheduleTable, stages: int, size: int | None) -> Ranks:
    problems = list(_stage_problems(table, stages))
    if size not in (None, len(table.rows)):
        problems.append(
            f"pipeline_size {size}: {table.source} has {plural(len(table.rows), 'row')}, one "
            "for each rank; leave pipeline_size out"
        )
    if problems:
        raise PipeplanError(problems)
    return Ranks(len(table.rows), tuple(table.rank_of[stage] for stage in range(stages)))


def _stage_problems(table: ScheduleTable, stages: int) -> Iterator[str]:
    """The table runs the stages there are, each in one row."""
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


def default_schedule(ranks: Ranks) -> str:
    """1F1B, interleaved where a rank holds several stages."""
    return "interleaved-1f1b" if ranks.is_loop else "1f1b"


def schedule_name(schedule: Schedule, ranks: Ranks) -> str:
    """What the schedule is called."""
    if isinstance(schedule, ScheduleTable):
        return f"the table {schedule.source}"
    return schedule or default_schedule(ranks)


def orders_by(pipeline: PlacedPipeline, lanes: Lanes, schedule: str | ScheduleTable) -> Orders:
    """The orders of all devices.

    Raises:
        PipeplanError: if the schedule is not defined for the stages, naming those that are, or the
            table is not one of these microbatches.
    """
    if isinstance(schedule, ScheduleTable):
        problems = list(_microbatch_problems(schedule, pipeline.microbatches, len(lanes)))
        if problems:
            raise PipeplanError(problems)
        return spread_over(lanes, schedule.rows)
    try:
        return orders_of_pipelines(pipeline, lanes, SCHEDULES[schedule])
    except DoesNotApplyError as error:
        others = ", ".join(name for name, _ in orders_that_apply(pipeline, lanes)) or "none"
        raise PipeplanError(
            f"schedule {schedule}: {error}; defined for these stages are: {others}"
        ) from None


def orders_that_apply(pipeline: PlacedPipeline, lanes: Lanes) -> Iterator[tuple[str, Orders]]:
    """All published schedules that are defined for the stages as they lie, by name."""
    for name, generator in SCHEDULES.items():
        try:
            yield name, orders_of_pipelines(pipeline, lanes, generator)
        except DoesNotApplyError:
            continue


def _microbatch_problems(table: ScheduleTable, microbatches: int, pipelines: int) -> Iterator[str]:
    """Each stage runs each microbatch of the job once: F and B, or F, I and W."""
    share = share_of(microbatches, pipelines)
    found = 1 + max(op.microbatch for row in table.rows for op in row)
    if found != share:
        each = f" of each of {pipelines} pipelines" if pipelines > 1 else ""
        yield (
            f"{table.source}: runs {plural(found, 'microbatch', 'es')}, the job has {share}{each}; "
            f"set microbatches = {found * pipelines} in the job file, or give a schedule of {share}"
        )
        return
    kinds: dict[tuple[int, int], list[str]] = {}
    for row in table.rows:
        for op in row:
            kinds.setdefault((op.stage, op.microbatch), []).append(op.kind)
    for stage, rank in sorted(table.rank_of.items()):
        for microbatch in range(share):
            has = "".join(sorted(kinds.get((stage, microbatch), ()), key="FBIW".index))
            if has not in ("FB", "FIW"):
                yield (
                    f"{table.source}: row {rank + 1}: stage {stage} runs "
                    f"{', '.join(has) or 'nothing'} of microbatch {microbatch}; it needs F and "
                    "then B, or F, I and W, once each"
                )
