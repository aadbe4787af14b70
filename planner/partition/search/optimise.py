"""The partition with the least bound on the iteration time, and a bound on every partition.

First the best partitions along a few orders of the devices and, on large clusters, those that
follow the relaxation; then a bound over relaxed clusters; then local search over orders and small
changes, in turns, until the two meet or time is up. One stage a device. The CP-SAT model of
planner.partition.exact goes on from here where the cluster is small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from planner.costs.placement import is_connected, place
from planner.partition.bounds.classed_cluster import ClassedCluster
from planner.partition.bounds.partition import PartitionBound
from planner.partition.bounds.priced_cluster import PricedCluster
from planner.partition.bounds.quick import QuickBound
from planner.partition.bounds.relaxed_cluster import RelaxedCluster, is_tractable
from planner.partition.bounds.work import longest_plan_s, work_bound_s
from planner.partition.chain import Chain, Partition
from planner.partition.intervals import Intervals, coarse_cuts
from planner.partition.ordered.program import Order, OrderProgram
from planner.partition.ordered.search import OrderSearch
from planner.partition.ordered.stages import StageCosts
from planner.partition.ordered.starts import first_orders, replica_choices, unit_size
from planner.partition.search.anneal import Anneal
from planner.partition.search.bought import bought_partitions
from planner.partition.search.polish import Polish
from planner.partition.symmetry import Interchange
from planner.solver_settings import Clock

SEARCHES = 3
"""Orders that are improved, the best ones."""
TURN_S = 0.5
"""Seconds one search goes on before it is the next one's turn."""
MOST_WALKS = 20
"""Of annealing from the best partition, so that a search ends where nothing is left to find."""
SLACK = 1.5
"""Orders whose best partition is worse than the best known by this factor are left."""
SECONDS_A_SCORE = 1e-3
"""What scoring a partition counts in deterministic time."""
STRETCH = (1.001, 1.01, 1.02, 1.04, 1.06, 1.1)
"""Limits for which partitions of the relaxation are asked, as multiples of its bound."""
SAME = 1 + 1e-9
SHORTEST = 1e-3
"""Share of the longest plan's time below which no limit is tried at first."""


