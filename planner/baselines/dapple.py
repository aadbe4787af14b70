"""DAPPLE's planner of synchronous pipelines.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
section 4.

The planner minimises the latency of a synchronous pipeline, L = Tw + Ts + Te. With the pivot stage
Q, the one with the fewest bubbles:

    Tw = sum of F_i for i <= Q: until the pivot's first forward has ended;
    Ts = (M - 1) * (F_Q + B_Q): the pivot's steady phase;
    Te = max over i of AR_i + (sum of B_a for i <= a <= Q, if i <= Q;
                               minus the sum of B_a for Q < a < i, if i > Q).

The pivot is the last stage at first; going towards the first stage, s becomes the pivot if
(M - 1) * (F_s + B_s) > (M - 1) * (F_Q + B_Q) + sum of F_a + B_a for s < a < Q. Channels are stages
without an all-reduce. Devices for a stage come from three policies: fresh first (machines not used
yet), append first (machines in use), scatter first (all machines alike).

A state is a set of used devices with, for every number of layers, the best pipeline so far of
these layers; a new last stage on more devices leads to the next state. Our reconstruction: the
sums' limits in Te; a pipeline is judged by the latency of its own layers, but those of one stage
have states of their own, so that all pipelines of two stages are looked at, as the authors' planner
does; of the other sets with equally many devices only the :data:`MOST_SETS` most promising go on; a
stage must hold one microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.baselines.layers import (
    Baseline,
    Floats,
    Ints,
    Layers,
    Stage,
    Stages,
    in_file_order,
    machines,
    nothing_fits,
)
from planner.baselines.stage_costs import Block, StageCosts, device_blocks, replica_counts

MOST_CHOICES = 32
"""Up to so many devices a stage may have any number of them, beyond powers of two and all."""
MOST_SETS = 4
"""Sets of equally many devices that are followed up."""
Chosen = tuple[int, ...]
"""Positions of blocks of devices, ascending."""


# --- latency --------------------------------------------------------------------------------------


class Timed(NamedTuple):
    """Seconds of one microbatch of a stage, or of many stages, and of its all-reduce."""

    forward_s: Floats
    backward_s: Floats
    all_reduce_s: Floats


class Latency(NamedTuple):
    """What a longer pipeline's latency needs to know of a shorter one; arrays of equal shape.

    Attributes:
        warm_up_s: Tw.
        pivot_s: F_Q + B_Q.
        forward_after_s: forwards of the stages after the pivot.
        backward_after_s: their backwards.
        ending_s: Te.
        rival_s: the best steady phase of a stage after the pivot, less the work after it.
    """

    warm_up_s: Floats
    pivot_s: Floats
    forward_after_s: Floats
    backward_after_s: Floats
    ending_s: Floats
    rival_s: Floats

    @classmethod
    def nothing(cls, size: int) -> Latency:
        """Return pipelines without a stage."""
        return cls._make([*(np.zeros(size) for _ in range(5)), np.full(size, -np.inf)])

    def at(self, *index: Any) -> Latency:
        """Return some of the pipelines, or their arrays in another shape."""
        return Latency._make(array[index] for array in self)

    def total_s(self, microbatches: int) -> Floats:
        """Return Tw + Ts + Te."""
        return self.warm_up_s + (microbatches - 1) * self.pivot_s + self.ending_s


def extended(latency: Latency, stage: Timed, microbatches: int) -> Latency:
    """Return the pipelines with one more stage at the end; shapes are broadcast.

    The old pivot has won against every other stage. It stays if it wins against the new last stage,
    or if a stage between them does, which then loses to the old pivot.
    """
    forward_s, backward_s, all_reduce_s = stage
    own_s = forward_s + backward_s
    steady_s = (microbatches - 1) * own_s
    after_s = latency.forward_after_s + latency.backward_after_s
    wins = (microbatches - 1) * latency.pivot_s - after_s > steady_s
    stays = wins | (latency.rival_s > steady_s)
    before_s = latency.ending_s + latency.backward_after_s + backward_s
    last = Latency(
        latency.warm_up_s + latency.forward_after_s + forward_s,
        own_s,
        np.zeros_like(own_s),
        np.zeros_like(own_s),
        np.maximum(before_s, all_reduce_s + backward_s),
        np.full_like(own_s, -np.inf),
    )
    old = Latency(
        latency.warm_up_s,
        latency.pivot_s,
        latency.forward_after_s + forward_s,
        latency.backward_after_s + backward_s,
        np.maximum(latency.ending_s, all_reduce_s - latency.backward_after_s),
        np.maximum(latency.rival_s - own_s, steady_s),
    )
    return Latency._make(np.where(stays, *both) for both in zip(old, last, strict=True))


# --- search ---------------------------------------------------------------------------------------


class Key(NamedTuple):
    """The key of a state: positions in use, and whether its pipelines have several stages."""

    used: frozenset[int]
    several: bool


START = Key(frozenset(), several=False)


def plan(layers: Layers) -> Stages:
    """Return the pipeline with the least latency.

    Raises:
        InfeasibleError: if the search finds none that fits.
    """
    found = _Search(layers).stages()
    if found is None:
        raise nothing_fits("dapple", "the pipelines its search visits")
    return in_file_order(layers, found)


def placements(groups: Sequence[Chosen], used: frozenset[int], count: int) -> Iterator[Chosen]:
    """Yield ``count`` unused positions by each of the three policies, without repetitions.

    Args:
        groups: the positions of each machine.
        used: positions that hold earlier stages.
        count: of positions that are wanted.
    """
    free = [[position for position in group if position not in used] for group in groups]
    if sum(map(len, free)) < count:
        return
    fresh = [left for left, group in zip(free, groups, strict=True) if len(left) == len(group)]
    begun = [left for left, group in zip(free, groups, strict=True) if len(left) < len(group)]
    turns = range(max(map(len, free)))
    scattered = [[left[turn] for left in free if turn < len(left)] for turn in turns]
    policies = (fresh + begun, begun + fresh, scattered)
    rows = [[position for left in lists for position in left] for lists in policies]
    yield from dict.fromkeys(tuple(sorted(row[:count])) for row in rows)


class _State:
    """The best pipelines on one set of devices, by number of layers, with how they end."""

    def __init__(self, size: int) -> None:
        self.latency = Latency.nothing(size)
        self.latency_s = np.full(size, np.inf)
        self.stages, self.begins = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.before: list[tuple[Key, Chosen]] = []
        """Ways into the state: the state before and the last stage's positions."""
        self.way = np.full(size, -1, np.int64)
        """By number of layers: which of them; -1 for none."""

    def keep(self, ends: Ints, new: Latency, total_s: Floats) -> None:
        """Replace the pipelines of some numbers of layers."""
        for own, other in zip(self.latency, new, strict=True):
            own[ends] = other
        self.latency_s[ends] = total_s


