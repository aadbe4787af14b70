"""AutoPipe: balanced stages, then layers moved away from the critical one.

Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and
Micro-batch Slicing", CLUSTER 2022.

For a number of stages, the balanced partition (a min-max dynamic program over the layers' times) is
the start. A simulated 1F1B gives the iteration time and the critical stage, where the critical path
computes longest. The critical stage hands its first layer to the stages before it, or its last
layer to the stages behind it, which are balanced anew. The fastest partition seen wins.

Stages lie on devices in file order; with data parallelism every stage has equally many neighbouring
replicas, each of which runs its share of the microbatches. Our reconstruction: layers are moved in
the :data:`MOST_SEARCHES` numbers of stages whose balanced partitions are fastest, breadth first,
:data:`MOST_SIMULATIONS` partitions each; the smallest simulated time plus all-reduce wins; for the
balance, layers take the slowest device type's time. Slicing of microbatches is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.partition.chain import Chain, FloatArray, Partition
from planner.partition.planners.one_forward_one_backward import Pipeline, simulate_1f1b
from planner.partition.planners.planner import Planner, nothing_fits
from planner.partition.planners.stage_costs import (
    Block,
    StageCosts,
    device_blocks,
    devices_of,
    most_stages,
)

MOST_SEARCHES = 4
MOST_SIMULATIONS = 32
Cuts = tuple[int, ...]
"""Indices of the cuts around the stages, the first and the last cut of the chain included."""
Transfer = Callable[[Sequence[Block], Sequence[Block]], FloatArray]


def plan(chain: Chain) -> Partition:
    """The fastest partition in a simulated 1F1B over all numbers of stages.

    Raises:
        InfeasibleError: if none fits.
    """
    costs = StageCosts(chain, device_blocks(chain))
    balance = Balance(costs.work_s(costs.blocks) * len(devices_of(costs.blocks)))
    most = min(most_stages(chain), costs.layers, len(costs.blocks))
    searches = [_Search(costs, balance, stages) for stages in range(1, most + 1)]
    searches.sort(key=lambda search: search.time_s)
    for search in searches[:MOST_SEARCHES]:
        search.improve()
    best = min(searches, key=lambda search: search.time_s)
    if not math.isfinite(best.time_s):
        raise nothing_fits("autopipe", "its balanced partitions and their neighbours")
    return best.partition()


class Balance:
    """Balanced cuts of the first layers, and of the last ones, into any number of stages.

    Args:
        work_s: seconds of every interval of cuts, a square matrix.
    """

    def __init__(self, work_s: FloatArray) -> None:
        self.work_s = work_s
        self._front = _Table(work_s)
        self._back = _Table(work_s[::-1, ::-1].T)

    def front(self, end: int, stages: int) -> Cuts:
        """The layers before ``end``; the least bottleneck."""
        return self._front.cuts(end, stages)

    def back(self, begin: int, stages: int) -> Cuts:
        """The layers from ``begin`` on; the least bottleneck."""
        last = len(self.work_s) - 1
        return tuple(last - cut for cut in reversed(self._back.cuts(last - begin, stages)))


class _Table:
    """``best[n][j]``: the least bottleneck of the layers before cut j in n stages."""

    def __init__(self, work_s: FloatArray) -> None:
        self._work_s = np.where(np.triu(np.ones_like(work_s), 1) > 0, work_s, np.inf)
        first = np.full(len(work_s), np.inf)
        first[0] = 0.0
        self._best = [first]
        self._last = [np.zeros(len(work_s), dtype=np.int64)]

    def cuts(self, end: int, stages: int) -> Cuts:
        """The cuts that reach it; there must be a layer for each stage."""
        while len(self._best) <= stages:
            total = np.maximum(self._best[-1][:, None], self._work_s)
            self._last.append(total.argmin(axis=0))
            self._best.append(total.min(axis=0))
        found = [end]
        for left in range(stages, 0, -1):
            found.append(int(self._last[left][found[-1]]))
        return tuple(reversed(found))


class _Search:
    """Partitions into one number of stages: the fastest so far, at first the balanced one."""

    def __init__(self, costs: StageCosts, balance: Balance, stages: int) -> None:
        job = costs.chain.problem.job
        each = len(costs.blocks) // stages if job.replication else 1
        self.costs = costs
        self.balance = balance
        self.stages = stages
        self.held = [costs.blocks[s * each : (s + 1) * each] for s in range(stages)]
        self.replicas = np.array([len(devices_of(blocks)) for blocks in self.held])
        self.microbatches = -(-job.microbatches // int(self.replicas.min()))
        self.cuts = balance.front(costs.layers, stages)
        self.time_s, self.critical = self._simulate(self.cuts)

    def partition(self) -> Partition:
        """The stages on their devices."""
        return tuple(
            self.costs.stage(self.cuts[s], self.cuts[s + 1], self.held[s])
            for s in range(self.stages)
        )

    def improve(self) -> None:
        """Move layers away from critical stages, breadth first."""
        seen = {self.cuts}
        queue = deque([(self.cuts, self.critical)])
        while queue:
            for cuts in self._moved(*queue.popleft()):
                if cuts in seen or len(seen) == MOST_SIMULATIONS:
                    continue
                seen.add(cuts)
                time_s, critical = self._simulate(cuts)
                queue.append((cuts, critical))
                if time_s < self.time_s:
                    self.cuts, self.time_s = cuts, time_s

    def _simulate(self, cuts: Cuts) -> tuple[float, int]:
        """Iteration time, infinite if it does not fit, and the critical stage."""
        pipeline = Pipeline(
            self.replicas * self._by_stage(self.costs.forward_s, cuts),
            self.replicas * self._by_stage(self.costs.backward_s, cuts),
            self._transfers_s(cuts, self.costs.send_s),
            self._transfers_s(cuts, self.costs.send_back_s),
        )
        time_s, critical = simulate_1f1b(pipeline, self.microbatches)
        rest_s = self._by_stage(self.costs.reduce_s, cuts).max()
        for s, blocks in enumerate(self.held):
            in_flight = (self.stages - s) * int(self.replicas[s])
            rest_s += self.costs.fits(blocks, in_flight)[cuts[s], cuts[s + 1]]
        return time_s + float(rest_s), critical

    def _by_stage(self, of: Callable[[Sequence[Block]], FloatArray], cuts: Cuts) -> FloatArray:
        return np.array([of(blocks)[cuts[s], cuts[s + 1]] for s, blocks in enumerate(self.held)])

    def _transfers_s(self, cuts: Cuts, transfer: Transfer) -> FloatArray:
        """One microbatch between each stage and the next; every replica has its own way."""
        each = [
            transfer(self.held[s], self.held[s + 1])[cuts[s + 1]] for s in range(self.stages - 1)
        ]
        return np.asarray(np.array(each, dtype=np.float64) * self.replicas[:-1])

    def _moved(self, cuts: Cuts, critical: int) -> Iterator[Cuts]:
        """The critical stage hands a layer to the stages before it, or to those behind it."""
        begin, end = cuts[critical], cuts[critical + 1]
        if end - begin < 2:
            return
        if critical > 0:
            yield (*self.balance.front(begin + 1, critical), *cuts[critical + 1 :])
        if critical < self.stages - 1:
            behind = self.stages - 1 - critical
            yield (*cuts[: critical + 1], *self.balance.back(end - 1, behind))


AUTOPIPE = Planner("autopipe", "Liu et al., CLUSTER 2022", plan)
