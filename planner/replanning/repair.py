"""First plans after a change of machines: the old stages repaired, and cut again a little.

A stage keeps its devices that are left. One that has none is dropped, or gets a spare device, or
one that another stage can do without. Spare devices (new ones, and those the plan left idle) stay
out, join the stages that have most to do, or become a stage of their own. Slow devices stay or go.
A stage's replicas may also become two stages, which hold all they need already.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from planner.costs.placement import is_connected, place
from planner.plan.plan import Plan
from planner.replanning.recut import Groups, Recut
from planner.replanning.state import State
from planner.search.budget import SearchWork, TimeSlice
from planner.search.partition.chain import Chain, Partition
from planner.search.schedule.heuristic import quick_estimate_s
from planner.search.schedule.pipeline_groups import operation_count
from planner.search.state import Candidate, Search
from planner.variants.machine_changes import NewMachines

SURE = 2
"""So many repairs are scheduled in any case."""
MOST_ESTIMATES = 8
"""Repairs with the least bounds that a quick schedule judges, whatever they move."""
LESS = 0.995
"""A repair that moves more must promise to be faster by this factor."""


MOST_PLACES = 12
"""The most positions between old stages at which a new one is tried."""


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
    promising = _promising(bounded)
    for row in promising[:sure]:
        search.consider(row.partition)
    estimated = [_estimated(search, row) for row in promising[sure:] if _may_go_on(search, time)]
    for row in _in_order(_front(estimated)):
        if not _may_go_on(search, time):
            return
        if row.time_s < search.best_s:
            search.consider(row.partition)


def _smaller(search: Search, best: Candidate) -> Iterator[Groups]:
    """Return the fastest plan's groups, one of them divided."""
    groups = tuple(stage.devices for stage in best.partition)
    return (found for found in _divided(groups) if len(found) <= search.max_stages)


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
    search.clock.charge(SearchWork.ESTIMATED_OPERATION, operation_count(pipeline))
    time_s = quick_estimate_s(pipeline, split=pipeline.problem.job.splits)
    return row if time_s is None else row._replace(time_s=time_s)


def _promising(rows: Sequence[Repaired]) -> list[Repaired]:
    """Return the first repair, the Pareto front, and those with the least bounds.

    There may be time for two alone: the first repair, and that with the least bound.
    """
    ranked = sorted(rows, key=lambda row: row.time_s)[:MOST_ESTIMATES]
    return [*dict.fromkeys((*rows[:1], *ranked[:1], *_front(rows), *ranked))]


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


@dataclass(frozen=True)
class OldStage:
    """A stage of the old plan.

    Attributes:
        devices: of it that are left.
        work_s: forward and backward seconds of one microbatch on the fastest type.
    """

    devices: tuple[str, ...]
    work_s: float


