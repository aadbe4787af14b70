"""What stages, channels and reductions cost in the models of the baselines.

Their papers let the replicas of a stage split its work evenly; on devices of different types the
slowest one then sets the pace. Ours split by speed, see
:mod:`planner.search.partition.candidates`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain as joined
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.cluster.cluster import Cluster
from planner.costs.collectives import all_reduce_s
from planner.search.partition.chain import Chain, FloatArray, IntArray, Partition, StageChoice
from planner.search.partition.dynamic_programs.min_max import (
    MAX_REPLICA_CHOICES,
    StageSpan,
    replica_counts,
)

MAX_BLOCKS = 64
"""Larger clusters are planned in this many blocks of neighbouring devices, or fewer."""
MAX_CUTS = 256
"""Longer chains are cut in this many places at most."""
SAMPLES_BYTES = (2**20, 2**30)
"""Two sizes of all-reduces; a line through their times stands for all sizes."""

Block = tuple[str, ...]


class BlockLink(NamedTuple):
    """The slowest way between two stages: seconds before the first byte, and of each byte."""

    latency_s: float
    s_per_byte: float


def device_blocks(chain: Chain, order: Sequence[str] | None = None) -> tuple[Block, ...]:
    """Return the devices one by one or, where they are very many, in equal blocks of neighbours.

    A stage then lies on whole blocks, so the baselines stay fast on thousands of devices.
    Without replication a block cannot be used; the first devices of the order, as many as a plan
    can have stages, are taken then.

    Args:
        chain: of the problem.
        order: of the devices; the cluster file's by default.
    """
    names = tuple(order or chain.problem.cluster.device_names)
    if not chain.problem.job.replication:
        return tuple(
            (name,) for name in names[: max(MAX_BLOCKS, min(MAX_CUTS, most_stages(chain)))]
        )
    size = -(-len(names) // MAX_BLOCKS)
    return tuple(names[start : start + size] for start in range(0, len(names), size))


def most_stages(chain: Chain) -> int:
    """Return the most stages a plan can have with one stage a device."""
    return chain.max_stages


def even_cuts(chain: Chain) -> IntArray:
    """Return all cuts of a chain; of a long one the narrowest near each equal share of work."""
    if chain.length < MAX_CUTS:
        return np.arange(chain.length + 1)
    work_s = chain.work_s.max(axis=0)
    prefix = np.concatenate([[0.0], np.cumsum(work_s + work_s.mean() / 10)])
    # A little for every layer, so that layers that take no time can be cut apart as well.
    edges = np.searchsorted(prefix, np.linspace(0, prefix[-1], 2 * MAX_CUTS - 1)[1::2])
    bounds = np.unique(np.clip(edges, 1, chain.length))
    narrow = [
        low + int(chain.cut_bytes[low:high].argmin()) for low, high in pairwise(bounds.tolist())
    ]
    return np.unique([0, *narrow, chain.length])


def devices_of(blocks: Sequence[Block]) -> Block:
    """Return all devices of some blocks."""
    return tuple(joined.from_iterable(blocks))


class BaselineStageCosts:
    """Seconds of one microbatch by interval of cuts [i, j) and blocks of devices.

    Every cut of the chain is a cut here, or in very long chains :data:`MAX_CUTS` of them.

    Attributes:
        blocks: the devices, neighbours together.
        cuts: positions in the chain, (cuts,), ascending from 0 to its length.
    """

    def __init__(self, chain: Chain, blocks: Sequence[Block]) -> None:
        self.chain = chain
        self.blocks = tuple(blocks)
        self.cuts = even_cuts(chain)
        self._position = {block: index for index, block in enumerate(self.blocks)}
        self._static = self._intervals(chain.static_bytes)
        self._static[np.tril_indices(len(self.cuts))] = np.inf
        shared = chain.shared_bytes
        self._shared_out = 0.0 if shared is None else self._intervals(shared)
        self._stash = self._intervals(chain.stash_bytes)
        self._gradients = self._intervals(chain.gradient_bytes)
        self._forward = {name: self._intervals(chain.forward_s(name)) for name in chain.types}
        self._backward = {name: self._intervals(chain.backward_s(name)) for name in chain.types}
        self._shares: dict[tuple[str, tuple[str, ...], int], FloatArray] = {}
        self._room: dict[tuple[int, int, int], FloatArray] = {}
        self._lines: dict[Block, tuple[float, float]] = {}
        self._ways: dict[tuple[tuple[int, ...], tuple[int, ...]], BlockLink] = {}

    def _intervals(self, values: FloatArray | IntArray) -> FloatArray:
        prefix = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])[self.cuts]
        return np.asarray(prefix[None, :] - prefix[:, None])

    @property
    def layers(self) -> int:
        """Number of pieces between cuts: layers, or groups of them in very long chains."""
        return len(self.cuts) - 1

    @property
    def cluster(self) -> Cluster:
        """The problem's cluster."""
        return self.chain.problem.cluster

    def stage(self, begin: int, end: int, blocks: Sequence[Block]) -> StageChoice:
        """Return the stage between two cuts, by their indices, on all devices of some blocks."""
        return StageChoice(int(self.cuts[begin]), int(self.cuts[end]), devices_of(blocks))

    def forward_s(self, blocks: Sequence[Block]) -> FloatArray:
        """Return forward of the slowest device over the number of devices."""
        return self._shared("F", blocks)

    def backward_s(self, blocks: Sequence[Block]) -> FloatArray:
        """Return backward of the slowest device over the number of devices."""
        return self._shared("B", blocks)

    def work_s(self, blocks: Sequence[Block]) -> FloatArray:
        """Return forward and backward of the slowest device over the number of devices."""
        return self._shared("FB", blocks)

    def _shared(self, kinds: str, blocks: Sequence[Block]) -> FloatArray:
        devices = devices_of(blocks)
        types = tuple(sorted({self.cluster.type_of(device) for device in devices}))
        key = (kinds, types, len(devices))
        if key not in self._shares:
            each = {"F": self._forward, "B": self._backward}
            tables = [np.sum([each[kind][name] for kind in kinds], axis=0) for name in types]
            self._shares[key] = np.asarray(np.maximum.reduce(tables) / len(devices))
        return self._shares[key]

    def reduce_s(self, blocks: Sequence[Block]) -> FloatArray:
        """Return the time of the gradients' all-reduce; infinite where devices are not joined."""
        devices = devices_of(blocks)
        if devices not in self._lines:
            self._lines[devices] = self._line(devices)
        start_s, s_per_byte = self._lines[devices]
        if np.isinf(start_s):
            return np.full_like(self._gradients, np.inf)
        total = self._gradients * s_per_byte
        if start_s > 0:
            total[self._gradients > 0] += start_s
        return np.asarray(total)

    def _line(self, devices: Block) -> tuple[float, float]:
        ring = sorted(devices, key=self.cluster.numbers.__getitem__)
        small, large = (all_reduce_s(self.cluster, ring, size) for size in SAMPLES_BYTES)
        if np.isinf(small):
            return np.inf, 0.0
        slope = (large - small) / (SAMPLES_BYTES[1] - SAMPLES_BYTES[0])
        return max(0.0, small - slope * SAMPLES_BYTES[0]), slope

    def fits(self, blocks: Sequence[Block], in_flight: int) -> FloatArray:
        """Return 0 where the stage with so many microbatches in flight fits, else infinity.

        Replicas share the microbatches in flight. Workspace and the stage's input are not counted.
        """
        devices = devices_of(blocks)
        capacity = min(self.cluster.device_type(device).capacity_bytes for device in devices)
        microbatches = self.chain.problem.job.microbatches
        stashes = max(1, -(-min(microbatches, in_flight) // len(devices)))
        key = capacity, stashes, len(devices)
        if key not in self._room:
            replicas = len(devices) * self.chain.problem.copies
            needed = self._static + self._shared_out / replicas + stashes * self._stash
            self._room[key] = np.where(needed <= capacity, 0.0, np.inf)
        return self._room[key]

    def send_s(self, sources: Sequence[Block], targets: Sequence[Block]) -> FloatArray:
        """Return the time of activations at each cut, over the slowest way, shared by all pairs."""
        return self._transfer_s(sources, targets, self.chain.cut_bytes)

    def send_back_s(self, sources: Sequence[Block], targets: Sequence[Block]) -> FloatArray:
        """Return gradients at each cut on their way back from ``targets`` to ``sources``."""
        return self._transfer_s(sources, targets, self.chain.cut_gradient_bytes)

    def _transfer_s(
        self, sources: Sequence[Block], targets: Sequence[Block], chain_bytes: IntArray
    ) -> FloatArray:
        way = self._way(sources, targets)
        bytes_ = chain_bytes[self.cuts].astype(np.float64)
        if np.isinf(way.latency_s):
            return np.full_like(bytes_, np.inf)
        pairs = min(len(devices_of(sources)), len(devices_of(targets)))
        return np.where(bytes_ > 0, way.latency_s + way.s_per_byte * bytes_, 0.0) / pairs

    def _way(self, sources: Sequence[Block], targets: Sequence[Block]) -> BlockLink:
        rows = tuple(self._position[block] for block in sources)
        columns = tuple(self._position[block] for block in targets)
        if (rows, columns) not in self._ways:
            latency_s, s_per_byte = self._matrices
            part = np.ix_(rows, columns)
            self._ways[rows, columns] = BlockLink(
                float(latency_s[part].max()), float(s_per_byte[part].max())
            )
        return self._ways[rows, columns]

    @cached_property
    def _matrices(self) -> tuple[FloatArray, FloatArray]:
        """Latency and seconds a byte between blocks, each by its first device."""
        first = [self.cluster.numbers[block[0]] for block in self.blocks]
        table, part = self.cluster.link_table, np.ix_(first, first)
        return table.latency_s[part], table.s_per_byte[part]


def in_file_order(chain: Chain, partition: Partition) -> Partition:
    """Return the same stages with each one's replicas in the order of the cluster file."""
    numbers = chain.problem.cluster.numbers
    return tuple(
        StageChoice(stage.begin, stage.end, tuple(sorted(stage.devices, key=numbers.__getitem__)))
        for stage in partition
    )


Choice = tuple[Partition, float]
"""A partition and the time by which a baseline chooses it."""


def refined(blocks: int, choose: Callable[[int, float], Choice | None]) -> Partition | None:
    """Return the best partition with every number of replicas.

    Where there are many blocks, powers of two alone give a limit that makes the rest quick.

    Args:
        blocks: how many there are.
        choose: the best partition below a limit, in seconds, with every number of replicas up to
            so many blocks; None if there is none.
    """
    best, best_s = None, math.inf
    for most in (MAX_REPLICA_CHOICES, MAX_BLOCKS) if blocks > MAX_REPLICA_CHOICES else (blocks,):
        found = choose(most, best_s)
        if found is not None:
            best, best_s = found
    return best


class RowCosts:
    """Costs of a whole iteration along a row of blocks, for :class:`MinMaxTable`.

    Every channel carries all activations there and all gradients back; what a stage costs is for
    each baseline to say.

    Args:
        chain: the layers.
        blocks: the row.
        most_choices: up to so many blocks a stage may lie on any number of them, beyond on powers
            of two and all.
    """

    def __init__(self, chain: Chain, blocks: tuple[Block, ...], most_choices: int) -> None:
        self.costs = BaselineStageCosts(chain, blocks)
        self.blocks = blocks
        self.layers = self.costs.layers
        self.positions = len(blocks)
        self.replica_counts = replica_counts(
            len(blocks), chain.problem.job.replication, most_choices
        )
        self.microbatches = chain.problem.job.microbatches
        self._work: dict[tuple[int, int], FloatArray] = {}

    def before_s(self, positions: int) -> FloatArray:
        """Return by cut a time that no stages in front of it beat on so many blocks."""
        return self._before_s[positions]

    @cached_property
    def _before_s(self) -> list[FloatArray]:
        done = np.concatenate([[0.0], np.cumsum(self.costs.chain.least_work_s)])[self.costs.cuts]
        work_s = self.microbatches * done
        devices = np.cumsum([len(block) for block in self.blocks])
        nowhere = np.where(work_s > 0, np.inf, 0.0)
        return [nowhere, *(work_s / count for count in devices)]

    def at(self, first: int, replicas: int) -> tuple[Block, ...]:
        """Return the blocks of a stage."""
        return self.blocks[first : first + replicas]

    def stages(self, spans: Sequence[StageSpan]) -> Partition:
        """Return a solution as a partition."""
        return tuple(
            self.costs.stage(span.begin, span.end, self.at(span.first, span.replicas))
            for span in spans
        )

    def fitting_work_s(self, first: int, replicas: int, after: int) -> FloatArray:
        """Return the time of M microbatches shared evenly; infinite where 1F1B does not fit."""
        blocks = self.at(first, replicas)
        work_s, room = self.costs.work_s(blocks), self.costs.fits(blocks, after + 1)
        key = (id(work_s), id(room))  # Both are kept by the costs; there are few of either.
        if key not in self._work:
            self._work[key] = self.microbatches * work_s + room
        return self._work[key]

    def reduce_s(self, first: int, replicas: int) -> FloatArray | float:
        """Return all-reduce of the gradients; nothing on a single device."""
        blocks = self.at(first, replicas)
        return self.costs.reduce_s(blocks) if len(devices_of(blocks)) > 1 else 0.0

    def channel_s(self, first: int, replicas: int, next_replicas: int) -> FloatArray:
        """Return all activations there and all gradients back."""
        ends = self.at(first, replicas), self.at(first + replicas, next_replicas)
        return self.microbatches * (self.costs.send_s(*ends) + self.costs.send_back_s(*ends))
