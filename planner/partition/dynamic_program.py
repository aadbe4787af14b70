"""Balanced partitions along a device order: stages are intervals, replicas are neighbours.

For every number of stages, the partition with the smallest bottleneck (the largest work of a
stage's replica or of a channel over all microbatches), with 1F1B's stashes within memory.
:mod:`planner.partition.min_max` holds the recursion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from planner.costs.collectives import all_reduce_s
from planner.partition.chain import Chain, FloatArray, Partition, StageChoice
from planner.partition.min_max import MinMaxTable, interval_sums, replica_counts


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
        self._static = interval_sums(chain.static_bytes.astype(float))
        self._static[np.tril_indices(len(self._static))] = np.inf
        self._gradients = interval_sums(chain.gradient_bytes.astype(float))
        self._stash = interval_sums(chain.stash_bytes.astype(float))
        self._shared_s: dict[tuple[tuple[str, int], ...], FloatArray] = {}
        self._reduce_per_byte: dict[tuple[str, ...], float] = {}

    def _interval_seconds(self, name: str) -> FloatArray:
        """Seconds of layers [i, j) for one microbatch."""
        times = self.chain.forward_s(name) + self.chain.backward_s(name)
        return np.maximum(interval_sums(times), 1e-15)

    def stage_s(self, first: int, replicas: int, after: int) -> FloatArray:
        """The most loaded replica's work, then the reduction; infinite beyond memory."""
        devices = self.order[first : first + replicas]
        kinds = [self.chain.problem.cluster.device_type(device) for device in devices]
        capacity = min(kind.capacity_bytes for kind in kinds)
        stashes = min(self.microbatches, -(-(after + 1) // replicas))
        seconds = self._all_microbatches_s(devices) + self._reduce_s(devices)
        return np.where(self._static + stashes * self._stash <= capacity, seconds, np.inf)

    def _all_microbatches_s(self, devices: tuple[str, ...]) -> FloatArray:
        """Split over the replicas by their speed, in fractions."""
        cluster = self.chain.problem.cluster
        key = tuple(sorted(Counter(cluster.type_of(device) for device in devices).items()))
        if key not in self._shared_s:
            per_second = sum(count / self._interval_s[name] for name, count in key)
            self._shared_s[key] = np.asarray(self.microbatches / per_second)
        return self._shared_s[key]

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
