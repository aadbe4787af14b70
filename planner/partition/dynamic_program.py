"""Balanced partitions along a device order: stages are intervals, replicas are neighbours.

For every number of stages, the partition with the smallest bottleneck (the largest work of a
stage's replica or of a channel over all microbatches), with 1F1B's stashes within memory. The
recursion is that of PipeDream (Narayanan et al. 2019, section 3.1) and SPP's PRM, from the last
stage to the first so that the number of microbatches in flight is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.costs.collectives import all_reduce_s
from planner.partition.chain import Chain, FloatArray, Partition, StageChoice

MAX_REPLICA_CHOICES = 16
"""Beyond this many devices only powers of two and all are tried as replica counts."""


def partitions_along(chain: Chain, order: tuple[str, ...], max_stages: int) -> Iterator[Partition]:
    """The balanced partition for each number of stages, fewest first.

    Args:
        chain: the layers.
        order: devices, neighbours side by side.
        max_stages: the largest number of stages to try.
    """
    table = _Table(chain, order)
    for count in range(1, max_stages + 1):
        table.add_stage()
        partition = table.partition(count)
        if partition is not None:
            yield partition


class _Table:
    """``best[n][k, i]``: least bottleneck of layers i.. in n stages on devices order[k:]."""

    def __init__(self, chain: Chain, order: tuple[str, ...]) -> None:
        self.chain = chain
        self.order = order
        self.microbatches = chain.problem.job.microbatches
        length, devices = chain.length, len(order)
        first = np.full((devices + 1, length + 1), np.inf)
        first[:, length] = 0.0
        self.best = [first]
        self.choice: list[FloatArray] = []
        self._interval_s = {name: self._interval_seconds(name) for name in chain.types}
        self._static = _intervals(chain.static_bytes.astype(float))
        self._gradients = _intervals(chain.gradient_bytes.astype(float))
        self._reduce_per_byte: dict[tuple[str, ...], float] = {}
        self._stash = _intervals(chain.stash_bytes.astype(float))
        self._replicas = _replica_choices(devices, chain.problem.job.replication)

    def _interval_seconds(self, name: str) -> FloatArray:
        """Seconds of layers [i, j) for one microbatch; infinite where j <= i."""
        times = self.chain.forward_s(name) + self.chain.backward_s(name)
        sums = _intervals(times)
        sums[np.tril_indices(len(sums))] = np.inf
        return np.maximum(sums, 1e-15)

    def add_stage(self) -> None:
        """Extend the table by one more stage in front."""
        before, in_flight = self.best[-1], len(self.best)
        length, devices = self.chain.length, len(self.order)
        best = np.full_like(before, np.inf)
        choice = np.zeros((devices + 1, length + 1, 2))
        for first in range(devices):
            self._extend(first, before, in_flight, best, choice)
        self.best.append(best)
        self.choice.append(choice)

    def _extend(
        self, first: int, before: FloatArray, in_flight: int, best: FloatArray, choice: FloatArray
    ) -> None:
        """The front stage on order[first : first + r], for each replica count r."""
        per_second = np.zeros((self.chain.length + 1,) * 2)
        capacity = np.inf
        for replicas in range(1, len(self.order) - first + 1):
            device = self.order[first + replicas - 1]
            per_second += 1 / self._interval_s[self.chain.problem.cluster.type_of(device)]
            kind = self.chain.problem.cluster.device_type(device)
            capacity = min(capacity, kind.capacity_bytes)
            if replicas not in self._replicas:
                continue
            reduce = self._reduce_s(self.order[first : first + replicas])
            cost = self._stage_cost(per_second, replicas, capacity, in_flight) + reduce
            channel = self._channel_s(first + replicas, replicas)
            rest = np.maximum(before[first + replicas], channel)
            total = np.maximum(cost, rest[None, :])
            end = total.argmin(axis=1)
            value = total[np.arange(len(total)), end]
            better = value < best[first]
            best[first][better] = value[better]
            choice[first][better] = np.stack([end, np.full(len(end), replicas)], 1)[better]

    def _stage_cost(
        self, per_second: FloatArray, replicas: int, capacity: float, in_flight: int
    ) -> FloatArray:
        with np.errstate(divide="ignore"):
            seconds = self.microbatches / per_second
        stashes = min(self.microbatches, -(-in_flight // replicas))
        return np.where(self._static + stashes * self._stash <= capacity, seconds, np.inf)

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

    def _channel_s(self, next_device: int, replicas: int) -> FloatArray:
        """Seconds of all forward transfers at each cut, over the link to the next device."""
        cuts = np.zeros(self.chain.length + 1)
        if next_device >= len(self.order):
            return cuts
        cluster = self.chain.problem.cluster
        route = cluster.route(self.order[next_device - 1], self.order[next_device])
        if route is None:
            cuts[:-1] = np.inf
            return cuts
        bytes_ = self.chain.cut_bytes.astype(float)
        seconds = route.latency_s + bytes_ / (route.bandwidth_gb_per_s * 1e9)
        cuts[:-1] = seconds[:-1] * self.microbatches / replicas
        return cuts

    def partition(self, count: int) -> Partition | None:
        """The best partition into ``count`` stages; devices in front may stay unused."""
        start = int(self.best[count][:, 0].argmin())
        if not np.isfinite(self.best[count][start, 0]):
            return None
        stages, device, layer = [], start, 0
        for left in range(count, 0, -1):
            end, replicas = (int(x) for x in self.choice[left - 1][device, layer])
            stages.append(StageChoice(layer, end, self.order[device : device + replicas]))
            device, layer = device + replicas, end
        return tuple(stages)


def _intervals(values: FloatArray) -> FloatArray:
    """Matrix of sums over [i, j)."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(prefix[None, :] - prefix[:, None], dtype=np.float64)


def _replica_choices(devices: int, replication: bool) -> set[int]:
    if not replication:
        return {1}
    if devices <= MAX_REPLICA_CHOICES:
        return set(range(1, devices + 1))
    return {2**power for power in range(devices.bit_length())} | {devices}
