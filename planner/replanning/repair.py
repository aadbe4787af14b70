"""First plans after a change of machines: the old stages repaired, and cut anew a little."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planner.artifacts.plan import Plan
from planner.costs.placement import is_connected, place
from planner.partition.chain import Partition
from planner.portfolio.first_plans import SECONDS_A_STAGE
from planner.portfolio.search import SECONDS_AN_OPERATION, Candidate, Search
from planner.replanning.groups import OldStage, Repairs, divided
from planner.replanning.machines import NewMachines
from planner.replanning.recut import Groups, Recut
from planner.replanning.state import State
from planner.schedule.heuristic import probe_s

SHARE = 0.5
"""Of the time limit, for repairs."""
SURE = 2
"""The repair that promises most and the one that moves least are scheduled in any case."""
MOST_PROBES = 8
"""Repairs with the least bounds that a quick schedule judges, whatever they move."""
LESS = 0.995
"""A repair that moves more must promise to be faster by this factor."""


class Repaired(NamedTuple):
    """A repaired partition, what it moves, and what it promises."""

    moved_bytes: int
    time_s: float
    partition: Partition


def repair(search: Search, plan: Plan, machines: NewMachines, state: State) -> None:
    """Schedule the old plan's stages on what is left, in ways that move few bytes.

    Args:
        search: of the new problem.
        plan: that training ran by.
        machines: of the new problem.
        state: what devices hold.
    """
    recut = Recut(search.chain, state, _cuts(search, plan))
    _schedule_best(search, list(_bounded(search, recut, _groups(search, plan, machines))), SURE)
    while search.best is not None and _may_go_on(search):
        before_s = search.best_s
        _schedule_best(search, list(_bounded(search, recut, _smaller(search, search.best))))
        if search.best_s >= before_s:
            return


def _schedule_best(search: Search, bounded: Sequence[Repaired], sure: int = 0) -> None:
    """Schedule the most promising while there is time, the first few of them in any case."""
    probed = [_probed(search, row) for row in _promising(bounded) if sure or _may_go_on(search)]
    for number, row in enumerate(_in_order(_front(probed))):
        if number >= sure and not _may_go_on(search):
            return
        if row.time_s < search.best_s or number < sure:
            search.consider(row.partition)


def _smaller(search: Search, best: Candidate) -> Iterator[Groups]:
    """The fastest plan's groups, one of them divided."""
    groups = tuple(stage.devices for stage in best.partition)
    return (found for found in divided(groups) if len(found) <= search.max_stages)


def _may_go_on(search: Search) -> bool:
    spent_s = search.clock.elapsed_s
    return search.best is None or (spent_s < SHARE * search.limit_s and not search.is_done())


def _bounded(search: Search, recut: Recut, variants: Iterable[Groups]) -> Iterator[Repaired]:
    """All repairs with a bound of theirs, while there is time; the first groups in any case."""
    begin_s, known = search.clock.elapsed_s, set(search.candidates)
    for groups in variants:
        for partition in recut.partitions(groups):
            search.clock.spend(SECONDS_A_STAGE * len(partition))
            if partition in known or not search.allows(partition):
                continue
            known.add(partition)
            moved = recut.state.moved_bytes(search.chain, partition)
            yield Repaired(moved, _bound_s(search, partition), partition)
        if search.clock.elapsed_s - begin_s >= SHARE * search.limit_s / 2:
            return


def _bound_s(search: Search, partition: Partition) -> float:
    """What the stages' loads promise; nothing where a quick bound does not tell."""
    quick = search.optimiser.quick
    numbered = quick.numbered(partition)
    return 0.0 if numbered is None else quick.score(numbered).bound_s


def _probed(search: Search, row: Repaired) -> Repaired:
    """With the time of a quick schedule; what does not fit so is left to a thorough one."""
    pipeline = place(search.problem, search.chain.specs(row.partition))
    if not is_connected(pipeline):
        return row._replace(time_s=math.inf)
    search.clock.spend(SECONDS_AN_OPERATION * pipeline.microbatches * len(row.partition) / 10)
    time_s = probe_s(pipeline)
    return row if time_s is None else row._replace(time_s=time_s)


def _promising(rows: Sequence[Repaired]) -> list[Repaired]:
    """The plainest repair, those that no other one beats in both, and those with least bounds."""
    ranked = sorted(rows, key=lambda row: row.time_s)
    return [*dict.fromkeys((*rows[:1], *_front(rows), *ranked[:MOST_PROBES]))]


def _front(rows: Sequence[Repaired]) -> list[Repaired]:
    """Those that no other one beats in both, the fewest bytes first."""
    found: list[Repaired] = []
    for row in sorted(rows, key=lambda row: row[:2]):
        least_s = found[-1].time_s if found else math.inf
        if row.time_s < LESS * least_s:
            found.append(row)
    return found


def _in_order(front: Sequence[Repaired]) -> list[Repaired]:
    """The fastest, the one that moves least, then the others from fast to slow."""
    ranked = sorted(front, key=lambda row: row.time_s)
    return [*dict.fromkeys((*ranked[:1], *front[:1], *ranked))]


def _cuts(search: Search, plan: Plan) -> np.ndarray:
    """The cuts that a search considers, and those of the plan."""
    sizes = np.cumsum([0, *(len(stage.layers) for stage in plan.stages)])
    return np.union1d(search.optimiser.quick.intervals.cuts, sizes)


def _groups(search: Search, plan: Plan, machines: NewMachines) -> Iterator[Groups]:
    """Devices for the stages, none in more of them than the job allows."""
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
    most = (job.max_stages or chain.length) if shares else search.max_stages
    for groups in Repairs(chain, stages, spares, machines.slowed, most).groups():
        counts = Counter(device for group in groups for device in group)
        is_doubled = any(len(set(group)) < len(group) for group in groups)
        if not is_doubled and max(counts.values()) <= job.max_stages_per_device:
            yield groups
