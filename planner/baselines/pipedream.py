"""PipeDream's planner.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1.

The dynamic program that minimises the slowest stage, with replication, over the devices in file
order (``along``); where a cluster is several equal machines, machine by machine first and over the
machines then, as the paper does for a hierarchy of networks:

    A(i, j, m) = min over s, m' of max(A(i, s, m - m'), 2 * transfer at s, T(s, j, m')),
    T(i, j, m) = max(work of the level below / m, synchronisation).

Transfers are always on. Our reconstruction: the weights are synchronised once an iteration of M
microbatches instead of once a microbatch, overlapped with the computation as in the paper; a stage
must hold the microbatches that 1F1B keeps in flight (of a machine's inner stages: one).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from planner.baselines.along import Row
from planner.baselines.layers import (
    Baseline,
    Floats,
    Ints,
    Layers,
    Stage,
    Stages,
    equal_machines,
    in_file_order,
    nothing_fits,
)
from planner.baselines.stage_costs import Block, StageCosts, device_blocks, replica_counts

MOST_UNITS = 16
"""Of more devices or machines, a last stage takes a power of two, or all."""


def plan(layers: Layers) -> Stages:
    """Return the partition with the fastest slowest stage.

    Raises:
        InfeasibleError: if none fits.
    """
    groups = equal_machines(layers.problem.cluster) if layers.problem.job.replication else None
    found = None if groups is None else _Levels(layers, groups).stages()
    if found is None or len(found) > layers.max_stages:
        found = flat_plan(layers)
    return in_file_order(layers, found)


def flat_plan(layers: Layers) -> Stages:
    """Return the partition over one level of network, in file order.

    Raises:
        InfeasibleError: if no partition fits.
    """
    row = Row(StageCosts(layers, device_blocks(layers)), np.maximum)
    found: Stages | None = None
    for bottleneck_s, stages in row.best():
        found, row.limit_s = stages, bottleneck_s
    if found is None:
        raise nothing_fits("pipedream", "its partitions along the file's order of devices")
    return found


class _Part(NamedTuple):
    """A stage: layers ``begin`` to ``end`` on ``units`` devices or machines from ``first`` on."""

    begin: int
    end: int
    first: int
    units: int


class _Levels:
    """The program on two levels: devices of a machine, then machines."""

    def __init__(self, layers: Layers, groups: tuple[Block, ...]) -> None:
        self._groups = groups
        self._count = layers.problem.job.microbatches
        self._inner = StageCosts(layers, [(name,) for name in groups[0]])
        # A machine stands for its first device: its devices hold different stages, if any.
        self._outer = StageCosts(layers, [group[:1] for group in groups])

    def stages(self) -> Stages | None:
        """Return the best partition over all machines; None if none fits."""
        length, size = self._inner.length, len(self._groups[0])
        alone = [self._replicated_s(count) for count in range(1, size + 1)]
        inside = Program(alone, self._transfer_s(self._inner), range(length))
        counts = range(1, len(self._groups) + 1)
        over = [self._over_machines_s(inside.best[-1], count) for count in counts]
        across = Program(over, self._transfer_s(self._outer), range(1))
        most = min(counts, key=lambda count: across.best[count - 1][0, length])
        if not np.isfinite(across.best[most - 1][0, length]):
            return None
        return tuple(
            self._stage(outer, inner)
            for outer in across.parts(0, length, most)
            for inner in inside.parts(outer.begin, outer.end, size)
        )

    def _replicated_s(self, count: int) -> Floats:
        """Return one stage on some devices of a machine."""
        blocks = self._inner.blocks[:count]
        work_s = self._count * self._inner.work_s(blocks)
        return np.maximum(work_s, self._inner.reduce_s(blocks)) + self._inner.fits(blocks, 1)

    def _over_machines_s(self, inside: Floats, count: int) -> Floats:
        """Return the time of the layers on several machines that share the microbatches."""
        if count == 1:
            return inside
        return np.maximum(inside / count, self._outer.reduce_s(self._outer.blocks[:count]))

    def _transfer_s(self, costs: StageCosts) -> Floats:
        """Return all activations and gradients between neighbours of a level."""
        ends = costs.blocks[:1], costs.blocks[1:2]
        return self._count * (costs.send_s(*ends) + costs.send_back_s(*ends))

    def _stage(self, outer: _Part, inner: _Part) -> Stage:
        machines = self._groups[outer.first : outer.first + outer.units]
        blocks = [machine[inner.first : inner.first + inner.units] for machine in machines]
        return self._inner.stage(inner.begin, inner.end, blocks)


class Program:
    """A(i, j, m) of one level, for every m and for some i.

    Args:
        stages: T(i, j, m) for m = 1, 2, …
        transfer_s: by cut.
        begins: the values of i.
    """

    def __init__(self, stages: list[Floats], transfer_s: Floats, begins: range) -> None:
        self.best: list[Floats] = []
        self._cuts: list[Ints] = []
        self._lasts: list[Ints] = []
        counts = replica_counts(len(stages), replication=True, most=MOST_UNITS)
        for units, whole in enumerate(stages, start=1):
            self.best.append(whole.copy())
            self._cuts.append(np.zeros(whole.shape, dtype=np.int64))
            self._lasts.append(np.zeros(whole.shape, dtype=np.int64))
            for taken in counts[: bisect_left(counts, units)]:
                front = np.maximum(self.best[units - taken - 1], transfer_s[None, :])
                for begin in begins:
                    self._split(begin, taken, front[begin], stages[taken - 1])

    def _split(self, begin: int, taken: int, front: Floats, stage: Floats) -> None:
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


PIPEDREAM = Baseline("pipedream", "Narayanan et al., SOSP 2019, section 3.1", plan)
