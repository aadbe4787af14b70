"""What stages, channels and reductions cost in the models of the baselines.

Their papers let the replicas of a stage split its work evenly; on devices of different types the
slowest one then sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain as joined
from itertools import pairwise

import numpy as np

from planner.baselines.layers import Floats, Ints, Layers, Stage
from planner.cluster.cluster import Cluster
from planner.costs.collectives import all_reduce_s

MAX_BLOCKS = 64
"""Larger clusters are planned in this many blocks of neighbouring devices, or fewer."""
MAX_CUTS = 256
"""Longer rows of layers are cut in this many places at most."""
SAMPLES_BYTES = (2**20, 2**30)
"""Two sizes of all-reduces; a line through their times stands for all sizes."""

Block = tuple[str, ...]


def device_blocks(layers: Layers, order: Sequence[str] | None = None) -> tuple[Block, ...]:
    """Return the devices one by one or, where they are very many, in equal blocks of neighbours.

    A stage then lies on whole blocks, so the baselines stay fast on thousands of devices.
    Without replication a block cannot be used; the first devices of the order, as many as a plan
    can have stages, are taken then.

    Args:
        layers: of the problem.
        order: of the devices; the cluster file's by default.
    """
    names = tuple(order or layers.problem.cluster.device_names)
    if not layers.problem.job.replication:
        most = max(MAX_BLOCKS, min(MAX_CUTS, layers.max_stages))
        return tuple((name,) for name in names[:most])
    size = -(-len(names) // MAX_BLOCKS)
    return tuple(names[start : start + size] for start in range(0, len(names), size))


def replica_counts(blocks: int, replication: bool, most: int = MAX_BLOCKS) -> tuple[int, ...]:
    """Return numbers of blocks that a stage may lie on: all up to ``most``, then powers of two."""
    if not replication:
        return (1,)
    if blocks <= most:
        return tuple(range(1, blocks + 1))
    return tuple(sorted({2**power for power in range(blocks.bit_length())} | {blocks}))


def devices_of(blocks: Sequence[Block]) -> Block:
    """Return all devices of some blocks."""
    return tuple(joined.from_iterable(blocks))


def cut_places(layers: Layers) -> Ints:
    """Return all cuts; of very many layers the narrowest near each equal share of work."""
    if layers.length < MAX_CUTS:
        return np.arange(layers.length + 1)
    work_s = layers.work_s.max(axis=0)
    # A little for every layer, so that layers that take no time can be cut apart as well.
    prefix = np.concatenate([[0.0], np.cumsum(work_s + work_s.mean() / 10)])
    edges = np.searchsorted(prefix, np.linspace(0, prefix[-1], 2 * MAX_CUTS - 1)[1::2])
    bounds = np.unique(np.clip(edges, 1, layers.length)).tolist()
    sent = layers.table.arrays.sent[layers.kinds[0]]
    narrow = [low + int(sent[low:high].argmin()) for low, high in pairwise(bounds)]
    return np.unique([0, *narrow, layers.length])


class StageCosts:
    """Seconds of one microbatch by interval of cuts [i, j) and blocks of devices.

    Attributes:
        layers: of the problem.
        blocks: the devices, neighbours together.
        cuts: positions in the row of layers, ascending from 0 to its length.
    """

    def __init__(self, layers: Layers, blocks: Sequence[Block]) -> None:
        self.layers = layers
        self.blocks = tuple(blocks)
        self.cuts = cut_places(layers)
        self._position = {block: index for index, block in enumerate(self.blocks)}
        self._gradients = self._intervals(layers.gradient_bytes)
        self._tables: dict[tuple[object, ...], Floats] = {}
        self._lines: dict[Block, tuple[float, float]] = {}

    def _intervals(self, values: Floats | Ints) -> Floats:
        prefix = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])[self.cuts]
        return np.asarray(prefix[None, :] - prefix[:, None])

    @property
    def length(self) -> int:
        """Number of pieces between cuts: layers, or groups of very many."""
        return len(self.cuts) - 1

    @property
    def _cluster(self) -> Cluster:
        return self.layers.problem.cluster

    def stage(self, begin: int, end: int, blocks: Sequence[Block]) -> Stage:
        """Return the stage between two cuts, by their indices, on all devices of some blocks."""
        return Stage(int(self.cuts[begin]), int(self.cuts[end]), devices_of(blocks))

    def forward_s(self, blocks: Sequence[Block]) -> Floats:
        """Return forward of the slowest device over the number of devices."""
        return self._shared(blocks, "F")

    def backward_s(self, blocks: Sequence[Block]) -> Floats:
        """Return backward of the slowest device over the number of devices."""
        return self._shared(blocks, "B")

    def work_s(self, blocks: Sequence[Block]) -> Floats:
        """Return forward and backward of the slowest device over the number of devices."""
        return self._shared(blocks, "FB")

    def _shared(self, blocks: Sequence[Block], operations: str) -> Floats:
        devices = devices_of(blocks)
        kinds = tuple(sorted({self.layers.kind_of(device) for device in devices}))
        key = operations, kinds, len(devices)
        if key not in self._tables:
            rows = {"F": self.layers.forward_s, "B": self.layers.backward_s}
            each = [[self._intervals(rows[o][kind]) for o in operations] for kind in kinds]
            self._tables[key] = np.sum(each, axis=1).max(axis=0) / len(devices)
        return self._tables[key]

    def reduce_s(self, blocks: Sequence[Block]) -> Floats:
        """Return the time of the gradients' all-reduce; infinite where devices are not joined."""
        devices = devices_of(blocks)
        if devices not in self._lines:
            self._lines[devices] = self._line(devices)
        start_s, s_per_byte = self._lines[devices]
        if np.isinf(start_s):
            return np.full_like(self._gradients, np.inf)
        return self._gradients * s_per_byte + np.where(self._gradients > 0, start_s, 0.0)

    def _line(self, devices: Block) -> tuple[float, float]:
        ring = sorted(devices, key=self._cluster.numbers.__getitem__)
        small_s, large_s = (all_reduce_s(self._cluster, ring, size) for size in SAMPLES_BYTES)
        if np.isinf(small_s):
            return np.inf, 0.0
        slope = (large_s - small_s) / (SAMPLES_BYTES[1] - SAMPLES_BYTES[0])
        return max(0.0, small_s - slope * SAMPLES_BYTES[0]), slope

    def fits(self, blocks: Sequence[Block], in_flight: int) -> Floats:
        """Return 0 where the stage with so many microbatches in flight fits, else infinity.

        Replicas share the microbatches in flight. Workspace and the stage's input are not counted.
        """
        devices, microbatches = devices_of(blocks), self.layers.problem.job.microbatches
        capacity = min(self._cluster.device_type(device).capacity_bytes for device in devices)
        stashes = max(1, -(-min(microbatches, in_flight) // len(devices)))
        kind = self.layers.kind_of(devices[0])
        key = "fits", kind, capacity, stashes, len(devices)
        if key not in self._tables:
            needed = self._intervals(
                self.layers.static_bytes(len(devices))[kind]
                + stashes * self.layers.stash_bytes[kind]
            )
            needed[np.tril_indices(len(self.cuts))] = np.inf
            self._tables[key] = np.where(needed <= capacity, 0.0, np.inf)
        return self._tables[key]

    def send_s(self, sources: Sequence[Block], targets: Sequence[Block]) -> Floats:
        """Return the time of activations at each cut, over the slowest way, shared by all pairs."""
        return self._transfer_s(sources, targets, self.layers.table.arrays.sent)

    def send_back_s(self, sources: Sequence[Block], targets: Sequence[Block]) -> Floats:
        """Return gradients at each cut on their way back from ``targets`` to ``sources``."""
        return self._transfer_s(sources, targets, self.layers.table.arrays.returned)

    def _transfer_s(self, sources: Sequence[Block], targets: Sequence[Block], sent: Ints) -> Floats:
        rows, columns = ([self._position[block] for block in side] for side in (sources, targets))
        latency_s, s_per_byte = (table[np.ix_(rows, columns)].max() for table in self._matrices)
        bytes_ = sent[self.layers.kinds[0], self.cuts].astype(np.float64)
        if np.isinf(latency_s):
            return np.full_like(bytes_, np.inf)
        pairs = min(len(devices_of(sources)), len(devices_of(targets)))
        return np.where(bytes_ > 0, latency_s + s_per_byte * bytes_, 0.0) / pairs

    @cached_property
    def _matrices(self) -> tuple[Floats, Floats]:
        """Latency and seconds a byte between blocks, each by its first device."""
        first = [self._cluster.numbers[block[0]] for block in self.blocks]
        table, part = self._cluster.link_table, np.ix_(first, first)
        return table.latency_s[part], table.s_per_byte[part]
