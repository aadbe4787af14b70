"""The partition with the least bound on the iteration time, proved as far as time allows.

:func:`planner.solve` schedules partitions as well; this looks at partition, mapping and
replication alone, for studies of partitioners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.errors import InfeasibleError
from planner.plan.problem import Problem
from planner.search.budget import Clock, Settings
from planner.search.partition.bounds.partition import longest_plan_s
from planner.search.partition.candidates import simple_partitions
from planner.search.partition.chain import Chain, Partition
from planner.search.partition.cp_sat.search import PartitionSearch
from planner.search.partition.optimiser import MAX_DEVICES_FOR_MODEL, PartitionOptimiser
from planner.search.settings import DEFAULT_WORKERS

SHARE_OF_SEARCH = 0.2
"""Share of the time for the search, if CP-SAT continues afterwards."""


@dataclass(frozen=True)
class BestPartition:
    """A partition and what is proved.

    Attributes:
        status: ``optimal`` if the gap is at most the limit asked for.
        partition: stages as intervals of the chain, on devices.
        objective_s: no schedule of the partition is faster.
        lower_bound_s: no partition with one stage a device has a smaller objective.
    """

    status: Literal["optimal", "feasible"]
    partition: Partition
    objective_s: float
    lower_bound_s: float

    @property
    def gap(self) -> float:
        """Objective / lower bound - 1."""
        return self.objective_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


def best_partition(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    gap_limit: float = 1e-4,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
) -> BestPartition:
    """Minimise the bound on the iteration time over partitions, mappings and replications.

    Args:
        problem: the model, cluster and job.
        time_limit_s: as :func:`planner.solve`'s.
        gap_limit: stop once objective / lower bound - 1 is at most this.
        seed: of the searches.
        workers: threads of CP-SAT.
        deterministic: one worker and a deterministic limit.

    Raises:
        InfeasibleError: if no partition was found.
    """
    clock = Clock(time_limit_s, deterministic)
    chain = Chain(problem)
    most = chain.max_stages
    optimiser = PartitionOptimiser(chain, most, clock, seed)
    exact = len(problem.cluster.devices) <= MAX_DEVICES_FOR_MODEL
    share = SHARE_OF_SEARCH if exact else 1.0

    def may_go_on() -> bool:
        return clock.left_s > 0 and clock.elapsed_s < share * time_limit_s

    for partition in simple_partitions(chain, most):
        optimiser.offer(partition)
    optimiser.start(may_go_on)
    optimiser.relax(lambda: clock.left_s > 0)
    optimiser.search(may_go_on, gap_limit)
    if exact and optimiser.best_s > optimiser.bound_s * (1 + gap_limit):
        _prove(optimiser, Settings(seed, workers, deterministic), clock, gap_limit, most)
    if optimiser.best is None:
        raise InfeasibleError(
            "no partition was found whose stages fit their devices and whose neighbours are joined"
        )
    bound_s = min(optimiser.bound_s, optimiser.best_s)
    proved = optimiser.best_s <= bound_s * (1 + gap_limit)
    return BestPartition(
        "optimal" if proved else "feasible", optimiser.best, optimiser.best_s, bound_s
    )


def _prove(
    optimiser: PartitionOptimiser,
    settings: Settings,
    clock: Clock,
    gap_limit: float,
    max_stages: int,
) -> None:
    """Let CP-SAT look for better partitions and raise the bound."""
    horizon_s = min(optimiser.best_s, longest_plan_s(optimiser.chain, max_stages))
    model = PartitionSearch(
        optimiser.chain,
        max_stages,
        settings,
        clock,
        optimiser.best,
        horizon_s,
        least_s=min(optimiser.bound_s, horizon_s),
    )
    while clock.left_s > 0 and optimiser.best_s > optimiser.bound_s * (1 + gap_limit):
        found = model.next(min(optimiser.best_s, horizon_s), clock.left_s)
        for partition in found.partitions:
            # The model leaves out some of what the bound sees: go on without it.
            model.exclude(partition, optimiser.offer(partition))
        bound_s = optimiser.best_s if found.is_exhausted else found.bound_s
        optimiser.bound_s = max(optimiser.bound_s, min(bound_s, optimiser.best_s))
        if found.is_exhausted:
            return