@dataclass(frozen=True)
class Repairs:
    """Groups for the stages of one plan.

    Attributes:
        chain: of the new problem.
        stages: of the old plan.
        spares: devices that no stage has.
        slowed: devices that became slower.
        max_stages: the most groups.
    """

    chain: Chain
    stages: tuple[OldStage, ...]
    spares: tuple[str, ...]
    slowed: Collection[str]
    max_stages: int

    def groups(self) -> Iterator[Groups]:
        """Yield groups, each once, in the order of how little they change."""
        known: set[Groups] = set()
        for found in self._all():
            if 0 < len(found) <= self.max_stages and found not in known:
                known.add(found)
                yield found

    def _all(self) -> Iterator[Groups]:
        for filled in self._filled():
            used = {device for group in filled for device in group}
            spares = [device for device in self.spares if device not in used]
            groups = tuple(group for group in filled if group)
            for kept in dict.fromkeys((groups, self._without_slow(groups))):
                yield kept
                if spares:
                    yield from self._with_spares(kept, spares)
                yield from _divided(kept)

    # --- stages that lost all devices ---------------------------------------------------------

    def _filled(self) -> Iterator[Groups]:
        """Yield the stages' groups, those without devices filled in several ways, or left empty."""
        left = tuple(stage.devices for stage in self.stages)
        empty = [place for place, group in enumerate(left) if not group]
        if empty and len(self.spares) >= len(empty):
            yield self._from_spares(left, empty)
        if empty and self._may_give(left):
            yield self._given(left, empty, once=True)
            yield self._given(left, empty, once=False)
        yield left

    def _from_spares(self, left: Groups, empty: Sequence[int]) -> Groups:
        """Give each empty stage spare devices near its neighbours, in rounds while they last."""
        groups, spares = [list(group) for group in left], list(self.spares)
        usual = max((len(group) for group in left), default=1) or 1
        for _ in range(usual if self.chain.problem.job.replication else 1):
            if len(spares) < len(empty):
                break
            for index in empty:
                nearest = min(spares, key=partial(self._distance, groups=left, index=index))
                spares.remove(nearest)
                groups[index].append(nearest)
        return self._ordered(groups)

    def _may_give(self, groups: Groups) -> bool:
        return any(len(group) > 1 for group in groups)

    def _given(self, left: Groups, empty: Sequence[int], *, once: bool) -> Groups:
        """Give empty stages devices of the largest groups: one each, or until all are alike."""
        groups = [list(group) for group in left]
        while True:
            index = min(empty, key=lambda p: len(groups[p]))
            donor = max(range(len(groups)), key=lambda k: (len(groups[k]), -abs(k - index)))
            is_served = all(groups[p] for p in empty)
            if len(groups[donor]) < 2 or (is_served and once):
                break
            if is_served and len(groups[donor]) - len(groups[index]) < 2:
                break
            giving = min(groups[donor], key=partial(self._distance, groups=left, index=index))
            groups[donor].remove(giving)
            groups[index].append(giving)
        return self._ordered(groups)

    def _distance(self, device: str, groups: Groups, index: int) -> tuple[float, int]:
        """Return seconds a byte to the neighbouring stages, then the place in the file."""
        numbers, table = self.chain.problem.cluster.numbers, self.chain.problem.cluster.link_table
        others = [d for k in (index - 1, index + 1) if 0 <= k < len(groups) for d in groups[k]]
        rows = [numbers[other] for other in others]
        widths = table.s_per_byte[numbers[device], rows] if rows else None
        return (float(widths.mean()) if widths is not None else 0.0), numbers[device]

    # --- spare and slow devices ---------------------------------------------------------------

    def _with_spares(self, groups: Groups, spares: Sequence[str]) -> Iterator[Groups]:
        replication = self.chain.problem.job.replication
        if replication and groups:
            yield self._joined(groups, spares)
        new = tuple(spares) if replication else tuple(spares[:1])
        places = range(len(groups) + 1)
        for position in places[:: -(-len(places) // MOST_PLACES)]:
            yield (*groups[:position], new, *groups[position:])
        yield from self._exchanged(groups, spares)

    def _joined(self, groups: Groups, spares: Sequence[str]) -> Groups:
        """Put each spare device into the group that has most to do for its size."""
        grown = [list(group) for group in groups]
        work = self._work_of(groups)
        for device in spares:
            index = max(range(len(grown)), key=lambda k: (work[k] / len(grown[k]), -k))
            grown[index].append(device)
        return self._ordered(grown)

    def _work_of(self, groups: Groups) -> list[float]:
        """Return the work of each group's old stage; equal where stages are gone."""
        of = {device: stage.work_s for stage in self.stages for device in stage.devices}
        return [of.get(group[0], 1.0) for group in groups]

    def _exchanged(self, groups: Groups, spares: Sequence[str]) -> Iterator[Groups]:
        """Put spare devices in the place of slow ones."""
        slow = [device for group in groups for device in group if device in self.slowed]
        image = dict(zip(slow, spares, strict=False))
        if image:
            yield self._ordered([[image.get(d, d) for d in group] for group in groups])

    def _without_slow(self, groups: Groups) -> Groups:
        """Leave out slow devices where others of the group are not slow."""
        return tuple(
            tuple(device for device in group if device not in self.slowed) or group
            for group in groups
        )

    def _ordered(self, groups: Sequence[Collection[str]]) -> Groups:
        """Sort the devices of each group in the cluster's order."""
        number: Callable[[str], int] = self.chain.problem.cluster.numbers.__getitem__
        return tuple(tuple(sorted(group, key=number)) for group in groups)


def _divided(groups: Groups) -> Iterator[Groups]:
    """Yield the groups with one of them cut in two: both parts hold what either needs."""
    for index, group in enumerate(groups):
        half = len(group) // 2
        if half:
            yield (*groups[:index], group[:half], group[half:], *groups[index + 1 :])
