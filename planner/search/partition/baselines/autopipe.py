"""AutoPipe: balanced stages, then layers moved away from the critical one.

Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and
Micro-batch Slicing", CLUSTER 2022.

For a number of stages, the balanced partition (a min-max dynamic program over the layers' times) is
the start. A simulated 1F1B gives the iteration time and the critical stage, where the critical path
computes longest. The critical stage hands its first layer to the stages before it, or its last
layer to the stages after it, which are balanced again. The fastest partition seen wins.

Stages lie on devices in file order; with data parallelism every stage has equally many neighbouring
replicas, each of which runs its share of the microbatches. Our reconstruction: layers are moved in
the :data:`MOST_SEARCHES` numbers of stages whose balanced partitions are fastest, breadth first,
:data:`MOST_SIMULATIONS` partitions each; the smallest simulated time plus all-reduce wins; for the
balance, layers take the slowest device type's time. Slicing of microbatches is left out.

A 1F1B iteration on single devices, as AutoPipe simulates it: times only, and the critical path.

Much faster than :mod:`planner.simulation.simulator`, which also knows shared links, replicas and
any order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planner.search.partition.baselines.baseline import Baseline, nothing_fits
from planner.search.partition.baselines.stage_costs import (
    BaselineStageCosts,
    Block,
    device_blocks,
    devices_of,
    most_stages,
)
from planner.search.partition.chain import Chain, FloatArray, Partition

MOST_MICROBATCHES_A_STAGE = 4
"""So many microbatches a stage are simulated; further ones repeat the slowest stage's work."""


class StageTimings(NamedTuple):
    """Seconds of one microbatch: by stage, (N,), and by channel to the next stage, (N-1,)."""

    forward_s: FloatArray
    backward_s: FloatArray
    send_s: FloatArray
    send_back_s: FloatArray


class Simulated(NamedTuple):
    """When the last backward ends, and the stage where the critical path computes longest."""

    time_s: float
    critical_stage: int


def simulate_1f1b(pipeline: StageTimings, microbatches: int) -> Simulated:
    """Run 1F1B: stage s of N keeps N - s microbatches in flight."""
    stages = len(pipeline.forward_s)
    counted = min(microbatches, MOST_MICROBATCHES_A_STAGE * stages)
    run = _Run(pipeline, counted)
    steady_s = float((pipeline.forward_s + pipeline.backward_s).max())
    time_s = float(run.ends["B"][:, -1].max()) + (microbatches - counted) * steady_s
    return Simulated(time_s, run.critical_stage())


