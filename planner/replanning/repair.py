"""First plans after a change of machines: the old stages repaired, and cut again a little."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planner.costs.placement import is_connected, place
from planner.plan.plan import Plan
from planner.replanning.groups import OldStage, Repairs, divided
from planner.replanning.recut import Groups, Recut
from planner.replanning.state import State
from planner.search.budget import SearchWork, TimeSlice
from planner.search.partition.chain import Partition
from planner.search.schedule.heuristic import quick_estimate_s
from planner.search.state import Candidate, Search
from planner.variants.machine_changes import NewMachines

SURE = 2
"""The repair that promises most and the one that moves least are scheduled in any case."""
MOST_ESTIMATES = 8
"""Repairs with the least bounds that a quick schedule judges, whatever they move."""
LESS = 0.995
"""A repair that moves more must promise to be faster by this factor."""


class Repaired(NamedTuple):
    """A repaired partition, what it moves, and what it promises."""

    moved_bytes: int
    time_s: float
    partition: Partition


def repair(
    search: Search, plan: Plan, machines: NewMachines, state: State, time: TimeSlice
) -> None:
    """Schedule the old plan's stages on what is left, in ways that move few bytes.

    Args:
        search: of the new problem.
        plan: that training ran by.
        machines: of the new problem.
        state: what devices hold.
        time: for repairs; the first few are scheduled in any case.
    """
    recut = Recut(search.chain, state, _cuts(search, plan))
    found = list(_bounded(search, recut, _groups(search, plan, machines), time))
    _schedule_best(search, found, time, SURE)
    while search.best is not None and _may_go_on(search, time):
        before_s = search.best_s
        found = list(_bounded(search, recut, _smaller(search, search.best), time))
        _schedule_best(search, found, time)
        if search.best_s >= before_s:
            return


def _schedule_best(
    search: Search, bounded: Sequence[Repaired], time: TimeSlice, sure: int = 0
) -> None:
    """Schedule the most promising while there is time, the first few of them in any case."""
    estimated = [
        _estimated(search, row) for row in _promising(bounded) if sure or _may_go_on(search, time)
    ]
    for number, row in enumerate(_in_order(_front(estimated))):
        if number >= sure and not _may_go_on(search, time):
            return
        if row.time_s < search.best_s or number < sure:
            search.consider(row.partition)


def _smaller(search: Search, best: Candidate) -> Iterator[Groups]:
    """Return the fastest plan's groups, one of them divided."""
    groups = tuple(stage.devices for stage in best.partition)
    return (found for found in divided(groups) if len(found) <= search.max_stages)


def _may_go_on(search: Search, time: TimeSlice) -> bool:
    return search.best is None or (time.has_time() and not search.is_done())


def _bounded(
    search: Search, recut: Recut, variants: Iterable[Groups], time: TimeSlice
) -> Iterator[Repaired]:
    """Yield all repairs with a bound, for half of the time; the first groups in any case."""
    begin_s, known = search.clock.elapsed_s, set(search.candidates)
    for groups in variants:
        for partition in recut.partitions(groups):
            search.clock.charge(SearchWork.PLACED_STAGE, len(partition))
            if partition in known or not search.allows(partition):
                continue
            known.add(partition)
            moved = recut.state.moved_bytes(search.chain, partition)
            yield Repaired(moved, _bound_s(search, partition), partition)
        if search.clock.elapsed_s - begin_s >= time.end_s / 2:
            return


def _bound_s(search: Search, partition: Partition) -> float:
    """Return a bound from the stages' loads; 0 where there is no quick bound."""
    quick = search.optimiser.quick
    numbered = quick.numbered(partition)
    return 0.0 if numbered is None else quick.score(numbered).bound_s


def _estimated(search: Search, row: Repaired) -> Repaired:
    """Return a repair with the time of a quick schedule, if one fits memory."""
    pipeline = place(search.problem, search.chain.specs(row.partition))
    if not is_connected(pipeline):
        return row._replace(time_s=math.inf)
    search.clock.charge(SearchWork.ESTIMATED_OPERATION, pipeline.microbatches * len(row.partition))
    time_s = quick_estimate_s(pipeline, split=pipeline.problem.job.splits)
    return row if time_s is None else row._replace(time_s=time_s)


def _promising(rows: Sequence[Repaired]) -> list[Repaired]:
    """Return the first repair, the Pareto front, and those with the least bounds."""
    ranked = sorted(rows, key=lambda row: row.time_s)
    return [*dict.fromkeys((*rows[:1], *_front(rows), *ranked[:MOST_ESTIMATES]))]


def _front(rows: Sequence[Repaired]) -> list[Repaired]:
    """Return the Pareto front of bytes moved and time, the fewest bytes first."""
    found: list[Repaired] = []
    for row in sorted(rows, key=lambda row: row[:2]):
        least_s = found[-1].time_s if found else math.inf
        if row.time_s < LESS * least_s:
            found.append(row)
    return found


def _in_order(front: Sequence[Repaired]) -> list[Repaired]:
    """Sort: the fastest, the one that moves least, then the others from fast to slow."""
    ranked = sorted(front, key=lambda row: row.time_s)
    return [*dict.fromkeys((*ranked[:1], *front[:1], *ranked))]


def _cuts(search: Search, plan: Plan) -> np.ndarray:
    """Return the cuts that a search considers, and those of the plan."""
    sizes = np.cumsum([0, *(len(stage.layers) for stage in plan.stages)])
    return np.union1d(search.optimiser.quick.intervals.cuts, sizes)


def _groups(search: Search, plan: Plan, machines: NewMachines) -> Iterator[Groups]:
    """Yield devices for the stages, none in more of them than the job allows."""
    job, chain = search.problem.job, search.chain
    shares = any(n > 1 for n in Counter(d for s in plan.stages for d in s.devices).values())
    work = dict(zip(chain.names, chain.least_work_s.tolist(), strict=True))
    stages = tuple(
        OldStage(
            tuple(device for device in stage.devices if device in machines.survivors),
            sum(work[name] for name in stage.layers),
        )
        for stage in plan.stages
    )
    used = {device for stage in stages for device in stage.devices}
    spares = tuple(d for d in search.problem.cluster.device_names if d not in used)
    most = chain.stage_limit if shares else search.max_stages
    for groups in Repairs(chain, stages, spares, machines.slowed, most).groups():
        counts = Counter(device for group in groups for device in group)
        is_doubled = any(len(set(group)) < len(group) for group in groups)
        if not is_doubled and max(counts.values()) <= job.max_stages_per_device:
            yield groups
