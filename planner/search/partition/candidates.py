"""Partitions worth scheduling before any search: even, balanced along orders of devices, looped.

Along an order, stages are intervals of the layers and replicas are neighbours. For every number of
stages it is the partition with the smallest bottleneck (the largest work of a stage's replica or of
a channel over all microbatches), with 1F1B's stashes within memory, if need be by recomputing some
layers or holding fewer; :mod:`planner.search.partition.dynamic_programs.min_max` has the recursion.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import TypeVar

import numpy as np

from planner.costs.collectives import all_reduce_s
from planner.search.partition.chain import Chain, FloatArray, Partition, StageChoice
from planner.search.partition.dynamic_programs.device_orders import device_orders
from planner.search.partition.dynamic_programs.min_max import MinMaxTable, replica_counts
from planner.search.partition.intervals import interval_sums
from planner.search.partition.memory.interval_memory import IntervalMemory

_Place = TypeVar("_Place")


def looped_partitions(chain: Chain, order: tuple[str, ...], rounds: int) -> Iterator[Partition]:
    """Yield partitions into ``rounds`` stages a device, placed in loops and as a V.

    In loops, stage i lies on device i modulo the number of devices, as in interleaved 1F1B
    (Narayanan et al. 2021, "Efficient large-scale language model training", section 2.2). As a V,
    every other round goes through the devices backwards, as in ZB-V (Qi et al. 2024, "Pipeline
    parallelism with controllable memory"). The boundaries balance the stages as if each had a
    device of its own; a descent by schedules moves them.
    """
    job = chain.problem.job.model_copy(update={"replication": False})
    single = Chain(replace(chain.problem, job=job))
    most = chain.stage_limit
    for used in range(min(len(order), most // rounds), 1, -1):
        count = used * rounds
        for virtual in map(tuple, _virtual(order[:used], rounds)):
            for partition in partitions_along(single, virtual, count):
                if len(partition) == count:
                    yield _on(partition, virtual)


def grouped_loops(chain: Chain, order: tuple[str, ...], rounds: int) -> Iterator[Partition]:
    """Yield loops and Vs, as :func:`looped_partitions`, of groups of as many replicas each.

    Neighbours in the order are a group, or every so many devices are: then the replicas of a stage
    lie apart, and a microbatch's way is near. Every stage has work in proportion to its devices.
    """
    for size in range(2, len(order) // 2 + 1):
        count = len(order) // size
        if len(order) % size or count * rounds > chain.stage_limit:
            continue
        for groups in (
            [order[j * size : (j + 1) * size] for j in range(count)],
            [order[j::count] for j in range(count)],
        ):
            for virtual in _virtual(groups, rounds):
                cuts = pairwise(balanced_cuts(chain, [1.0] * len(virtual)))
                yield tuple(
                    StageChoice(begin, end, _in_order(chain, group))
                    for (begin, end), group in zip(cuts, virtual, strict=True)
                )


FIRST_SHARES = (0.2, 0.5)
"""The share of its layers that the first stage of a device with two stages has."""


def returning_partitions(chain: Chain, order: tuple[str, ...]) -> Iterator[Partition]:
    """Yield partitions that come back to the first devices of an order, in turn or as a V.

    Only so many of the first devices hold a second stage, behind those of all others. Small first
    stages let a device begin soon, and leave the slow ones in the middle with one stage each. All
    devices have work in proportion to their speed.
    """
    speeds = _speeds(chain)
    for twice, share in product(range(1, len(order) + 1), FIRST_SHARES):
        first = order[:twice]
        for second in dict.fromkeys((first, first[::-1])):
            shares = [speeds[name] * (share if name in first else 1.0) for name in order]
            shares += [speeds[name] * (1 - share) for name in second]
            virtual = (*order, *second)
            if len(virtual) <= min(chain.length, chain.stage_limit):
                yield _on_cuts(balanced_cuts(chain, shares), virtual)


def _speeds(chain: Chain) -> dict[str, float]:
    """Return how much of the model each device computes a second.

    Where layers take no time, or cannot run on a type at all, devices count as equally fast.
    """
    cluster, seconds = chain.problem.cluster, chain.model_s
    can_compare = all(0 < time_s < math.inf for time_s in seconds.values())
    return {
        name: 1 / seconds[cluster.type_of(name)] if can_compare else 1.0
        for name in cluster.device_names
    }


def balanced_cuts(chain: Chain, speeds: Sequence[float]) -> list[int]:
    """Return cuts between stages of such speeds that make the slowest as quick as can be.

    Of all such cuts those with the longest first stages: the last ones wait longest for their first
    microbatch, and have less work. A stage has one layer at least.

    Args:
        chain: the layers, at least as many as stages.
        speeds: of each stage's devices together, in any unit.
    """
    count = len(speeds)
    work = chain.work_s.max(axis=0)
    done = np.concatenate([[0.0], np.cumsum(work)])

    def cuts_within(time: float) -> list[int]:
        cuts = [0]
        for number, speed in enumerate(speeds, 1):
            most = done[cuts[-1]] + time * speed * (1 + ROUNDING)
            end = int(np.searchsorted(done, most, side="right")) - 1
            cuts.append(min(max(end, cuts[-1] + 1), chain.length - count + number))
        return cuts

    def is_enough(time: float) -> bool:
        cuts = cuts_within(time)
        most = time * np.asarray(speeds) * (1 + 2 * ROUNDING)
        return cuts[-1] == chain.length and bool((np.diff(done[cuts]) <= most).all())

    least, most = done[-1] / sum(speeds), done[-1] / min(speeds)
    while most > least * (1 + ROUNDING):
        middle = (least + most) / 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return [*cuts_within(most)[:-1], chain.length]


def _on_cuts(cuts: Sequence[int], devices: Sequence[str]) -> Partition:
    return tuple(
        StageChoice(begin, end, (device,))
        for (begin, end), device in zip(pairwise(cuts), devices, strict=True)
    )


def _virtual(there: Sequence[_Place], rounds: int) -> Iterator[list[_Place]]:
    """Yield the places of all stages, in loops and as a V."""
    yield [place for _ in range(rounds) for place in there]
    yield [place for r in range(rounds) for place in (there[::-1] if r % 2 else there)]


def _in_order(chain: Chain, devices: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(devices, key=chain.problem.cluster.numbers.__getitem__))


def _on(partition: Partition, devices: tuple[str, ...]) -> Partition:
    return _on_cuts([0, *(stage.end for stage in partition)], devices)


MAX_DEVICES_FOR_TABLES = 32
MAX_LAYERS_FOR_TABLES = 800
"""Programs with a table for every number of stages take too long beyond this."""
ROUNDING = 1e-9
"""How exactly cuts are balanced."""
GRIDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Numbers of stages of the grids."""
MOST_EVEN = 64
"""Even splits into more stages are left out."""


def simple_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Yield equal work on equal numbers of devices, and even splits: no search at all."""
    names = chain.problem.cluster.device_names
    yield from grid_partitions(chain, max_stages, names)
    for alike in _alike(chain):
        if 1 < len(alike) < len(names):
            yield from grid_partitions(chain, max_stages, alike)
    for count in range(1, min(max_stages, MOST_EVEN) + 1):
        yield even_partition(chain, count)


def _alike(chain: Chain) -> Iterator[tuple[str, ...]]:
    """Yield the devices of one type at one place in the network, as those of a node are."""
    cluster = chain.problem.cluster
    groups: dict[Hashable, list[str]] = {}
    for name in cluster.device_names:
        groups.setdefault((cluster.type_of(name), cluster.attachment(name)), []).append(name)
    yield from map(tuple, groups.values())


def grid_partitions(chain: Chain, max_stages: int, names: tuple[str, ...]) -> Iterator[Partition]:
    """Yield equal numbers of neighbouring devices, with work in proportion to their speed.

    Args:
        chain: the layers.
        max_stages: the largest number of stages.
        names: devices to use.
    """
    if not chain.problem.job.replication:
        return
    speeds = _speeds(chain)
    for count in GRIDS:
        if count > min(max_stages, len(names), chain.length) or len(names) % count:
            continue
        held = len(names) // count
        groups = [names[j * held : (j + 1) * held] for j in range(count)]
        cuts = balanced_cuts(chain, [sum(map(speeds.__getitem__, group)) for group in groups])
        yield tuple(StageChoice(cuts[j], cuts[j + 1], group) for j, group in enumerate(groups))


def thorough_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Yield balanced partitions of every number of stages, one a device."""
    for order in _orders_for_tables(chain):
        yield from partitions_along(chain, order, max_stages)


def shared_partitions(chain: Chain) -> Iterator[Partition]:
    """Yield loops and Vs of as many stages a device as the job allows, whole ones and others."""
    job = chain.problem.job
    for order in _orders_for_tables(chain):
        yield from returning_partitions(chain, order)
        for rounds in range(2, job.max_stages_per_device + 1):
            if job.replication:
                yield from grouped_loops(chain, order, rounds)
            yield from looped_partitions(chain, order, rounds)


def _orders_for_tables(chain: Chain) -> Iterator[tuple[str, ...]]:
    """Yield orders of the devices, if programs with tables are small enough."""
    cluster = chain.problem.cluster
    if len(cluster.devices) > MAX_DEVICES_FOR_TABLES or chain.length > MAX_LAYERS_FOR_TABLES:
        return
    yield from device_orders(cluster, chain.model_s)


def even_partition(chain: Chain, count: int) -> Partition:
    """Return equal numbers of layers on the first devices: what is used when nothing is planned."""
    cuts = [round(chain.length * j / count) for j in range(count + 1)]
    devices = chain.problem.cluster.device_names
    return tuple(StageChoice(cuts[j], cuts[j + 1], (devices[j],)) for j in range(count))


MOST_KNOWN_COSTS = 128
"""Matrices of stage costs kept at a time, one a set of device types."""


def partitions_along(chain: Chain, order: tuple[str, ...], max_stages: int) -> Iterator[Partition]:
    """Yield the balanced partition for each number of stages, fewest first.

    Args:
        chain: the layers.
        order: devices, neighbours side by side.
        max_stages: the largest number of stages to try.
    """
    table = MinMaxTable(_BalancedCosts(chain, order))
    for count in range(1, max_stages + 1):
        table.add_stage()
        spans = table.spans(count)
        if spans is not None:
            yield tuple(
                StageChoice(span.begin, span.end, order[span.first : span.first + span.replicas])
                for span in spans
            )


class _BalancedCosts:
    """Replicas of different speed take different numbers of microbatches."""

    def __init__(self, chain: Chain, order: tuple[str, ...]) -> None:
        self.chain = chain
        self.order = order
        self.layers = chain.length
        self.positions = len(order)
        self.replica_counts = replica_counts(len(order), chain.problem.job.replication)
        self.microbatches = chain.problem.job.microbatches
        self._interval_s = {name: self._interval_seconds(name) for name in chain.types}
        self._memory = {name: IntervalMemory(chain.on(name)) for name in chain.types}
        self._gradients = interval_sums(chain.gradient_bytes)
        self._costs: dict[tuple[tuple[str, ...], int], FloatArray] = {}
        self._reduce_per_byte: dict[tuple[str, ...], float] = {}

    def _interval_seconds(self, name: str) -> FloatArray:
        """Return seconds of layers [i, j) for one microbatch; infinite where no stage is."""
        times = self.chain.forward_s(name) + self.chain.backward_s(name)
        sums = interval_sums(times)
        sums[np.tril_indices(len(sums))] = np.inf
        sums[~self.chain.may_cut, :] = sums[:, ~self.chain.may_cut] = np.inf
        return np.maximum(sums, 1e-15)

    def stage_s(self, first: int, replicas: int, after: int) -> FloatArray:
        """Return the most loaded replica's work, then the reduction; infinite beyond memory."""
        devices = self.order[first : first + replicas]
        return self._stage_cost(devices, after + 1) + self._reduce_s(devices)

    def _stage_cost(self, devices: tuple[str, ...], in_flight: int) -> FloatArray:
        """Return work of all microbatches, recomputation and stalls included.

        Where 1F1B's stashes do not fit even so, fewer may be in flight: the stage then waits for
        gradients about as many times longer.
        """
        types = tuple(sorted(self.chain.problem.cluster.type_of(device) for device in devices))
        stashes = min(self.microbatches, -(-in_flight // len(devices)))
        key = (types, stashes)
        if key not in self._costs:
            if len(self._costs) >= MOST_KNOWN_COSTS:
                self._costs.clear()
            held, cost = stashes, self._work_s(types, stashes)
            while held > 1 and np.isinf(cost[np.triu_indices(len(cost), 1)]).any():
                held = -(-held // 2)
                cost = np.minimum(cost, self._work_s(types, held) * (stashes / held))
            self._costs[key] = cost
        return self._costs[key]

    def _work_s(self, types: tuple[str, ...], stashes: int) -> FloatArray:
        """Return seconds of all microbatches, with so many stashes on each replica."""
        kinds = self.chain.problem.cluster.device_types
        capacity = min(kinds[name].capacity_bytes for name in types)
        per_second = np.zeros((self.layers + 1,) * 2)
        for name in dict.fromkeys(types):
            extra = self._memory[name].extra_s(name, stashes, capacity)
            per_second += types.count(name) / (self._interval_s[name] + extra)
        with np.errstate(divide="ignore"):
            return np.asarray(self.microbatches / per_second, dtype=np.float64)

    def _reduce_s(self, devices: tuple[str, ...]) -> FloatArray:
        """Return seconds to reduce the gradients of layers [i, j) among these replicas."""
        if devices not in self._reduce_per_byte:
            sample = 2**30
            seconds = all_reduce_s(self.chain.problem.cluster, devices, sample)
            self._reduce_per_byte[devices] = seconds / sample
        per_byte = self._reduce_per_byte[devices]
        if np.isinf(per_byte):
            return np.full_like(self._gradients, np.inf)
        return self._gradients * per_byte

    def channel_s(self, first: int, replicas: int, next_replicas: int) -> FloatArray:
        """Return seconds of all forward transfers at each cut, over the link to the next device."""
        device = first + replicas
        cluster = self.chain.problem.cluster
        route = cluster.route(self.order[device - 1], self.order[device])
        if route is None:
            return np.full(self.layers + 1, np.inf)
        bytes_ = self.chain.cut_bytes.astype(float)
        seconds = route.latency_s + bytes_ / (route.bandwidth_gb_per_s * 1e9)
        return np.asarray(seconds * self.microbatches / replicas)
