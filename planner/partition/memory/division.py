"""Dividing the layers into stages that fit their devices: whether it can be done at all.

Only memory counts here, with one microbatch in flight and, where the job allows it, everything
recomputed that saves anything. Needs are rounded in the layers' favour, so that where no division
exists no plan does; a division that exists may still fail by a few bytes shared between layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.partition.chain import Chain, FloatArray, Partition, StageChoice
from planner.partition.memory.interval_memory import IntervalMemory

MOST_STATES = 4000
"""Numbers of devices used of each type; beyond this devices are taken largest first."""

Counts = tuple[int, ...]
Reached = tuple[NDArray[np.int64], NDArray[np.int64]]
"""By position: where the last stage begins (-1: not reached), and the type that holds it."""


class Division:
    """Which layers fit on which types of device, and divisions made of that.

    Args:
        chain: the layers.
        more_devices: added to each type's number.

    Attributes:
        need_bytes: ``[i, j]``: what layers i to j need at least, infinite where empty.
        is_exact: whether a division that is not found does not exist.
    """

    def __init__(self, chain: Chain, more_devices: Mapping[str, int] | None = None) -> None:
        self._chain = chain
        problem = chain.problem
        more = more_devices or {}
        kinds = [device.type for device in problem.cluster.devices]
        self._counts = [kinds.count(name) + more.get(name, 0) for name in chain.types]
        self._capacities = [problem.cluster.device_types[t].capacity_bytes for t in chain.types]
        self._most = min(problem.job.max_stages or chain.length, sum(self._counts))
        self.memory = IntervalMemory(chain)
        self.need_bytes = _least_needs(chain, self.memory)
        self.is_exact = prod(count + 1 for count in self._counts) <= MOST_STATES

    def divide(self, slack_bytes: float = 0.0) -> list[tuple[int, int, str]] | None:
        """The fewest stages, as (begin, end, device type), that fit; None if none are found.

        Args:
            slack_bytes: added to every device's capacity.
        """
        fits = [self.need_bytes <= capacity + slack_bytes for capacity in self._capacities]
        length = self._chain.length
        start = np.full(length + 1, -1)
        start[0] = 0
        reached: dict[Counts, Reached] = {(0,) * len(fits): (start, start)}
        for state in self._states():
            reached[state] = self._extend(state, reached, fits)
            if reached[state][0][length] >= 0:
                return self._traced(state, reached)
        return None

    def _states(self) -> Iterator[Counts]:
        """Numbers of devices used, fewest first; without the empty one."""
        if self.is_exact:
            every = product(*(range(count + 1) for count in self._counts))
            yield from sorted((s for s in every if 0 < sum(s) <= self._most), key=sum)
            return
        used = [0] * len(self._counts)
        by_size = sorted(range(len(used)), key=lambda kind: -self._capacities[kind])
        in_turn = [number for number in by_size for _ in range(self._counts[number])]
        for kind in in_turn[: self._most]:
            used[kind] += 1
            yield tuple(used)

    def _extend(
        self, state: Counts, reached: Mapping[Counts, Reached], fits: list[NDArray[np.bool_]]
    ) -> Reached:
        """Positions that one more stage reaches, its device of any type used."""
        begin = np.full(self._chain.length + 1, -1)
        kinds = begin.copy()
        for kind in range(len(state)):
            before = reached.get(_one_less(state, kind))
            if before is None:
                continue
            starts = np.flatnonzero(before[0] >= 0)
            if not len(starts):
                continue
            ends = fits[kind][starts]
            new = ends.any(axis=0) & (begin < 0)
            begin[new] = starts[ends.argmax(axis=0)][new]
            kinds[new] = kind
        return begin, kinds

    def _traced(
        self, state: Counts, reached: Mapping[Counts, Reached]
    ) -> list[tuple[int, int, str]]:
        stages, end = [], self._chain.length
        while end > 0:
            begins, kinds = reached[state]
            begin, kind = int(begins[end]), int(kinds[end])
            stages.append((begin, end, self._chain.types[kind]))
            state, end = _one_less(state, kind), begin
        return stages[::-1]

    def least_slack_bytes(self) -> float:
        """How much more every device would need for some division to fit; 0 if one fits."""
        over = [self.need_bytes[np.isfinite(self.need_bytes)] - c for c in self._capacities]
        slacks = np.unique(np.maximum(np.concatenate(over), 0.0))
        low, high = 0, len(slacks) - 1
        while low < high:
            middle = (low + high) // 2
            if self.divide(float(slacks[middle])) is None:
                low = middle + 1
            else:
                high = middle
        return float(slacks[low])

    def partition(self) -> Partition | None:
        """The division on devices of the cluster, each type's in the order of the file."""
        stages = self.divide()
        if stages is None:
            return None
        cluster = self._chain.problem.cluster
        free = {t: [d.name for d in cluster.devices if d.type == t] for t in self._chain.types}
        return tuple(StageChoice(begin, end, (free[t].pop(0),)) for begin, end, t in stages)


def _one_less(state: Counts, kind: int) -> Counts:
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])


def _least_needs(chain: Chain, memory: IntervalMemory) -> FloatArray:
    need = memory.held_bytes + memory.stash_bytes
    if chain.problem.job.recompute:
        # What is recomputed saves a stash, and is held again while its layer's backward runs.
        kept = chain.stashes
        need = memory.held_with(kept.kept_bytes) + kept.least_by_interval()
    need[np.tril_indices(len(need))] = np.inf
    return np.asarray(need, dtype=np.float64)
