"""Balanced partitions along a device order: stages are intervals, replicas are neighbours.

For every number of stages, the partition with the smallest bottleneck (the largest work of a
stage's replica or of a channel over all microbatches), with 1F1B's stashes within memory, if
need be by recomputing some layers or holding fewer. :mod:`planner.partition.min_max` holds the
recursion.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.costs.collectives import all_reduce_s
from planner.partition.chain import Chain, FloatArray, Partition, StageChoice
from planner.partition.intervals import interval_sums
from planner.partition.memory.interval_memory import IntervalMemory
from planner.partition.min_max import MinMaxTable, replica_counts

MOST_KNOWN_COSTS = 128
"""Matrices of stage costs kept at a time, one a set of device types."""


def partitions_along(chain: Chain, order: tuple[str, ...], max_stages: int) -> Iterator[Partition]:
    """The balanced partition for each number of stages, fewest first.

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
        self._memory = IntervalMemory(chain)
        self._gradients = interval_sums(chain.gradient_bytes)
        self._costs: dict[tuple[tuple[str, ...], int], FloatArray] = {}
        self._reduce_per_byte: dict[tuple[str, ...], float] = {}

    def _interval_seconds(self, name: str) -> FloatArray:
        """Seconds of layers [i, j) for one microbatch; infinite where j <= i."""
        times = self.chain.forward_s(name) + self.chain.backward_s(name)
        sums = interval_sums(times)
        sums[np.tril_indices(len(sums))] = np.inf
        return np.maximum(sums, 1e-15)

    def stage_s(self, first: int, replicas: int, after: int) -> FloatArray:
        """The most loaded replica's work, then the reduction; infinite beyond memory."""
        devices = self.order[first : first + replicas]
        return self._stage_cost(devices, after + 1) + self._reduce_s(devices)

    def _stage_cost(self, devices: tuple[str, ...], in_flight: int) -> FloatArray:
        """Work of all microbatches, recomputation and stalls included.

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
        """Seconds of all microbatches, with so many stashes on each replica."""
        kinds = self.chain.problem.cluster.device_types
        capacity = min(kinds[name].capacity_bytes for name in types)
        per_second = np.zeros((self.layers + 1,) * 2)
        for name in dict.fromkeys(types):
            extra = self._memory.extra_s(name, stashes, capacity)
            per_second += types.count(name) / (self._interval_s[name] + extra)
        with np.errstate(divide="ignore"):
            return np.asarray(self.microbatches / per_second, dtype=np.float64)

    def _reduce_s(self, devices: tuple[str, ...]) -> FloatArray:
        """Seconds to reduce the gradients of layers [i, j) among these replicas."""
        if devices not in self._reduce_per_byte:
            sample = 2**30
            seconds = all_reduce_s(self.chain.problem.cluster, devices, sample)
            self._reduce_per_byte[devices] = seconds / sample
        per_byte = self._reduce_per_byte[devices]
        if np.isinf(per_byte):
            return np.full_like(self._gradients, np.inf)
        return self._gradients * per_byte

    def channel_s(self, first: int, replicas: int, next_replicas: int) -> FloatArray:
        """Seconds of all forward transfers at each cut, over the link to the next device."""
        device = first + replicas
        cluster = self.chain.problem.cluster
        route = cluster.route(self.order[device - 1], self.order[device])
        if route is None:
            return np.full(self.layers + 1, np.inf)
        bytes_ = self.chain.cut_bytes.astype(float)
        seconds = route.latency_s + bytes_ / (route.bandwidth_gb_per_s * 1e9)
        return np.asarray(seconds * self.microbatches / replicas)
