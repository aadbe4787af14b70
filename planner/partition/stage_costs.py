"""What stages, channels and reductions cost in the models of the classic planners.

Their papers let the replicas of a stage split its work evenly; on devices of different types the
slowest one then sets the pace. Ours split by speed, see :mod:`planner.partition.dynamic_program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain as joined
from typing import NamedTuple

import numpy as np

from planner.artifacts.cluster import Cluster
from planner.costs.collectives import all_reduce_s
from planner.partition.chain import Chain, FloatArray, Partition, StageChoice
from planner.partition.min_max import interval_sums

MAX_BLOCKS = 128
"""Larger clusters are planned in this many blocks of neighbouring devices, or fewer."""
SAMPLES_BYTES = (2**20, 2**30)
"""Two sizes of all-reduces; a line through their times stands for all sizes."""

Block = tuple[str, ...]


class Way(NamedTuple):
    """The slowest way between two stages: seconds before the first byte, and of each byte."""

    latency_s: float
    s_per_byte: float


def device_blocks(chain: Chain, order: Sequence[str] | None = None) -> tuple[Block, ...]:
    """The devices one by one or, where they are very many, in equal blocks of neighbours.

    A stage then lies on whole blocks, so the classic planners stay fast on thousands of devices.
    Without replication a block cannot be used; the first devices of the order, as many as a plan
    can have stages, are taken then.

    Args:
        chain: of the problem.
        order: of the devices; the cluster file's by default.
    """
    names = tuple(order or chain.problem.cluster.device_names)
    if not chain.problem.job.replication:
        return tuple((name,) for name in names[: max(MAX_BLOCKS, most_stages(chain))])
    size = -(-len(names) // MAX_BLOCKS)
    return tuple(names[start : start + size] for start in range(0, len(names), size))


def most_stages(chain: Chain) -> int:
    """The most stages a plan can have with one stage a device."""
    limit = chain.problem.job.max_stages or chain.length
    return min(limit, chain.length, len(chain.problem.cluster.devices))


class StageCosts:
    """Seconds of one microbatch by interval of layers [i, j) and blocks of devices."""

    def __init__(self, chain: Chain, blocks: Sequence[Block]) -> None:
        self.chain = chain
        self.blocks = tuple(blocks)
        self._position = {block: index for index, block in enumerate(self.blocks)}
        self._static = interval_sums(chain.static_bytes.astype(float))
        self._stash = interval_sums(chain.stash_bytes.astype(float))
        self._gradients = interval_sums(chain.gradient_bytes.astype(float))
        self._forward = {name: interval_sums(chain.forward_s(name)) for name in chain.types}
        self._backward = {name: interval_sums(chain.backward_s(name)) for name in chain.types}
        self._slowest: dict[tuple[str, tuple[str, ...]], FloatArray] = {}
        self._reductions: dict[Block, tuple[float, float]] = {}
        self._ways: dict[tuple[tuple[int, ...], tuple[int, ...]], Way] = {}

    @property
    def cluster(self) -> Cluster:
        """The problem's cluster."""
        return self.chain.problem.cluster

    def devices(self, blocks: Sequence[Block]) -> Block:
        """All devices of some blocks."""
        return tuple(joined.from_iterable(blocks))

    def forward_s(self, blocks: Sequence[Block]) -> FloatArray:
        """Forward of the slowest device over the number of devices."""
        return self._shared("F", blocks)

    def backward_s(self, blocks: Sequence[Block]) -> FloatArray:
        """Backward of the slowest device over the number of devices."""
        return self._shared("B", blocks)

    def work_s(self, blocks: Sequence[Block]) -> FloatArray:
        """Forward and backward of the slowest device over the number of devices."""
        return self._shared("FB", blocks)

    def _shared(self, kinds: str, blocks: Sequence[Block]) -> FloatArray:
        devices = self.devices(blocks)
        types = tuple(sorted({self.cluster.type_of(device) for device in devices}))
        if (kinds, types) not in self._slowest:
            tables = {
                "F": self._forward,
                "B": self._backward,
                "FB": {name: self._forward[name] + self._backward[name] for name in types},
            }[kinds]
            self._slowest[kinds, types] = np.maximum.reduce([tables[name] for name in types])
        return np.asarray(self._slowest[kinds, types] / len(devices))

    def reduce_s(self, blocks: Sequence[Block]) -> FloatArray:
        """All-reduce of the gradients; infinite where the devices are not joined."""
        devices = self.devices(blocks)
        if devices not in self._reductions:
            self._reductions[devices] = self._line(devices)
        start_s, s_per_byte = self._reductions[devices]
        if np.isinf(start_s):
            return np.full_like(self._gradients, np.inf)
        return np.where(self._gradients > 0, start_s + s_per_byte * self._gradients, 0.0)

    def _line(self, devices: Block) -> tuple[float, float]:
        small, large = (all_reduce_s(self.cluster, devices, size) for size in SAMPLES_BYTES)
        if np.isinf(small):
            return np.inf, 0.0
        slope = (large - small) / (SAMPLES_BYTES[1] - SAMPLES_BYTES[0])
        return max(0.0, small - slope * SAMPLES_BYTES[0]), slope

    def fits(self, blocks: Sequence[Block], in_flight: int) -> FloatArray:
        """0 where the stage with so many microbatches in flight fits a device, else infinity.

        Replicas share the microbatches in flight. Workspace and the stage's input are not counted.
        """
        devices = self.devices(blocks)
        capacity = min(self.cluster.device_type(device).capacity_bytes for device in devices)
        microbatches = self.chain.problem.job.microbatches
        stashes = max(1, min(-(-microbatches // len(devices)), -(-in_flight // len(devices))))
        return np.where(self._static + stashes * self._stash <= capacity, 0.0, np.inf)

    def send_s(self, sources: Sequence[Block], targets: Sequence[Block]) -> FloatArray:
        """Activations at each cut, over the slowest way, shared by as many pairs as there are."""
        return self._transfer_s(sources, targets, self.chain.cut_bytes.astype(float))

    def send_back_s(self, sources: Sequence[Block], targets: Sequence[Block]) -> FloatArray:
        """Gradients at each cut on their way back from ``targets`` to ``sources``."""
        return self._transfer_s(sources, targets, self.chain.cut_gradient_bytes.astype(float))

    def _transfer_s(
        self, sources: Sequence[Block], targets: Sequence[Block], bytes_: FloatArray
    ) -> FloatArray:
        way = self._way(sources, targets)
        if np.isinf(way.latency_s):
            return np.full_like(bytes_, np.inf)
        pairs = min(len(self.devices(sources)), len(self.devices(targets)))
        return np.where(bytes_ > 0, way.latency_s + way.s_per_byte * bytes_, 0.0) / pairs

    def _way(self, sources: Sequence[Block], targets: Sequence[Block]) -> Way:
        rows = tuple(self._position[block] for block in sources)
        columns = tuple(self._position[block] for block in targets)
        if (rows, columns) not in self._ways:
            latency_s, s_per_byte = self._matrices
            part = np.ix_(rows, columns)
            self._ways[rows, columns] = Way(
                float(latency_s[part].max()), float(s_per_byte[part].max())
            )
        return self._ways[rows, columns]

    @cached_property
    def _matrices(self) -> tuple[FloatArray, FloatArray]:
        """Latency and seconds a byte between blocks, each by its first device."""
        count = len(self.blocks)
        latency_s, s_per_byte = np.full((count, count), np.inf), np.full((count, count), np.inf)
        for i, source in enumerate(self.blocks):
            for j, target in enumerate(self.blocks):
                route = self.cluster.route(source[0], target[0])
                if route is not None:
                    latency_s[i, j] = route.latency_s
                    s_per_byte[i, j] = 1 / (route.bandwidth_gb_per_s * 1e9)
        return latency_s, s_per_byte


def stage_choice(begin: int, end: int, blocks: Sequence[Block]) -> StageChoice:
    """A stage of layers [begin, end) on all devices of some blocks."""
    return StageChoice(begin, end, tuple(joined.from_iterable(blocks)))


def in_file_order(chain: Chain, partition: Partition) -> Partition:
    """The same stages with each one's replicas in the order of the cluster file."""
    rank = {name: index for index, name in enumerate(chain.problem.cluster.device_names)}
    return tuple(
        StageChoice(stage.begin, stage.end, tuple(sorted(stage.devices, key=rank.__getitem__)))
        for stage in partition
    )
