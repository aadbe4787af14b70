"""Dividing the layers into stages that fit their devices: whether it can be done at all.

Only memory counts here, with one microbatch in flight and, where the job allows it, everything
recomputed that saves anything. Needs are rounded in the layers' favour, so that where no division
exists no plan does; a division that exists may still fail by a few bytes shared between layers.

Divisions of the layers that fit in fact.

:class:`Division` takes each stage's least stash from a table that counts tensors shared by several
layers as kept for nothing. Here the stages of every division it finds are looked at one by one and
the table is raised to what recomputation can reach, until a division stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.search.partition.chain import Chain, FloatArray, Partition, StageChoice
from planner.search.partition.memory.interval_memory import IntervalMemory
from planner.search.partition.memory.recompute import Holding, RecomputeChooser

MOST_STATES = 4000
"""Numbers of devices used of each type; beyond this devices are taken largest first."""

Counts = tuple[int, ...]
Reached = tuple[NDArray[np.int64], NDArray[np.int64]]
"""By position: where the last stage begins (-1: not reached), and the type that holds it."""


class Division:
    """The layers that fit on each device type, and divisions made of that.

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
        self._most = min(chain.stage_limit, sum(self._counts))
        self.memory = IntervalMemory(chain)
        self.need_bytes = _least_needs(chain, self.memory)
        self.is_exact = prod(count + 1 for count in self._counts) <= MOST_STATES

    def divide(self, slack_bytes: float = 0.0) -> list[tuple[int, int, str]] | None:
        """Return the fewest stages, as (begin, end, device type), that fit; None if none are found.

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
        """Yield numbers of devices used, fewest first; without the empty one."""
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
        """Return positions that one more stage reaches, its device of any type used."""
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
        """Return how much more every device would need for some division to fit; 0 if one fits."""
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
        """Return the division on devices of the cluster, each type's in the order of the file."""
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
    need[~chain.may_cut, :] = need[:, ~chain.may_cut] = np.inf
    return np.asarray(need, dtype=np.float64)


MOST_ROUNDS = 200
"""Divisions looked at; a handful is the rule."""
TOLERANCE = 1e-3
"""How far above the least stash the one that is found may lie."""
TypedStages = list[tuple[int, int, str]]


class TightDivision:
    """A :class:`Division` whose table is raised where its own divisions show it to be too low.

    Args:
        chain: the layers.
        more_devices: added to each type's number.
        like: of the same chain, whose raised table is taken over.
    """

    def __init__(
        self,
        chain: Chain,
        more_devices: Mapping[str, int] | None = None,
        like: TightDivision | None = None,
    ) -> None:
        self._chain = chain
        self._chooser: RecomputeChooser = (
            like._chooser
            if like
            else RecomputeChooser(chain, counts_workspace=False, on_any_type=True)
        )
        self.division = Division(chain, more_devices)
        self._least: dict[tuple[int, int], int] = {} if like is None else like._least
        self._raised: set[tuple[int, int]] = set() if like is None else like._raised
        if like is not None:
            self.division.need_bytes = like.division.need_bytes

    def divide(self) -> TypedStages | None:
        """Return the fewest stages that fit with one microbatch in flight, or None."""
        for _ in range(MOST_ROUNDS):
            stages = self.division.divide()
            if stages is None or not self._raise_needs(stages):
                return stages
        return None

    def partition(self) -> Partition | None:
        """Return the division on devices of the cluster."""
        return None if self.divide() is None else self.division.partition()

    def least_overflow(self) -> tuple[float, TypedStages]:
        """Return how much more every device would need, and the division that would then fit."""
        for _ in range(MOST_ROUNDS):
            found = self._overflow()
            if not self._raise_needs(found[1]):
                return found
        return self._overflow()

    def _overflow(self) -> tuple[float, TypedStages]:
        slack_bytes = self.division.least_slack_bytes()
        stages = self.division.divide(slack_bytes)
        assert stages is not None
        return slack_bytes, stages

    def least_stash_bytes(self, begin: int, end: int) -> int:
        """Return what layers ``begin`` to ``end`` keep of a microbatch at least."""
        stash = self._chain.stashes.stage(begin, end)
        if not self._chain.problem.job.recompute:
            return stash.fixed_bytes
        if (begin, end) not in self._least:
            self._least[begin, end] = self._search(begin, end, stash.fixed_bytes)
        return self._least[begin, end]

    def _search(self, begin: int, end: int, all_bytes: int) -> int:
        """Find the least stash by halving the room that it is given."""
        holding = Holding(begin, end, (self._chain.types[0],))
        low, high = int(self._chain.stashes.least_by_interval()[begin, end]), all_bytes
        room = low
        while low < high:
            found = self._chooser.choose([holding], room)
            if found is not None:
                high = found.stash_bytes
            else:
                low = room + 1
            if high - low <= TOLERANCE * high:
                break
            room = (low + high) // 2
        return high

    def _raise_needs(self, stages: TypedStages) -> bool:
        """Return whether a stage needs more than the table said."""
        table, raised = self.division.need_bytes, False
        for begin, end, _ in stages:
            if (begin, end) in self._raised or not self._has_shared_tensors(begin, end):
                continue
            self._raised.add((begin, end))
            need_bytes = self._need_bytes(begin, end)
            raised = raised or need_bytes > table[begin, end]
            table[begin, end] = max(need_bytes, table[begin, end])
        return raised

    def _has_shared_tensors(self, begin: int, end: int) -> bool:
        """Return whether the table may be too low: it counts such tensors as kept for nothing."""
        stash = self._chain.stashes.stage(begin, end)
        return self._chain.problem.job.recompute and bool(stash.joint)

    def _need_bytes(self, begin: int, end: int) -> float:
        """Least bytes of one microbatch, whatever is recomputed."""
        chain = self._chain
        workspace = chain.stashes.workspace_bytes(begin, end)
        held = self.division.memory.held_bytes[begin, end] - workspace
        received = chain.stashes.received_by_interval()[begin]
        # While a layer runs: its peak, and what the layers before it keep at least. What it and
        # those after it save of what is received or made before it is theirs.
        running = (
            self.least_stash_bytes(begin, k)
            - chain.stashes.saved_later_bytes(begin, k, end)
            + (received[end] - received[k] + chain.peak_bytes[k])
            for k in range(begin, end)
        )
        return float(held + max(self.least_stash_bytes(begin, end) + workspace, *running))