class PartitionOptimiser:
    """Finds partitions of one problem.

    Args:
        chain: the layers.
        max_stages: the largest number of stages.
        clock: time spent is booked on it.
        seed: of the searches.
        allows: whether a partition may be used; by default, whether it keeps the device rules.
        break_symmetry: take partitions that differ by interchangeable devices alone as one.

    Attributes:
        pool: the bound of every partition found.
        bound_s: no plan with one stage a device is faster, whatever its partition and schedule.
        best, best_s: the partition with the least bound so far.
        quick: scores partitions with one stage a device.
    """

    def __init__(
        self,
        chain: Chain,
        max_stages: int,
        clock: Clock,
        seed: int,
        allows: Callable[[Partition], bool] | None = None,
        break_symmetry: bool = True,
    ) -> None:
        self.chain = chain
        self.clock = clock
        self.pool: dict[Partition, float] = {}
        self.best: Partition | None = None
        self.best_s = math.inf
        self.bound_s = 0.0
        self._seed = seed
        self._allows = allows or chain.keeps_rules
        cluster = chain.problem.cluster
        self._interchange = Interchange(cluster) if break_symmetry else None
        self._max_stages = max_stages
        self._links = cluster.link_table
        self._intervals = Intervals(chain, coarse_cuts(chain))
        self._program = OrderProgram(
            StageCosts(self._intervals, self._links), replica_choices(chain)
        )
        self.quick = QuickBound(self._intervals, self._links)
        self._exact = PartitionBound(chain)
        self._searches: list[OrderSearch] = []
        self._polished: set[Partition] = set()
        self._walks = 0
        self._priced: PricedCluster | None = None
        self._is_relaxed = False

    def offer(self, partition: Partition) -> float:
        """Score a partition and remember it.

        Returns:
            Its bound; infinity if it has too many stages, does not fit, or is not joined.
        """
        partition = self.representative(partition)
        if partition not in self.pool:
            self.clock.spend(SECONDS_A_SCORE)
            self.pool[partition] = self._score_s(partition)
            if self.pool[partition] < self.best_s:
                self.best, self.best_s = partition, self.pool[partition]
        return self.pool[partition]

    def representative(self, partition: Partition) -> Partition:
        """The one of all partitions that differ by interchangeable devices alone."""
        found = self._interchange
        return partition if found is None else found.representative(partition)

    def _score_s(self, partition: Partition) -> float:
        chain = self.chain
        allowed = len(partition) <= self._max_stages and self._allows(partition)
        if not allowed or not chain.may_fit(partition):
            return math.inf
        pipeline = place(self.chain.problem, self.chain.specs(partition))
        return self._exact.bound_s(partition, pipeline) if is_connected(pipeline) else math.inf

    # --- the steps ---------------------------------------------------------------------------

    def start(self, may_go_on: Callable[[], bool]) -> None:
        """Partitions along a few orders; on large clusters also along the relaxation."""
        self.bound_s = max(self.bound_s, work_bound_s(self.chain))
        if self.is_large:
            self._buy(may_go_on)
        found = []
        for number, order in enumerate(self._orders(may_go_on)):
            search = OrderSearch(
                self._program, order, self.bound_s, self.clock, self._seed + number
            )
            partition = self._start(search, may_go_on)
            if partition is not None:
                found.append((self.offer(partition), number, search))
        found.sort(key=lambda row: row[:2])
        self._searches = [search for _, _, search in found[:SEARCHES]]

    def _orders(self, may_go_on: Callable[[], bool]) -> Iterator[Order]:
        """Orders to start from, worked out while there is time or no partition is known."""
        orders = first_orders(self.chain)
        while self.best is None or may_go_on():
            order = next(orders, None)
            if order is None:
                return
            yield order

    @property
    def is_large(self) -> bool:
        """Whether devices are handed out in units of several."""
        return unit_size(self.chain) > 1

    def _buy(self, may_go_on: Callable[[], bool]) -> None:
        self.relax(may_go_on)
        if self._priced is None:
            return
        for partition in bought_partitions(self._priced, self.bound_s):
            if self.offer(partition) > SLACK * self.best_s or not may_go_on():
                return

    def _start(self, search: OrderSearch, may_go_on: Callable[[], bool]) -> Partition | None:
        """The best partition along an order, within a limit that is raised while it must be."""
        if math.isfinite(self.best_s):
            slack = 1.0 if self.is_large else SLACK
            return search.start(self.best_s * slack, self._tolerance, may_go_on)
        longest_s = longest_plan_s(self.chain, self._max_stages)
        limit_s = max(3 * self.bound_s, SHORTEST * longest_s)
        while limit_s < longest_s:
            partition = search.start(limit_s, self._tolerance, may_go_on)
            if partition is not None:
                return partition
            limit_s *= 4
        return search.start(longest_s, self._tolerance, may_go_on)

    @property
    def _tolerance(self) -> float:
        return 1e-3 if self.is_large else 1e-4

    def relax(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """The bound over relaxed clusters, as tight as time allows."""
        if self._is_relaxed:
            return
        known_s = self.best_s
        if math.isinf(known_s):
            known_s = longest_plan_s(self.chain, self._max_stages)
        if is_tractable(self.chain) and not self.is_large:
            relaxed = RelaxedCluster(self.chain, self._links)
            bound_s = relaxed.bound_s(known_s, may_go_on=may_go_on)
        else:
            self._priced = PricedCluster(self.chain, self._links)
            bound_s = self._priced.bound_s(known_s, may_go_on=may_go_on)
        self.bound_s = max(self.bound_s, bound_s)
        self._is_relaxed = True
        if not may_go_on():
            return
        classed = ClassedCluster(self.chain, self._links)
        if classed.is_tractable:
            self._relax_by_classes(classed, may_go_on)

    def _relax_by_classes(self, classed: ClassedCluster, may_go_on: Callable[[], bool]) -> None:
        """The bound with all links as they are, and partitions that follow it."""
        longest_s = longest_plan_s(self.chain, self._max_stages)
        # A limit that some partition keeps in its own bound need not be kept here.
        bound_s = classed.bound_s(self.bound_s, self.best_s, longest_s, may_go_on=may_go_on)
        self.bound_s = max(self.bound_s, bound_s)
        for stretch in STRETCH:
            if not may_go_on():
                return
            partition = classed.partition(stretch * self.bound_s)
            if partition is not None:
                self.offer(partition)

    def search(self, may_go_on: Callable[[], bool], gap_limit: float = 0.0) -> None:
        """Improve orders and partitions in turns."""

        def goes_on() -> bool:
            return may_go_on() and self.best_s > self.bound_s * (1 + gap_limit) * SAME

        for search in self._searches:
            search.bound_s = self.bound_s
        while goes_on():
            turns = list(self._turns())
            if not turns and (self.best is None or self._walks >= MOST_WALKS):
                return
            for turn in turns:
                for partition in turn(self._turn(goes_on)):
                    self.offer(partition)
            self._walk(goes_on)

    def _turns(self) -> Iterator[Callable[[Callable[[], bool]], Iterator[Partition]]]:
        for search in self._searches:
            if not search.is_finished:
                yield search.improve
        for partition in self._unpolished():
            self._polished.add(partition)
            polish = Polish(self.quick, self.clock, self._seed + len(self._polished))
            yield partial(polish.improve, partition)

    def _walk(self, may_go_on: Callable[[], bool]) -> None:
        """Once from the best partition, to the end: a walk that is cut short has not cooled."""
        if self.best is None or self._walks >= MOST_WALKS:
            return
        self._walks += 1
        walk = Anneal(self.quick, self._max_stages, self.clock, self._seed + self._walks)
        for partition in walk.improve(self.best, may_go_on):
            self.offer(partition)

    def _unpolished(self, count: int = 2) -> list[Partition]:
        ranked = [partition for partition in self._ranked() if partition not in self._polished]
        return ranked[:count]

    def _ranked(self) -> list[Partition]:
        finite = [partition for partition, time_s in self.pool.items() if math.isfinite(time_s)]
        return sorted(finite, key=self.pool.__getitem__)

    def _turn(self, may_go_on: Callable[[], bool]) -> Callable[[], bool]:
        end_s = self.clock.elapsed_s + TURN_S
        return lambda: self.clock.elapsed_s < end_s and may_go_on()

    def promising(self, count: int) -> list[Partition]:
        """The partitions with the least bounds, and the best with each number of stages."""
        ranked = self._ranked()
        of_each: dict[int, Partition] = {}
        for partition in ranked:
            of_each.setdefault(len(partition), partition)
        return list(dict.fromkeys([*ranked[:count], *of_each.values()]))
