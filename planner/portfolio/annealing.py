"""Simulated annealing over partitions, judged by a quick schedule of each.

What no bound on a partition sees - transfers that wait for each other on a shared link, replicas
of unlike speed that take turns - a schedule does. A probe takes milliseconds, so that thousands of
partitions can be compared.
"""

from __future__ import annotations

import math
import random

from planner.costs.placement import is_connected, place
from planner.partition.bounds.quick import Numbered
from planner.partition.chain import Partition
from planner.partition.search.cooling import Cooling
from planner.partition.search.moves import Moves, Shares
from planner.portfolio.descent import NEAR, SECONDS_A_SCORE
from planner.portfolio.exact import model_applies
from planner.portfolio.first_plans import SECONDS_A_STAGE
from planner.portfolio.search import SECONDS_AN_OPERATION, Search
from planner.schedule.heuristic import probe_s

WALKS = 3
"""Starts: the fastest candidates, each with another number of stages."""
COOLING = Cooling(hottest=0.03, coolest=5e-4)
SHARES = Shares(shift=0.3, exchange=0.6, merge=0.7, split=0.8, drop=0.87)
FARTHEST = 1.15
"""A walk does not go where plans take so much longer than the best known."""
SHARE = 0.4
SHARE_WITHOUT_MODEL = 0.8
"""Of the time left, where the partition model goes on afterwards and where it is too large."""
PATIENCE = 5000
"""Changes in a row that lead to nothing new after which a walk ends."""


def anneal(search: Search) -> None:
    """Walk from the fastest candidates, each for a part of a share of the time left."""
    if search.best is None or search.clock.left_s <= 0:
        return
    share = SHARE if model_applies(search) else SHARE_WITHOUT_MODEL
    starts = search.fastest_of_each_length()[:WALKS]
    stop_s = (1 - share) * search.clock.left_s
    for number, start in enumerate(starts):
        each_s = (search.clock.left_s - stop_s) / (len(starts) - number)
        _Walk(search, search.settings.seed + number).go(start.partition, each_s)


class _Walk:
    """One walk through the partitions.

    Args:
        search: told of every partition that may be better than the best.
        seed: of what is drawn.
    """

    def __init__(self, search: Search, seed: int) -> None:
        self._search = search
        self._quick = search.optimiser.quick
        self._random = random.Random(seed)
        self._moves = Moves(self._quick, self._random)
        self._times: dict[Partition, float] = {}

    def go(self, start: Partition, limit_s: float) -> None:
        """Walk for so long, or until nothing new is met."""
        clock = self._search.clock
        current = self._quick.numbered(start)
        if current is None or limit_s <= 0:
            return
        time_s, begin_s, idle = self._time_s(current), clock.elapsed_s, 0
        while idle < PATIENCE and not self._search.is_done():
            spent = (clock.elapsed_s - begin_s) / limit_s
            if spent >= 1 or not self._search.has_time:
                return
            most_s = COOLING.most(time_s, spent, self._random)
            idle, known = idle + 1, len(self._times)
            changed = self._change(current, min(most_s, FARTHEST * self._search.best_s))
            if len(self._times) > known:
                idle = 0
            if changed is not None:
                current, time_s = changed

    def _change(self, current: Numbered, most_s: float) -> tuple[Numbered, float] | None:
        """A random neighbour and its time, if it takes at most so long."""
        search = self._search
        search.clock.spend(SECONDS_A_SCORE)
        place_, kind = self._random.randrange(len(current)), self._random.random()
        changed = self._moves.draw(current, place_, kind, SHARES)
        if changed is None or len(changed) > search.max_stages:
            return None
        if self._quick.score(changed).bound_s > most_s:
            return None
        time_s = self._time_s(changed)
        return (changed, time_s) if time_s <= most_s else None

    def _time_s(self, stages: Numbered) -> float:
        search = self._search
        partition = search.optimiser.representative(self._quick.named(stages))
        if partition not in self._times:
            self._times[partition] = self._probed_s(partition)
            if self._times[partition] <= NEAR * search.best_s:
                search.consider(partition)
        return self._times[partition]

    def _probed_s(self, partition: Partition) -> float:
        """Of a probe, or of the best quick schedule where memory is too small for a probe."""
        search = self._search
        pipeline = place(search.problem, search.chain.specs(partition))
        search.clock.spend(SECONDS_A_STAGE * len(partition))
        if not search.allows(partition) or not is_connected(pipeline):
            return math.inf
        search.clock.spend(SECONDS_AN_OPERATION * pipeline.microbatches * len(partition) / 10)
        probed_s = probe_s(pipeline)
        if probed_s is not None:
            return probed_s
        if search.recomputed.fits_never(partition, pipeline):
            return math.inf
        found = search.candidates.get(partition) or search.schedule(partition, pipeline)
        return math.inf if found is None else found.schedule.iteration_time_s
