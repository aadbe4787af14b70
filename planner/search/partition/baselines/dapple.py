"""DAPPLE's planner of synchronous pipelines.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
section 4.

The planner minimises the latency of a synchronous pipeline, Tw + Ts + Te around its pivot stage,
where channels are stages of their own. Devices for a stage come from three policies: fresh first
(machines not used yet), append first (machines in use), scatter first (all machines alike).

A state is a set of used devices with, for every number of layers, the best pipeline so far of
these layers; a new last stage on more devices leads to the next state. Our reconstruction: a
pipeline is judged by the latency of its own layers, but those of one stage have states of their
own, so that all pipelines of two stages are looked at, as the authors' planner does; of the other
sets with equally many devices only the :data:`MOST_SETS` most promising go on; a stage must hold
one microbatch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.search.partition.baselines.baseline import Baseline, machines, nothing_fits
from planner.search.partition.baselines.dapple_latency import (
    Latency,
    LatencyStage,
    extended,
    total_with,
)
from planner.search.partition.baselines.stage_costs import (
    BaselineStageCosts,
    Block,
    device_blocks,
    in_file_order,
    most_stages,
)
from planner.search.partition.chain import Chain, FloatArray, IntArray, Partition, StageChoice
from planner.search.partition.dynamic_programs.min_max import MAX_REPLICA_CHOICES, replica_counts

MOST_CHOICES = 32
"""Up to so many devices a stage may have any number of them, beyond powers of two and all."""
MOST_SETS = 4
"""Sets of equally many devices that are followed up."""
Chosen = tuple[int, ...]
"""Positions of blocks of devices, ascending."""


class Key(NamedTuple):
    """The key of a state: positions in use, and whether its pipelines have several stages."""

    used: frozenset[int]
    several: bool


START = Key(frozenset(), several=False)


def plan(chain: Chain) -> Partition:
    """Return the pipeline with the least latency.

    Raises:
        InfeasibleError: if the search finds none that fits.
    """
    return _plan(chain, MOST_CHOICES)


def quick_plan(chain: Chain) -> Partition:
    """Return the same with few numbers of replicas where there are many devices.

    Raises:
        InfeasibleError: if the search finds none that fits.
    """
    return _plan(chain, MAX_REPLICA_CHOICES)


def _plan(chain: Chain, most_choices: int) -> Partition:
    found = _Search(chain, most_choices).partition()
    if found is None:
        raise nothing_fits("dapple", "the pipelines its search visits")
    return in_file_order(chain, found)


def placements(groups: tuple[Chosen, ...], used: frozenset[int], count: int) -> Iterator[Chosen]:
    """Yield ``count`` unused positions by each of the three policies, without repetitions.

    Args:
        groups: the positions of each machine.
        used: positions that hold earlier stages.
        count: how many are wanted.
    """
    free = [[position for position in group if position not in used] for group in groups]
    if sum(map(len, free)) < count:
        return
    fresh = [left for left, group in zip(free, groups, strict=True) if len(left) == len(group)]
    begun = [left for left, group in zip(free, groups, strict=True) if len(left) < len(group)]
    rounds = max(map(len, free))
    scattered = [[left[turn] for left in free if turn < len(left)] for turn in range(rounds)]
    seen = set()
    for lists in (fresh + begun, begun + fresh, scattered):
        chosen = tuple(sorted([position for left in lists for position in left][:count]))
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


@dataclass
class _State:
    """The best pipelines on one set of devices, by number of layers, with how they end."""

    latency: Latency
    latency_s: FloatArray
    stages: IntArray
    begins: IntArray
    before: list[tuple[Key, Chosen]]
    """Ways into the state: the state before and the last stage's positions."""
    way: IntArray
    """By number of layers: which of them; -1 for none."""


