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
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planner.baselines.layers import Baseline, Floats, Layers, Stages, nothing_fits
from planner.baselines.stage_costs import Block, StageCosts, device_blocks, devices_of
from planner.program.compiled import compiled, entry

MOST_MICROBATCHES_A_STAGE = 4
"""So many microbatches a stage are simulated; further ones repeat the slowest stage's work."""
MOST_SEARCHES = 4
MOST_SIMULATIONS = 32
Cuts = tuple[int, ...]
"""Indices of the cuts around the stages, the first and the last cut included."""


# --- simulated 1F1B -------------------------------------------------------------------------------


class Timings(NamedTuple):
    """Seconds of one microbatch: by stage, (N,), and by channel to the next stage, (N-1,)."""

    forward_s: Floats
    backward_s: Floats
    send_s: Floats
    send_back_s: Floats


def simulate_1f1b(timings: Timings, microbatches: int) -> tuple[float, int]:
    """Run 1F1B: stage s of N keeps N - s microbatches in flight.

    Returns:
        When the last backward ends, and the stage where the critical path computes longest.
    """
    stages = len(timings.forward_s)
    counted = min(microbatches, MOST_MICROBATCHES_A_STAGE * stages)
    busy_s = np.zeros(stages)
    time_s = _run_1f1b(*timings, counted, busy_s)
    steady_s = float((timings.forward_s + timings.backward_s).max())
    return time_s + (microbatches - counted) * steady_s, int(busy_s.argmax())


@entry
def _run_1f1b(
    forward_s: Floats,
    backward_s: Floats,
    send_s: Floats,
    back_s: Floats,
    count: int,
    busy_s: Floats,
) -> float:
    """Return the end of 1F1B, and add up in ``busy_s`` what each stage has of the critical path.

    An order of all operations is that of unit times without transfers: stage s runs forward m at
    s + m before its first backward and at s + 2m after it, backward m at 2N-1-s + 2m.
    """
    stages = len(forward_s)
    ends_s = np.zeros((2, stages, count))  # Forwards, backwards.
    has_waited = np.zeros((2, stages, count), np.bool_)  # For its input, not for its device.
    free_s = np.zeros(stages)
    for moment in range(2 * (stages + count) - 1):
        for kind in range(2):
            for s in range(stages):
                m = _microbatch_at(kind, s, moment, stages)
                if not 0 <= m < count:
                    continue
                ready_s = 0.0
                if kind == 0 and s > 0:
                    ready_s = ends_s[0, s - 1, m] + send_s[s - 1]
                elif kind == 1 and s < stages - 1:
                    ready_s = ends_s[1, s + 1, m] + back_s[s]
                elif kind == 1:
                    ready_s = ends_s[0, s, m]
                has_waited[kind, s, m] = ready_s > free_s[s] or (kind and ready_s == free_s[s])
                length_s = backward_s[s] if kind else forward_s[s]
                free_s[s] = ends_s[kind, s, m] = max(free_s[s], ready_s) + length_s
    s, kind, m = int(ends_s[1, :, count - 1].argmax()), 1, count - 1
    end_s = ends_s[1, s, m]
    while m >= 0:
        busy_s[s] += backward_s[s] if kind else forward_s[s]
        if has_waited[kind, s, m]:
            if kind == 0:
                s -= 1
            elif s < stages - 1:
                s += 1
            else:
                kind = 0
        else:
            kind, m = _before(kind, stages - s, m, count)
    return float(end_s)


