"""AutoPipe: Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning
and Micro-batch Slicing", CLUSTER 2022.

For a number of stages, the balanced partition (a min-max dynamic program over the layers' times) is
the start. A simulated 1F1B gives the iteration time and the critical stage, where the critical path
computes longest. The critical stage hands its first layer to the stages before it, or its last
layer to the stages behind it, which are balanced anew. The fastest partition seen wins.

Stages lie on devices in file order; with data parallelism every stage has equally many neighbouring
replicas, each of which runs its share of the microbatches. Our reconstruction: breadth first and
:data:`MOST_SIMULATIONS` a number of stages; the number of stages with the smallest simulated time
plus all-reduce wins; layers take the slowest device type's time. Slicing of microbatches is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.partition.chain import Chain, FloatArray, Partition, StageChoice
from planner.partition.min_max import interval_sums
from planner.partition.planners.one_forward_one_backward import Pipeline, simulate_1f1b
from planner.partition.planners.planner import Planner, nothing_fits
from planner.partition.stage_costs import Block, StageCosts, most_stages

MOST_SIMULATIONS = 24
Transfer = Callable[[Sequence[Block], Sequence[Block]], FloatArray]
Cuts = tuple[int, ...]
"""Positions between stages, 0 and the number of layers included."""


def plan(chain: Chain) -> Partition:
    """The fastest partition in a simulated 1F1B over all numbers of stages.

    Raises:
        InfeasibleError: if none fits.
    """
    best: Partition | None = None
    best_s = math.inf
    balance = _Balance(chain)
    for stages in range(1, most_stages(chain) + 1):
        search = _Search(chain, balance, stages)
        cuts, time_s = search.best(best_s)
        if time_s < best_s:
            best, best_s = search.partition(cuts), time_s
    if best is None:
        raise nothing_fits("autopipe", "its balanced partitions and their neighbours")
    return best


class _Balance:
    """Balanced cuts of the first layers, and of the last ones, into any number of stages."""

    def __init__(self, chain: Chain) -> None:
        times = [chain.forward_s(name) + chain.backward_s(name) for name in chain.types]
        self.work_s = interval_sums(np.maximum.reduce(times))
        self._front = _Table(self.work_s)
        self._back = _Table(self.work_s[::-1, ::-1].T)

    def front(self, end: int, stages: int) -> Cuts:
        """Layers before ``end``."""
        return self._front.cuts(end, stages)

    def back(self, begin: int, stages: int) -> Cuts:
        """Layers from ``begin`` on."""
        length = len(self.work_s) - 1
        return tuple(length - cut for cut in reversed(self._back.cuts(length - begin, stages)))


class _Table:
    """``best[n][j]``: the least bottleneck of the first j layers in n stages."""

    def __init__(self, work_s: FloatArray) -> None:
        self.work_s = np.where(np.triu(np.ones_like(work_s), 1) > 0, work_s, np.inf)
        first = np.full(len(work_s), np.inf)
        first[0] = 0.0
        self._best = [first]
        self._last = [np.zeros(len(work_s), dtype=np.int64)]

    def cuts(self, end: int, stages: int) -> Cuts:
        while len(self._best) <= stages:
            total = np.maximum(self._best[-1][:, None], self.work_s)
            self._last.append(total.argmin(axis=0))
            self._best.append(total.min(axis=0))
        found = [end]
        for left in range(stages, 0, -1):
            found.append(int(self._last[left][found[-1]]))
        return tuple(reversed(found))


class _Search:
    """Partitions into one number of stages."""

    def __init__(self, chain: Chain, balance: _Balance, stages: int) -> None:
        names = chain.problem.cluster.device_names
        self.chain = chain
        self.balance = balance
        self.stages = stages
        self.replicas = len(names) // stages if chain.problem.job.replication else 1
        self.microbatches = -(-chain.problem.job.microbatches // self.replicas)
        self.blocks = tuple(
            names[s * self.replicas : (s + 1) * self.replicas] for s in range(stages)
        )
        self.costs = StageCosts(chain, self.blocks)

    def partition(self, cuts: Cuts) -> Partition:
        """The stages on their devices."""
        return tuple(
            StageChoice(cuts[s], cuts[s + 1], self.blocks[s]) for s in range(self.stages)
        )

    def best(self, limit_s: float) -> tuple[Cuts, float]:
        """The fastest cuts found and their time; infinity if none fits.

        Args:
            limit_s: nothing slower than this is of interest.
        """
        start = self.balance.front(self.chain.length, self.stages)
        best, best_s = start, math.inf
        slowest = max(self.balance.work_s[start[s], start[s + 1]] for s in range(self.stages))
        if self.stages > 1 and self._is_hopeless(float(slowest), limit_s):
            return best, best_s
        queue, seen = deque([start]), {start}
        for _ in range(MOST_SIMULATIONS):
            if not queue:
                break
            cuts = queue.popleft()
            time_s, critical = self._simulate(cuts)
            if time_s < best_s:
                best, best_s = cuts, time_s
            for found in self._moved(cuts, critical):
                if found not in seen:
                    seen.add(found)
                    queue.append(found)
        return best, best_s

    def _is_hopeless(self, slowest_s: float, limit_s: float) -> bool:
        """Whether no partition into so many stages beats a time, if all devices were the slowest."""
        same_types = len(self.chain.types) == 1
        return same_types and self.microbatches * slowest_s >= limit_s

    def _simulate(self, cuts: Cuts) -> tuple[float, int]:
        """Iteration time, infinite if it does not fit, and the critical stage."""
        parts = [(cuts[s], cuts[s + 1], [block]) for s, block in enumerate(self.blocks)]
        pipeline = Pipeline(
            self.replicas * np.array([self.costs.forward_s(b)[i, j] for i, j, b in parts]),
            self.replicas * np.array([self.costs.backward_s(b)[i, j] for i, j, b in parts]),
            self._transfers_s(cuts, self.costs.send_s),
            self._transfers_s(cuts, self.costs.send_back_s),
        )
        time_s, critical = simulate_1f1b(pipeline, self.microbatches)
        in_flight = [(self.stages - s) * self.replicas for s in range(self.stages)]
        rest_s = max(
            float(self.costs.reduce_s(b)[i, j] + self.costs.fits(b, n)[i, j])
            for (i, j, b), n in zip(parts, in_flight, strict=True)
        )
        return time_s + rest_s, critical

    def _transfers_s(self, cuts: Cuts, transfer: Transfer) -> FloatArray:
        """One microbatch between each stage and the next; every replica has its own way."""
        each = [
            transfer(self.blocks[s : s + 1], self.blocks[s + 1 : s + 2])[cuts[s + 1]]
            for s in range(self.stages - 1)
        ]
        return self.replicas * np.array(each, dtype=np.float64)

    def _moved(self, cuts: Cuts, critical: int) -> Iterator[Cuts]:
        """The critical stage hands a layer on to the stages before it, or behind it."""
        begin, end = cuts[critical], cuts[critical + 1]
        if end - begin < 2:
            return
        if critical > 0:
            yield (*self.balance.front(begin + 1, critical), *cuts[critical + 1 :])
        if critical < self.stages - 1:
            behind = self.stages - 1 - critical
            yield (*cuts[: critical + 1], *self.balance.back(end - 1, behind))


AUTOPIPE = Planner("autopipe", "Liu et al., CLUSTER 2022", plan)