class _Run:
    """Ends of all operations, ``ends[kind][stage, microbatch]``.

    With unit times and no transfers stage s runs forward m at s + m before its first backward and
    at s + 2m after it, backward m at 2N-1-s + 2m. Any times keep that order, so all
    operations of one such moment are computed at once.
    """

    def __init__(self, pipeline: StageTimings, microbatches: int) -> None:
        self.pipeline = pipeline
        self.stages = len(pipeline.forward_s)
        self.microbatches = microbatches
        shape = (self.stages, microbatches)
        self.ends = {"F": np.zeros(shape), "B": np.zeros(shape)}
        self._free = np.zeros(self.stages)
        for moment in range(2 * (self.stages + microbatches) - 1):
            self._forwards(moment)
            self._backwards(moment)

    def _forwards(self, moment: int) -> None:
        stage = np.arange(self.stages)
        since = moment - stage
        warm_up = (since >= 0) & (since < self.stages - stage)
        steady = (since % 2 == 0) & (since // 2 >= self.stages - stage)
        microbatch = np.where(warm_up, since, since // 2)
        here = stage[(warm_up | steady) & (microbatch < self.microbatches)]
        microbatch = microbatch[here]
        ready = np.where(
            here > 0,
            self.ends["F"][here - 1, microbatch] + np.append(0.0, self.pipeline.send_s)[here],
            0.0,
        )
        self._run("F", here, microbatch, ready, self.pipeline.forward_s)

    def _backwards(self, moment: int) -> None:
        stage = np.arange(self.stages)
        since = moment - (2 * self.stages - 1 - stage)
        here = stage[(since >= 0) & (since % 2 == 0) & (since // 2 < self.microbatches)]
        microbatch = since[here] // 2
        after = np.minimum(here + 1, self.stages - 1)
        ready = np.where(
            here < self.stages - 1,
            self.ends["B"][after, microbatch] + np.append(self.pipeline.send_back_s, 0.0)[here],
            self.ends["F"][here, microbatch],
        )
        self._run("B", here, microbatch, ready, self.pipeline.backward_s)

    def _run(
        self,
        kind: str,
        stage: np.ndarray,
        microbatch: np.ndarray,
        ready: FloatArray,
        seconds: FloatArray,
    ) -> None:
        end = np.maximum(self._free[stage], ready) + seconds[stage]
        self.ends[kind][stage, microbatch] = end
        self._free[stage] = end

    def critical_stage(self) -> int:
        """Follow what each operation waited for, from the last backward to the start."""
        busy_s = np.zeros(self.stages)
        stage, kind = int(self.ends["B"][:, -1].argmax()), "B"
        microbatch = self.microbatches - 1
        while True:
            seconds = self.pipeline.forward_s if kind == "F" else self.pipeline.backward_s
            busy_s[stage] += seconds[stage]
            waits = [self._input(stage, kind, microbatch), self._before(stage, kind, microbatch)]
            known = [wait for wait in waits if wait is not None]
            if not known:
                return int(busy_s.argmax())
            _, stage, kind, microbatch = max(known)

    def _input(self, stage: int, kind: str, microbatch: int) -> _Wait | None:
        """Return what the operation got its input from, and when."""
        if kind == "F":
            if stage == 0:
                return None
            arrival = self.ends["F"][stage - 1, microbatch] + self.pipeline.send_s[stage - 1]
            return _Wait(float(arrival), stage - 1, "F", microbatch)
        if stage == self.stages - 1:
            return _Wait(float(self.ends["F"][stage, microbatch]), stage, "F", microbatch)
        arrival = self.ends["B"][stage + 1, microbatch] + self.pipeline.send_back_s[stage]
        return _Wait(float(arrival), stage + 1, "B", microbatch)

    def _before(self, stage: int, kind: str, microbatch: int) -> _Wait | None:
        """Return what ran before the operation on its device."""
        in_flight = self.stages - stage
        if kind == "F":
            before = (
                ("B", microbatch - in_flight) if microbatch >= in_flight else ("F", microbatch - 1)
            )
        elif microbatch + in_flight - 1 < self.microbatches:
            before = ("F", microbatch + in_flight - 1)
        else:
            before = ("B", microbatch - 1) if microbatch else ("F", self.microbatches - 1)
        if before[1] < 0:
            return None
        return _Wait(float(self.ends[before[0]][stage, before[1]]), stage, *before)


class _Wait(NamedTuple):
    until_s: float
    stage: int
    kind: str
    microbatch: int


MOST_SEARCHES = 4
MOST_SIMULATIONS = 32
Cuts = tuple[int, ...]
"""Indices of the cuts around the stages, the first and the last cut of the chain included."""
Transfer = Callable[[Sequence[Block], Sequence[Block]], FloatArray]


def plan(chain: Chain) -> Partition:
    """Return the fastest partition in a simulated 1F1B over all numbers of stages.

    Raises:
        InfeasibleError: if none fits.
    """
    costs = BaselineStageCosts(chain, device_blocks(chain))
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
        """Return the layers before ``end``; the least bottleneck."""
        return self._front.cuts(end, stages)

    def back(self, begin: int, stages: int) -> Cuts:
        """Return the layers from ``begin`` on; the least bottleneck."""
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
        """Return the cuts that reach it; there must be a layer for each stage."""
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

    def __init__(self, costs: BaselineStageCosts, balance: Balance, stages: int) -> None:
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
        """Return the stages on their devices."""
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
        """Return iteration time, infinite if it does not fit, and the critical stage."""
        pipeline = StageTimings(
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
        """Return one microbatch between each stage and the next; every replica has its own way."""
        each = [
            transfer(self.held[s], self.held[s + 1])[cuts[s + 1]] for s in range(self.stages - 1)
        ]
        return np.asarray(np.array(each, dtype=np.float64) * self.replicas[:-1])

    def _moved(self, cuts: Cuts, critical: int) -> Iterator[Cuts]:
        """The critical stage hands a layer to the stages before it, or to those after it."""
        begin, end = cuts[critical], cuts[critical + 1]
        if end - begin < 2:
            return
        if critical > 0:
            yield (*self.balance.front(begin + 1, critical), *cuts[critical + 1 :])
        if critical < self.stages - 1:
            after = self.stages - 1 - critical
            yield (*cuts[: critical + 1], *self.balance.back(end - 1, after))


AUTOPIPE = Baseline("autopipe", "Liu et al., CLUSTER 2022", plan)