class _Search:
    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        job, rows = layers.problem.job, machines(layers.problem.cluster)
        self._blocks = device_blocks(layers, [device for row in rows for device in row])
        self._costs = StageCosts(layers, self._blocks)
        machine_of = {device: number for number, row in enumerate(rows) for device in row}
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for position, block in enumerate(self._blocks):
            groups[machine_of[block[0]]].append(position)
        self._groups = tuple(map(tuple, groups.values()))
        self._count = job.microbatches
        self._sizes = replica_counts(len(self._blocks), job.replication, MOST_CHOICES)
        self._states = {START: _State(self._costs.length + 1)}
        self._states[START].latency_s[0] = 0.0

    def stages(self) -> list[Stage] | None:
        """Return the best complete pipeline over all sets of devices."""
        by_size: defaultdict[int, set[Key]] = defaultdict(set, {0: {START}})
        for size in range(len(self._blocks)):
            for key in self._most_promising(by_size[size], size):
                for count in self._sizes:
                    for chosen in placements(self._groups, key.used, count):
                        self._extend(key, chosen)
                        by_size[size + count].add(_after(key, chosen))
            by_size[size + 1] &= self._states.keys()
        best = min(self._states, key=lambda key: self._states[key].latency_s[-1])
        if not np.isfinite(self._states[best].latency_s[-1]):
            return None
        return self._traced(best)

    def _most_promising(self, keys: set[Key], size: int) -> list[Key]:
        """Return all of one stage, else those with the least bound if the rest used all devices."""
        left = len(self._blocks) - size
        whole_s = self._count * self._costs.work_s(self._blocks)[:, -1] * len(self._blocks) / left

        def promise(key: Key) -> tuple[float, list[int]]:
            return float((self._states[key].latency_s + whole_s).min()), sorted(key.used)

        ranked = sorted(keys, key=promise)
        several = [key for key in ranked if key.several]
        return [key for key in ranked if not key.several] + several[:MOST_SETS]

    def _extend(self, key: Key, chosen: Chosen) -> None:
        """Add a last stage on the chosen devices to every pipeline of a state."""
        state, blocks = self._states[key], [self._blocks[position] for position in chosen]
        most = self._layers.max_stages
        rows = np.flatnonzero(np.isfinite(state.latency_s) & (state.stages < most))
        send_s, back_s = self._channels(state, rows, blocks)
        joined = np.isfinite(send_s + back_s)
        rows, send_s, back_s = rows[joined], send_s[joined], back_s[joined]
        if not len(rows):
            return
        ahead = state.latency.at(rows)
        if key.used:
            ahead = extended(ahead, Timed(send_s, back_s, np.zeros(len(rows))), self._count)
        reduce_s = self._costs.reduce_s(blocks) + self._costs.fits(blocks, 1)
        times = (self._costs.forward_s(blocks), self._costs.backward_s(blocks), reduce_s)
        stage = Timed._make(table[rows] for table in times)
        longer = extended(ahead.at(slice(None), None), stage, self._count)
        total_s = longer.total_s(self._count)
        where = total_s.argmin(axis=0)
        target = self._states.setdefault(_after(key, chosen), _State(self._costs.length + 1))
        ends = np.flatnonzero(total_s.min(axis=0) < target.latency_s)
        if len(ends):
            begins = rows[where[ends]]
            target.keep(ends, longer.at(where[ends], ends), total_s[where[ends], ends])
            target.begins[ends], target.stages[ends] = begins, state.stages[begins] + 1
            target.way[ends] = len(target.before)
            target.before.append((key, chosen))

    def _channels(self, state: _State, rows: Ints, blocks: list[Block]) -> tuple[Floats, Floats]:
        """Transfers at the cuts ``rows``, from whatever devices the pipeline so far ends on."""
        send_s, back_s = np.zeros(len(rows)), np.zeros(len(rows))
        for way in np.unique(state.way[rows]):
            if way >= 0:
                here = state.way[rows] == way
                ends = [self._blocks[position] for position in state.before[way][1]], blocks
                send_s[here] = self._costs.send_s(*ends)[rows[here]]
                back_s[here] = self._costs.send_back_s(*ends)[rows[here]]
        return send_s, back_s

    def _traced(self, key: Key) -> list[Stage]:
        found: list[Stage] = []
        end = self._costs.length
        while end:
            state = self._states[key]
            begin = int(state.begins[end])
            key, chosen = state.before[int(state.way[end])]
            found.append(self._costs.stage(begin, end, [self._blocks[p] for p in chosen]))
            end = begin
        return found[::-1]


def _after(key: Key, chosen: Chosen) -> Key:
    return Key(key.used | frozenset(chosen), several=bool(key.used))


DAPPLE = Baseline("dapple", "Fan et al., PPoPP 2021, section 4", plan)
