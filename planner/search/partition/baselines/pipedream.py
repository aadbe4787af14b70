"""PipeDream's planner.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1.

The dynamic program that minimises the slowest stage, with replication, over the devices in file
order; where a cluster is several equal machines, machine by machine first and over the machines
then, as the paper does for a hierarchy of networks:

    A(i, j, m) = min over s, m' of max(A(i, s, m - m'), 2 * transfer at s, T(s, j, m')),
    T(i, j, m) = max(work of the level below / m, synchronisation).

Transfers are always on. Our reconstruction: the weights are synchronised once an iteration of M
microbatches instead of once a microbatch, overlapped with the computation as in the paper; a stage
must hold the microbatches that 1F1B keeps in flight (of a machine's inner stages: one).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import partial
from typing import NamedTuple

import numpy as np

from planner.search.partition.baselines.baseline import Baseline, equal_machines, nothing_fits
from planner.search.partition.baselines.stage_costs import (
    BaselineStageCosts,
    Block,
    Choice,
    RowCosts,
    device_blocks,
    in_file_order,
    most_stages,
    refined,
)
from planner.search.partition.chain import Chain, FloatArray, IntArray, Partition, StageChoice
from planner.search.partition.dynamic_programs.min_max import (
    MAX_REPLICA_CHOICES,
    MinMaxTable,
    Within,
    replica_counts,
)


def plan(chain: Chain) -> Partition:
    """Return the partition with the fastest slowest stage.

    Raises:
        InfeasibleError: if none fits.
    """
    return in_file_order(chain, _by_machines(chain) or flat_plan(chain))


def quick_plan(chain: Chain) -> Partition:
    """Return the same with few numbers of replicas where there are many devices.

    Raises:
        InfeasibleError: if none fits.
    """
    found = _by_machines(chain)
    if found is None:
        choice = _fastest(chain, device_blocks(chain), MAX_REPLICA_CHOICES, math.inf)
        found = _some(choice and choice[0])
    return in_file_order(chain, found)


def _by_machines(chain: Chain) -> Partition | None:
    """Return the partition over machines, within each of them first; None where it is not made."""
    groups = equal_machines(chain.problem.cluster) if chain.problem.job.replication else None
    found = None if groups is None else _Levels(chain, groups).partition()
    return found if found is not None and len(found) <= most_stages(chain) else None


def flat_plan(chain: Chain) -> Partition:
    """Return the partition over one level of network, in file order.

    Raises:
        InfeasibleError: if no partition fits.
    """
    blocks = device_blocks(chain)
    return _some(refined(len(blocks), partial(_fastest, chain, blocks)))


def _some(partition: Partition | None) -> Partition:
    if partition is None:
        raise nothing_fits("pipedream", "its partitions along the file's order of devices")
    return partition


def _fastest(
    chain: Chain, blocks: tuple[Block, ...], most_choices: int, limit_s: float
) -> Choice | None:
    """Return the partition with the least bottleneck below a limit, and the bottleneck."""
    costs = _Costs(chain, blocks, most_choices)
    table = MinMaxTable(costs, Within(limit_s, costs.before_s))
    counts = range(1, min(most_stages(chain), costs.layers, costs.positions) + 1)
    for _ in counts:
        table.add_stage()
    count = min(counts, key=table.bottleneck_s)
    spans = table.spans(count)
    return (costs.stages(spans), table.bottleneck_s(count)) if spans else None


class _Costs(RowCosts):
    """PipeDream's costs of a whole iteration on neighbouring devices."""

    def stage_s(self, first: int, replicas: int, after: int) -> FloatArray:
        """Return the longer of all computation and the synchronisation overlapped with it."""
        work_s = self.fitting_work_s(first, replicas, after)
        return np.maximum(work_s, self.reduce_s(first, replicas))


class _Part(NamedTuple):
    """A stage: layers ``begin`` to ``end`` on ``units`` devices or machines from ``first`` on."""

    begin: int
    end: int
    first: int
    units: int