class _Search:
    def __init__(self, chain: Chain, most_choices: int) -> None:
        self.chain = chain
        self.blocks = device_blocks(chain, [d for m in machines(chain.problem.cluster) for d in m])
        self.costs = BaselineStageCosts(chain, self.blocks)
        self.groups = self._groups()
        self.microbatches = chain.problem.job.microbatches
        self.most_stages = most_stages(chain)
        self.counts = replica_counts(len(self.blocks), chain.problem.job.replication, most_choices)
        self.states = {START: self._start()}

    def _groups(self) -> tuple[Chosen, ...]:
        """Return positions by machine; a block belongs to the machine of its first device."""
        machine_of = {d: n for n, m in enumerate(machines(self.chain.problem.cluster)) for d in m}
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for position, block in enumerate(self.blocks):
            groups[machine_of[block[0]]].append(position)
        return tuple(tuple(group) for group in groups.values())

    def _start(self) -> _State:
        state = self._empty()
        state.latency_s[0] = 0.0
        return state

    def _empty(self) -> _State:
        size = self.costs.layers + 1
        return _State(
            Latency.nothing(size),
            np.full(size, np.inf),
            np.zeros(size, dtype=np.int64),
            np.zeros(size, dtype=np.int64),
            [],
            np.full(size, -1, dtype=np.int64),
        )

    def partition(self) -> Partition | None:
        """Return the best complete pipeline over all sets of devices."""
        by_size: defaultdict[int, set[Key]] = defaultdict(set, {0: {START}})
        for size in range(len(self.blocks)):
            for key in self._most_promising(by_size[size], size):
                for count in self.counts:
                    for chosen in placements(self.groups, key.used, count):
                        self._extend(key, chosen)
                        by_size[size + count].add(_after(key, chosen))
            by_size[size + 1] &= self.states.keys()
        best = min(self.states, key=lambda key: self.states[key].latency_s[-1])
        if not math.isfinite(self.states[best].latency_s[-1]):
            return None
        return self._stages(best)

    def _most_promising(self, keys: set[Key], size: int) -> list[Key]:
        """Return all of one stage, else those with the least bound if the rest used all devices."""
        left = len(self.blocks) - size
        work_s = self.microbatches * self.costs.work_s(self.blocks)[:, -1] * len(self.blocks) / left

        def promise(key: Key) -> tuple[float, list[int]]:
            return float((self.states[key].latency_s + work_s).min()), sorted(key.used)

        ranked = sorted(keys, key=promise)
        several = [key for key in ranked if key.several]
        return [key for key in ranked if not key.several] + several[:MOST_SETS]

    def _extend(self, key: Key, chosen: Chosen) -> None:
        """Add a last stage on the chosen devices to every pipeline of a state."""
        state = self.states[key]
        rows = np.flatnonzero(np.isfinite(state.latency_s) & (state.stages < self.most_stages))
        blocks = [self.blocks[position] for position in chosen]
        send_s, back_s = self._channels(state, rows, blocks)
        joined = np.isfinite(send_s + back_s)
        rows, send_s, back_s = rows[joined], send_s[joined], back_s[joined]
        if not len(rows):
            return
        reduce_s = self.costs.reduce_s(blocks) + self.costs.fits(blocks, 1)
        stage = LatencyStage(self.costs.forward_s(blocks), self.costs.backward_s(blocks), reduce_s)
        ahead = state.latency.rows(rows)
        if key.used:
            channel = LatencyStage(send_s, back_s, np.zeros(len(rows)))
            ahead = extended(ahead, channel, self.microbatches)
        total = total_with(ahead.columns(), stage.at(rows), self.microbatches)
        where = total.argmin(axis=0)
        better = np.flatnonzero(total.min(axis=0) < self._state(key, chosen).latency_s)
        if len(better):
            best = ahead.rows(where[better])
            begins = rows[where[better]]
            longer = extended(best, stage.at(begins, better), self.microbatches)
            self._keep(key, chosen, begins, better, longer)

    def _channels(
        self, state: _State, rows: IntArray, blocks: list[Block]
    ) -> tuple[FloatArray, FloatArray]:
        """Transfers at the cuts ``rows``, from whatever devices the pipeline so far ends on."""
        send_s, back_s = np.zeros(len(rows)), np.zeros(len(rows))
        for way, (_, last) in enumerate(state.before):
            here = state.way[rows] == way
            if here.any():
                sources = [self.blocks[position] for position in last]
                send_s[here] = self.costs.send_s(sources, blocks)[rows[here]]
                back_s[here] = self.costs.send_back_s(sources, blocks)[rows[here]]
        return send_s, back_s

    def _state(self, key: Key, chosen: Chosen) -> _State:
        return self.states.setdefault(_after(key, chosen), self._empty())

    def _keep(
        self, key: Key, chosen: Chosen, begins: IntArray, ends: IntArray, new: Latency
    ) -> None:
        """Better pipelines of the layers before ``ends``, whose last stages start at ``begins``."""
        state = self._state(key, chosen)
        state.latency.put(ends, new)
        state.latency_s[ends] = new.total_s(self.microbatches)
        state.begins[ends] = begins
        state.stages[ends] = self.states[key].stages[begins] + 1
        state.way[ends] = len(state.before)
        state.before.append((key, chosen))

    def _stages(self, key: Key) -> Partition:
        found: list[StageChoice] = []
        end = self.costs.layers
        while end:
            state = self.states[key]
            begin = int(state.begins[end])
            key, chosen = state.before[int(state.way[end])]
            found.append(self.costs.stage(begin, end, [self.blocks[p] for p in chosen]))
            end = begin
        return tuple(reversed(found))


def _after(key: Key, chosen: Chosen) -> Key:
    return Key(key.used | frozenset(chosen), several=bool(key.used))


DAPPLE = Baseline("dapple", "Fan et al., PPoPP 2021, section 4", plan, quick_plan)
