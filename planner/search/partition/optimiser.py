"""The partition with the least bound on the iteration time, and a bound on every partition.

First the best partitions along a few orders of the devices and, on large clusters, those that
follow the relaxation; then a bound over relaxations of the cluster; then local search over orders
and small changes, in turns, until the two meet or time is up. One stage a device. The CP-SAT model
of planner.search.partition.cp_sat goes on from here where the cluster is small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from planner.costs.placement import is_connected, place
from planner.search.budget import Clock, SearchWork
from planner.search.partition.bounds.partition import PartitionBound, longest_plan_s, work_bound_s
from planner.search.partition.bounds.quick import PartitionScorer, QuickBound
from planner.search.partition.bounds.shared import SharedBound
from planner.search.partition.chain import Chain, Partition
from planner.search.partition.dynamic_programs.device_orders import (
    first_orders,
    replica_choices,
    unit_counts,
    unit_size,
)
from planner.search.partition.dynamic_programs.order_program import Order, OrderProgram
from planner.search.partition.dynamic_programs.order_stages import OrderStageCosts
from planner.search.partition.intervals import Intervals, allowed_cuts
from planner.search.partition.local_search.searches import Anneal, OrderSearch, Polish
from planner.search.partition.relaxations.class_relaxation import ClassRelaxation
from planner.search.partition.relaxations.rounding import rounded_partitions
from planner.search.partition.relaxations.surrogate_relaxation import SurrogateRelaxation
from planner.search.partition.relaxations.type_relaxation import TypeRelaxation, is_tractable
from planner.search.partition.symmetry import Interchange

MAX_DEVICES_FOR_MODEL = 24
"""Beyond this the CP-SAT model of partitions is too large to help."""
SEARCHES = 3
"""Orders that are improved, the best ones."""
TURN_S = 0.5
"""Seconds one search goes on before it is the next one's turn."""
MOST_WALKS = 20
"""Most annealing walks from the best partition, so that a search ends."""
SLACK = 1.5
"""Orders whose best partition is worse than the best known by this factor are left."""
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
        scorer: scores partitions with as many stages a device as the job allows.
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
        self._intervals = Intervals(chain, allowed_cuts(chain))
        self._program = OrderProgram(
            OrderStageCosts(self._intervals, self._links), replica_choices(chain)
        )
        self.quick = QuickBound(self._intervals, self._links)
        single = chain.problem.job.max_stages_per_device == 1
        self.scorer: PartitionScorer = self.quick if single else SharedBound(self.quick)
        self._bound = PartitionBound(chain)
        self._searches: list[OrderSearch] = []
        self._polished: set[Partition] = set()
        self._walks = 0
        self._surrogate: SurrogateRelaxation | None = None
        self._is_relaxed = False

    def offer(self, partition: Partition) -> float:
        """Score a partition and remember it.

        Returns:
            Its bound; infinity if it has too many stages, does not fit, or is not joined.
        """
        partition = self.representative(partition)
        if partition not in self.pool:
            self.clock.charge(SearchWork.PARTITION_BOUND)
            self.pool[partition] = self._score_s(partition)
            if self.pool[partition] < self.best_s:
                self.best, self.best_s = partition, self.pool[partition]
        return self.pool[partition]

    def representative(self, partition: Partition) -> Partition:
        """Return the one of all partitions that differ by interchangeable devices alone."""
        found = self._interchange
        return partition if found is None else found.representative(partition)

    def _score_s(self, partition: Partition) -> float:
        chain = self.chain
        allowed = len(partition) <= self._max_stages and self._allows(partition)
        if not allowed or not chain.may_fit(partition):
            return math.inf
        pipeline = place(self.chain.problem, self.chain.specs(partition))
        return self._bound.bound_s(partition, pipeline) if is_connected(pipeline) else math.inf

    # --- the steps ---------------------------------------------------------------------------

    def start(self, may_go_on: Callable[[], bool]) -> None:
        """Find partitions along a few orders; on large clusters also along the relaxation."""
        self.bound_s = max(self.bound_s, work_bound_s(self.chain))
        if self.is_large:
            self._round_relaxation(may_go_on)
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
        """Yield orders to start from, worked out while there is time or no partition is known."""
        orders = first_orders(self.chain)
        while self.best is None or may_go_on():
            order = next(orders, None)
            if order is None:
                return
            yield order

    def along(self, order: Order, most_s: float, may_go_on: Callable[[], bool]) -> Partition | None:
        """Return the best partition along an order of units; None if all are bounded by more.

        Args:
            order: units of devices, any number of which a stage may have.
            most_s: the largest bound of interest.
            may_go_on: whether there is time to look for a lower bound than that.
        """
        program = OrderProgram(self._program.costs, unit_counts(len(order)))
        search = OrderSearch(program, order, self.bound_s, self.clock, self._seed)
        longest_s = longest_plan_s(self.chain, self._max_stages)
        return search.start(min(most_s, longest_s), self._tolerance, may_go_on)

    @property
    def is_large(self) -> bool:
        """Whether devices are handed out in units of several."""
        return unit_size(self.chain) > 1

    def _round_relaxation(self, may_go_on: Callable[[], bool]) -> None:
        self.relax(may_go_on)
        if self._surrogate is None:
            return
        for partition in rounded_partitions(self._surrogate, self.bound_s):
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
        """Raise the bound by relaxations of the cluster, as far as time allows."""
        if self._is_relaxed:
            return
        self._is_relaxed = True
        relaxation = ClassRelaxation(self.chain, self._links)
        if relaxation.is_tractable:
            self._relax_by_classes(relaxation, may_go_on)
        else:
            self._relax_by_types(may_go_on)

    def _relax_by_types(self, may_go_on: Callable[[], bool]) -> None:
        """Raise the bound with the best links of all."""
        known_s = self.best_s
        if math.isinf(known_s):
            known_s = longest_plan_s(self.chain, self._max_stages)
        if is_tractable(self.chain) and not self.is_large:
            relaxed = TypeRelaxation(self.chain, self._links)
            bound_s = relaxed.bound_s(known_s, may_go_on=may_go_on)
        else:
            self._surrogate = SurrogateRelaxation(self.chain, self._links)
            bound_s = self._surrogate.bound_s(known_s, may_go_on=may_go_on)
        self.bound_s = max(self.bound_s, bound_s)

    def _relax_by_classes(self, relaxation: ClassRelaxation, may_go_on: Callable[[], bool]) -> None:
        """Raise the bound with all links as they are, and offer partitions that follow it."""
        longest_s = longest_plan_s(self.chain, self._max_stages)
        # A limit that some partition keeps in its own bound need not be kept here.
        bound_s = relaxation.bound_s(self.bound_s, self.best_s, longest_s, may_go_on=may_go_on)
        self.bound_s = max(self.bound_s, bound_s)
        for stretch in STRETCH:
            if not may_go_on():
                return
            partition = relaxation.partition(stretch * self.bound_s)
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
        """Return the partitions with the least bounds, and the best with each number of stages."""
        ranked = self._ranked()
        of_each: dict[int, Partition] = {}
        for partition in ranked:
            of_each.setdefault(len(partition), partition)
        return list(dict.fromkeys([*ranked[:count], *of_each.values()]))