class _Levels:
    """The program on two levels: devices of a machine, then machines."""

    def __init__(self, chain: Chain, groups: tuple[Block, ...]) -> None:
        self.chain = chain
        self.groups = groups
        self.microbatches = chain.problem.job.microbatches
        self.devices = tuple((name,) for name in groups[0])
        self.inner = BaselineStageCosts(chain, self.devices)
        # A machine stands for its first device: its devices hold different stages, if any.
        self.outer = BaselineStageCosts(chain, tuple(group[:1] for group in groups))

    def partition(self) -> Partition | None:
        """Return the best partition over all machines; None if none fits."""
        length, size = self.inner.layers, len(self.devices)
        inside = _Program(
            [self._replicated_s(count) for count in range(1, size + 1)],
            self._transfer_s(self.inner),
            range(length),
        )
        counts = range(1, len(self.groups) + 1)
        across = _Program(
            [self._over_machines_s(inside.best[-1], count) for count in counts],
            self._transfer_s(self.outer),
            range(1),
        )
        most = min(counts, key=lambda count: across.best[count - 1][0, length])
        if not math.isfinite(across.best[most - 1][0, length]):
            return None
        return tuple(
            self._stage(outer, inner)
            for outer in across.parts(0, length, most)
            for inner in inside.parts(outer.begin, outer.end, size)
        )

    def _replicated_s(self, count: int) -> FloatArray:
        """Return one stage on some devices of a machine."""
        blocks = self.devices[:count]
        work_s = self.microbatches * self.inner.work_s(blocks)
        return np.maximum(work_s, self.inner.reduce_s(blocks)) + self.inner.fits(blocks, 1)

    def _over_machines_s(self, inside: FloatArray, count: int) -> FloatArray:
        """Return the time of the layers on several machines that share the microbatches."""
        if count == 1:
            return inside
        return np.maximum(inside / count, self.outer.reduce_s(self.outer.blocks[:count]))

    def _transfer_s(self, costs: BaselineStageCosts) -> FloatArray:
        """Return all activations and gradients between neighbours of a level."""
        ends = costs.blocks[:1], costs.blocks[1:2]
        return self.microbatches * (costs.send_s(*ends) + costs.send_back_s(*ends))

    def _stage(self, outer: _Part, inner: _Part) -> StageChoice:
        machines = self.groups[outer.first : outer.first + outer.units]
        blocks = [machine[inner.first : inner.first + inner.units] for machine in machines]
        return self.inner.stage(inner.begin, inner.end, blocks)


class _Program:
    """A(i, j, m) of one level, for every m and for some i.

    Args:
        stages: T(i, j, m) for m = 1, 2, …; with many, a last stage takes a power of two of them.
        transfer_s: by cut.
        begins: the values of i.
    """

    def __init__(self, stages: list[FloatArray], transfer_s: FloatArray, begins: range) -> None:
        self.best: list[FloatArray] = []
        self._cuts: list[IntArray] = []
        self._lasts: list[IntArray] = []
        counts = replica_counts(len(stages), replication=True)
        for units, whole in enumerate(stages, start=1):
            self.best.append(whole.copy())
            self._cuts.append(np.zeros(whole.shape, dtype=np.int64))
            self._lasts.append(np.zeros(whole.shape, dtype=np.int64))
            for taken in counts[: bisect_left(counts, units)]:
                front = np.maximum(self.best[units - taken - 1], transfer_s[None, :])
                for begin in begins:
                    self._split(begin, taken, front[begin], stages[taken - 1])

    def _split(self, begin: int, taken: int, front: FloatArray, stage: FloatArray) -> None:
        """Cut the intervals from ``begin`` where a last stage on ``taken`` units does best."""
        total = np.maximum(front[:, None], stage)
        where = total.argmin(axis=0)
        value = total[where, np.arange(len(where))]
        better = value < self.best[-1][begin]
        self.best[-1][begin][better] = value[better]
        self._cuts[-1][begin][better] = where[better]
        self._lasts[-1][begin][better] = taken

    def parts(self, begin: int, end: int, units: int) -> list[_Part]:
        """Return the stages that reach A(begin, end, units)."""
        found = []
        while taken := int(self._lasts[units - 1][begin, end]):
            cut = int(self._cuts[units - 1][begin, end])
            found.append(_Part(cut, end, units - taken, taken))
            end, units = cut, units - taken
        return [_Part(begin, end, 0, units), *reversed(found)]


PIPEDREAM = Baseline("pipedream", "Narayanan et al., SOSP 2019, section 3.1", plan, quick_plan)