@compiled
def _microbatch_at(kind: int, s: int, moment: int, stages: int) -> int:
    """Return what a stage runs at a moment of unit times; -1: nothing."""
    since = moment - (2 * stages - 1 - s if kind else s)
    if since < 0:
        return -1
    if kind == 0 and since < stages - s:
        return since
    if since % 2 or (kind == 0 and since // 2 < stages - s):
        return -1
    return since // 2


@compiled
def _before(kind: int, in_flight: int, m: int, count: int) -> tuple[int, int]:
    """Return what runs before an operation on its device; microbatch -1: nothing."""
    if kind == 0:
        return (1, m - in_flight) if m >= in_flight else (0, m - 1)
    if m + in_flight - 1 < count:
        return 0, m + in_flight - 1
    return (1, m - 1) if m else (0, count - 1)


# --- search ---------------------------------------------------------------------------------------


def plan(layers: Layers) -> Stages:
    """Return the fastest partition in a simulated 1F1B over all numbers of stages.

    Raises:
        InfeasibleError: if none fits.
    """
    costs = StageCosts(layers, device_blocks(layers))
    balance = Balance(costs.work_s(costs.blocks) * len(devices_of(costs.blocks)))
    most = min(layers.max_stages, costs.length, len(costs.blocks))
    searches = [_Search(costs, balance, stages) for stages in range(1, most + 1)]
    searches.sort(key=lambda search: search.time_s)
    for search in searches[:MOST_SEARCHES]:
        search.improve()
    best = min(searches, key=lambda search: search.time_s)
    if not math.isfinite(best.time_s):
        raise nothing_fits("autopipe", "its balanced partitions and their neighbours")
    return best.stages()


class Balance:
    """Balanced cuts of the first layers, and of the last ones, into any number of stages.

    Args:
        work_s: seconds of every interval of cuts, a square matrix.
    """

    def __init__(self, work_s: Floats) -> None:
        self._last = len(work_s) - 1
        self._front = _Table(work_s)
        self._back = _Table(work_s[::-1, ::-1].T)

    def front(self, end: int, stages: int) -> Cuts:
        """Return the layers before ``end``; the least bottleneck."""
        return self._front.cuts(end, stages)

    def back(self, begin: int, stages: int) -> Cuts:
        """Return the layers from ``begin`` on; the least bottleneck."""
        found = self._back.cuts(self._last - begin, stages)
        return tuple(self._last - cut for cut in reversed(found))


class _Table:
    """``best[n][j]``: the least bottleneck of the layers before cut j in n stages."""

    def __init__(self, work_s: Floats) -> None:
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

    def __init__(self, costs: StageCosts, balance: Balance, stages: int) -> None:
        job = costs.layers.problem.job
        each = len(costs.blocks) // stages if job.replication else 1
        self._costs, self._balance, self._count = costs, balance, stages
        self._held = [costs.blocks[s * each : (s + 1) * each] for s in range(stages)]
        self._replicas = np.array([len(devices_of(blocks)) for blocks in self._held])
        self._microbatches = -(-job.microbatches // int(self._replicas.min()))
        self._cuts = balance.front(costs.length, stages)
        self.time_s, self._critical = self._simulate(self._cuts)

    def stages(self) -> Stages:
        """Return the stages on their devices."""
        ends = zip(self._cuts, self._cuts[1:], self._held, strict=False)
        return tuple(self._costs.stage(*row) for row in ends)

    def improve(self) -> None:
        """Move layers away from critical stages, breadth first."""
        seen = {self._cuts}
        queue = deque([(self._cuts, self._critical)])
        while queue:
            for cuts in self._moved(*queue.popleft()):
                if cuts in seen or len(seen) == MOST_SIMULATIONS:
                    continue
                seen.add(cuts)
                time_s, critical = self._simulate(cuts)
                queue.append((cuts, critical))
                if time_s < self.time_s:
                    self._cuts, self.time_s = cuts, time_s

    def _simulate(self, cuts: Cuts) -> tuple[float, int]:
        """Return iteration time, infinite if it does not fit, and the critical stage."""
        timings = Timings(
            self._replicas * self._by_stage(self._costs.forward_s, cuts),
            self._replicas * self._by_stage(self._costs.backward_s, cuts),
            self._channels_s(self._costs.send_s, cuts),
            self._channels_s(self._costs.send_back_s, cuts),
        )
        time_s, critical = simulate_1f1b(timings, self._microbatches)
        rest_s = float(self._by_stage(self._costs.reduce_s, cuts).max())
        for s, blocks in enumerate(self._held):
            in_flight = (self._count - s) * int(self._replicas[s])
            rest_s += self._costs.fits(blocks, in_flight)[cuts[s], cuts[s + 1]]
        return time_s + rest_s, critical

    def _by_stage(self, of: Callable[[Sequence[Block]], Floats], cuts: Cuts) -> Floats:
        return np.array([of(blocks)[cuts[s], cuts[s + 1]] for s, blocks in enumerate(self._held)])

    def _channels_s(
        self, of: Callable[[Sequence[Block], Sequence[Block]], Floats], cuts: Cuts
    ) -> Floats:
        """Return one microbatch between each stage and the next; every replica has its own way."""
        ends = zip(self._held, self._held[1:], cuts[1:], strict=False)
        each = np.array([of(here, there)[cut] for here, there, cut in ends], dtype=np.float64)
        return np.asarray(each * self._replicas[:-1])

    def _moved(self, cuts: Cuts, critical: int) -> Iterator[Cuts]:
        """The critical stage hands a layer to the stages before it, or to those after it."""
        begin, end = cuts[critical], cuts[critical + 1]
        if end - begin < 2:
            return
        if critical > 0:
            yield (*self._balance.front(begin + 1, critical), *cuts[critical + 1 :])
        if critical < self._count - 1:
            after = self._count - 1 - critical
            yield (*cuts[: critical + 1], *self._balance.back(end - 1, after))


AUTOPIPE = Baseline("autopipe", "Liu et al., CLUSTER 2022", plan)
