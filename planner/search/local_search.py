"""Local search from the best partitions, judged by their schedules: descent, and annealing.

What no bound on a partition sees - transfers that wait for each other on a shared link, replicas
of unlike speed that take turns - a schedule does. A quick estimate takes milliseconds, so that
thousands of partitions can be compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import is_connected, place
from planner.search.budget import SearchWork, TimeSlice
from planner.search.partition.bounds.quick import Numbered
from planner.search.partition.chain import Partition
from planner.search.partition.dynamic_programs.order_program import Order
from planner.search.partition.local_search.loop import AnnealingAcceptance, Cooling, local_search
from planner.search.partition.local_search.neighbourhood import (
    MoveShares,
    NeighbourPartitions,
    PartitionMoves,
)
from planner.search.schedule.pipeline_groups import place_first
from planner.search.state import Candidate, Search

MOST_NEIGHBOURS = 4000
"""Most neighbours of a partition that are looked at."""
SHARED_STARTS = 2
"""Candidates with several stages a device from which to descend."""
NEAR = 1.005
"""The best quick schedule is seldom further below a quick estimate."""


def descend(search: Search, time: TimeSlice, starts: int = 6) -> None:
    """Step from the fastest candidates to a faster neighbour while there is one."""
    shared = search.fastest_with_shared_devices()[:SHARED_STARTS]
    for start in (*shared, *search.fastest_of_each_length()[:starts]):
        _Descent(search, start, time).run()


class _Descent:
    """Steps from a candidate to the first neighbour with a faster schedule, least bounds first.

    Args:
        search: schedules partitions.
        start: where to begin.
        time: for the descent.
    """

    def __init__(self, search: Search, start: Candidate, time: TimeSlice) -> None:
        self._search = search
        self._start = start
        self._time = time
        self._time_s = start.schedule.iteration_time_s
        self._neighbours: Iterator[Partition] | None = None
        self._is_lowest = False

    def run(self) -> None:
        """Descend until no neighbour is faster, or time is up."""
        for _ in local_search(
            self._start.partition, self._start, self._draw, self._judge, acceptance=self
        ):
            self._neighbours = None

    def goes_on(self, score: Candidate) -> bool:
        """Return whether there may be a faster neighbour, and time to look at it."""
        search = self._search
        if self._is_lowest or not self._time.has_time():
            return False
        return not search.is_done() if self._neighbours is None else search.has_time

    def accepts(self, found: Candidate, score: Candidate) -> bool:
        """Return whether a neighbour is faster."""
        return found.schedule.iteration_time_s < score.schedule.iteration_time_s

    def _draw(self, partition: Partition, score: Candidate) -> Partition | None:
        if self._neighbours is None:
            self._time_s = score.schedule.iteration_time_s
            self._neighbours = iter(_promising(self._search, score, self._time))
            return None
        found = next(self._neighbours, None)
        self._is_lowest = found is None
        return found

    def _judge(self, partition: Partition) -> Candidate | None:
        pipeline = _worth_scheduling(self._search, partition, self._time_s)
        return None if pipeline is None else self._search.schedule(partition, pipeline)


def _worth_scheduling(search: Search, partition: Partition, time_s: float) -> PlacedPipeline | None:
    """Return the placed stages if their schedules may beat a time."""
    search.clock.charge(SearchWork.PLACED_STAGE, len(partition))
    pipeline = place(search.problem, search.chain.specs(partition))
    if not is_connected(pipeline):
        return None
    if search.recomputed.promise_s(partition, pipeline) >= time_s:
        return None
    estimate_s = search.estimate_s(partition, pipeline, time_s)
    return pipeline if estimate_s is None or estimate_s <= NEAR * time_s else None


def _promising(search: Search, current: Candidate, time: TimeSlice) -> list[Partition]:
    """Return neighbours whose quick bound is below the current time, the least first."""
    scorer, time_s = search.optimiser.scorer, current.schedule.iteration_time_s
    rows: list[tuple[float, int, Partition]] = []
    for partition in _unlike(search, current):
        if not time.has_time() or len(rows) >= MOST_NEIGHBOURS:
            break
        search.clock.charge(SearchWork.QUICK_BOUND)
        numbered = scorer.numbered(partition)
        bound_s = 0.0 if numbered is None else scorer.score(numbered).bound_s
        if bound_s < time_s and search.allows(partition):
            rows.append((bound_s, len(rows), partition))
    return [partition for _, _, partition in sorted(rows)]


def _unlike(search: Search, current: Candidate) -> Iterator[Partition]:
    """Yield neighbours that are not scheduled yet, one of those that are interchangeable."""
    seen: set[Partition] = set()
    shares = not search.has_single_stages
    neighbours = NeighbourPartitions(search.chain, search.most_stages, shares=shares)
    for neighbour in neighbours.of(current.partition):
        partition = search.optimiser.representative(neighbour)
        if partition not in seen and partition not in search.candidates:
            seen.add(partition)
            yield partition


WALKS = 3
"""Starts: the fastest candidates, each with another number of stages."""
COOLING = Cooling(hottest=0.03, coolest=5e-4)
SHARES = MoveShares(shift=0.3, exchange=0.6, merge=0.7, split=0.8, drop=0.87)
FARTHEST = 1.15
"""A walk does not go where plans take so much longer than the best known."""
PATIENCE = 5000
"""Changes in a row that lead to nothing new after which a walk ends."""


def anneal(search: Search, time: TimeSlice) -> None:
    """Walk from the fastest candidates, each for a part of the time."""
    starts = search.fastest_with_shared_devices()[:1]
    starts += search.fastest_of_each_length()[: WALKS - len(starts)]
    units = tuple((number,) for number in range(len(search.problem.cluster.devices)))
    for number, start in enumerate(starts):
        each_s = time.left_s / (len(starts) - number)
        Walk(search, units, search.next_seed()).go(start.partition, each_s)


class Walk:
    """One walk through the partitions whose stages have whole units of devices.

    Args:
        search: gets every partition that may be better than the best.
        units: numbers of devices that stay together.
        seed: of what is drawn.
    """

    def __init__(self, search: Search, units: Order, seed: int) -> None:
        self._search = search
        self._units = units
        self._scorer = search.optimiser.scorer
        self._random = random.Random(seed)
        self._moves = PartitionMoves(self._scorer, self._random, len(units))
        self._times: dict[Partition, float] = {}
        self._annealing: AnnealingAcceptance[float] | None = None
        self._idle = self._known = 0
        self._best: Partition | None = None
        self._best_s = math.inf

    def go(self, start: Partition, limit_s: float) -> None:
        """Walk for so long, or until nothing new is met."""
        numbered = self._scorer.numbered(start)
        if numbered is None or limit_s <= 0:
            return
        current = self._in_units(numbered)
        clock = self._search.clock
        time_s, begin_s = self._time_s(numbered), clock.elapsed_s
        self._annealing = AnnealingAcceptance[float](
            COOLING,
            lambda value_s: value_s,
            lambda: (clock.elapsed_s - begin_s) / limit_s,
            self._may_go_on,
            self._random,
        )
        self._idle, self._known = 0, len(self._times)
        for _ in local_search(current, time_s, self._draw, self._judge, self._annealing):
            pass
        if self._best is not None:
            self._search.consider(self._best)

    def _in_units(self, stages: Numbered) -> Numbered:
        """Return stages by the numbers of their units."""
        unit_of = {device: number for number, unit in enumerate(self._units) for device in unit}
        return tuple(
            stage._replace(devices=tuple(sorted({unit_of[device] for device in stage.devices})))
            for stage in stages
        )

    def _in_devices(self, stages: Numbered) -> Numbered:
        """Return stages by the numbers of their devices."""
        return tuple(
            stage._replace(
                devices=tuple(sorted(d for unit in stage.devices for d in self._units[unit]))
            )
            for stage in stages
        )

    def _may_go_on(self) -> bool:
        """Return whether there is time for a change, and something new was met not long ago."""
        known = len(self._times)
        self._idle = 0 if known > self._known else self._idle
        self._known = known
        if self._idle >= PATIENCE or self._search.is_done() or not self._search.has_time:
            return False
        self._idle += 1
        return True

    def _draw(self, stages: Numbered, time_s: float) -> Numbered | None:
        self._search.clock.charge(SearchWork.QUICK_BOUND)
        number, kind = self._random.randrange(len(stages)), self._random.random()
        changed = self._moves.draw(stages, number, kind, SHARES)
        return None if changed is None or len(changed) > self._search.most_stages else changed

    def _judge(self, stages: Numbered) -> float | None:
        """Return the time of a partition; None if it takes too long for the walk."""
        assert self._annealing is not None
        most_s = min(self._annealing.most_s, FARTHEST * self._search.best_s)
        stages = self._in_devices(stages)
        if self._scorer.score(stages).bound_s > most_s:
            return None
        time_s = self._time_s(stages)
        return time_s if time_s <= most_s else None

    def _time_s(self, stages: Numbered) -> float:
        search = self._search
        partition = search.optimiser.representative(self._scorer.named(stages))
        if partition not in self._times:
            self._times[partition] = estimated_s(search, partition, FARTHEST * search.best_s)
            self._keep(partition, self._times[partition])
        return self._times[partition]

    def _keep(self, partition: Partition, time_s: float) -> None:
        """Schedule a partition that may be the best; on large clusters only the last such one."""
        if not self._search.optimiser.is_large:
            if time_s < NEAR * self._search.best_s:
                self._search.consider(partition)
        elif time_s < min(self._search.best_s, self._best_s):
            self._best, self._best_s = partition, time_s


def estimated_s(search: Search, partition: Partition, most_s: float = math.inf) -> float:
    """Return a quick estimate; infinity if the partition cannot run, or takes longer than a time.

    Where memory is too small for the estimate, and no plan is known yet, the best quick schedule's.
    """
    pipeline = place_first(search.problem, search.chain.specs(partition))
    search.clock.charge(SearchWork.PLACED_STAGE, len(partition))
    if not search.allows(partition) or not is_connected(pipeline):
        return math.inf
    estimate_s = search.estimate_s(partition, pipeline, most_s)
    if estimate_s is not None or search.best is not None:
        return math.inf if estimate_s is None else estimate_s
    found = search.consider(partition)
    return math.inf if found is None else found.schedule.iteration_time_s
