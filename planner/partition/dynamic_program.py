"""Balanced partitions along a device order: stages are intervals, replicas are neighbours.

For every number of stages, the partition with the smallest bottleneck (the largest work of a
stage's replica or of a channel over all microbatches), with 1F1B's stashes within memory, if
need be by recomputing some layers or holding fewer. The recursion is that of PipeDream (Narayanan
et al. 2019, section 3.1) and SPP's PRM, from the last stage to the first so that the number of
microbatches in flight is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.costs.collectives import all_reduce_s
from planner.partition.chain import Chain, FloatArray, Partition, StageChoice
from planner.partition.interval_memory import IntervalMemory, intervals

MAX_REPLICA_CHOICES = 16
"""Beyond this many devices only powers of two and all are tried as replica counts."""
MOST_KNOWN_COSTS = 128
"""Matrices of stage costs kept at a time, one a set of device types."""


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
        self._memory = IntervalMemory(chain)
        self._gradients = intervals(chain.gradient_bytes)
        self._reduce_per_byte: dict[tuple[str, ...], float] = {}
        self._replicas = _replica_choices(devices, chain.problem.job.replication)
        self._costs: dict[tuple[tuple[str, ...], int], FloatArray] = {}

    def _interval_seconds(self, name: str) -> FloatArray:
        """Seconds of layers [i, j) for one microbatch; infinite where j <= i."""
        times = self.chain.forward_s(name) + self.chain.backward_s(name)
        sums = intervals(times)
        sums[np.tril_indices(len(sums))] = np.inf
        return np.maximum(sums, 1e-15)

    def add_stage(self) -> None:
        """Extend the table by one more stage in front."""
        before, in_flight = self.best[-1], len(self.best)
        length, devices = self.chain.length, len(self.order)
        best = np.full_like(before, np.inf)
        choice = np.zeros((devices + 1, length + 1, 2))
        self._costs.clear()
        for first in range(devices):
            self._extend(first, before, in_flight, best, choice)
        self.best.append(best)
        self.choice.append(choice)

    def _extend(
        self, first: int, before: FloatArray, in_flight: int, best: FloatArray, choice: FloatArray
    ) -> None:
        """The front stage on order[first : first + r], for each replica count r."""
        for replicas in sorted(r for r in self._replicas if r <= len(self.order) - first):
            devices = self.order[first : first + replicas]
            cost = self._stage_cost(devices, in_flight) + self._reduce_s(devices)
            channel = self._channel_s(first + replicas, replicas)
            rest = np.maximum(before[first + replicas], channel)
            total = np.maximum(cost, rest[None, :])
            end = total.argmin(axis=1)
            value = total[np.arange(len(total)), end]
            better = value < best[first]
            best[first][better] = value[better]
            choice[first][better] = np.stack([end, np.full(len(end), replicas)], 1)[better]

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
        per_second = np.zeros((self.chain.length + 1,) * 2)
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


def _replica_choices(devices: int, replication: bool) -> set[int]:
    if not replication:
        return {1}
    if devices <= MAX_REPLICA_CHOICES:
        return set(range(1, devices + 1))
    return {2**power for power in range(devices.bit_length())} | {devices}
