"""What stages cost, and what passes between two, where devices count by classes of like ones.

For the class relaxation. A vector says how many devices of each class hold a stage; figures never
exceed those of any stage on such devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from planner.cluster.cluster import Cluster
from planner.cluster.link_table import NO_LINK, FloatArray, IntArray, LinkTable
from planner.costs.collectives import fewest_steps
from planner.search.partition.bounds.schedule import Flows
from planner.search.partition.chain import Chain
from planner.search.partition.dynamic_programs.core import ROUNDING
from planner.search.partition.intervals import BoolArray, Counts, exposed_s
from planner.search.partition.relaxations.relaxed_intervals import relaxed_intervals
from planner.search.partition.spans import SpanTable, least_spans_s
from planner.search.partition.symmetry import interchangeable_devices


class DeviceClasses:
    """The classes of one cluster.

    Args:
        cluster: the devices.

    Attributes:
        members: device names of each class.
        sizes: their numbers.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        groups = interchangeable_devices(cluster)
        held = {device for group in groups for device in group}
        alone = [[device] for device in cluster.device_names if device not in held]
        self.members = [*groups, *alone]
        self.sizes = np.array([len(group) for group in self.members])

    @property
    def count(self) -> int:
        """How many vectors there are."""
        return prod(int(size) + 1 for size in self.sizes)

    @cached_property
    def vectors(self) -> IntArray:
        """All vectors, a row each, ascending; the first is empty."""
        return np.array(list(product(*(range(size + 1) for size in self.sizes))))

    @cached_property
    def _strides(self) -> IntArray:
        sizes = [int(size) + 1 for size in self.sizes]
        return np.array([prod(sizes[k + 1 :]) for k in range(len(sizes))])

    def numbers(self, vectors: IntArray) -> IntArray:
        """Return which rows of ``vectors`` these are."""
        return np.asarray(vectors @ self._strides)

    def devices(self, vector: Iterable[int], used: Iterable[int] | None = None) -> tuple[str, ...]:
        """Return so many devices of each class, in the cluster's order; the first not used.

        Args:
            vector: numbers by class.
            used: numbers that others have, by class; none if not given.
        """
        before = used if used is not None else [0] * len(self.sizes)
        chosen = [
            name
            for group, start, count in zip(self.members, before, vector, strict=True)
            for name in group[start : start + count]
        ]
        return tuple(sorted(chosen, key=self._cluster.numbers.__getitem__))

    def pair_figures(self, table: FloatArray) -> FloatArray:
        """Return the least entry of a matrix over devices, by the vectors at both ends.

        Args:
            table: infinite or 0 from a device to itself.

        Returns:
            A row for each vector that sends, a column for each that receives; infinite for empty
            ones.
        """
        table = np.where(np.eye(len(table), dtype=bool), np.inf, table)
        numbers = [[self._cluster.numbers[name] for name in group] for group in self.members]
        held = self.vectors > 0
        least = np.full((self.count, self.count), np.inf)
        for a, senders in enumerate(numbers):
            for b, receivers in enumerate(numbers):
                entry = table[np.ix_(senders, receivers)].min()
                ends = held[:, a][:, None] & held[:, b][None, :]
                np.minimum(least, entry, out=least, where=ends)
        return least


@dataclass(frozen=True)
class ClassStageFigures:
    """Stages on every vector; figures by vector, cut and end.

    Attributes:
        own_s: the longest span of a replica with all its work, the reduction and the optimizer
            step; infinite where such a stage cannot be.
        way_s: the same span without the reduction, the step and weight gradients that run apart.
        busy_s: all work, each microbatch for the longer of that and its transfers.
        way_busy_s: the same without weight gradients that run apart.
        end_s: the reduction and the optimizer step.
        after_s: what follows the last gradient on the stage itself.
        forward_s: one microbatch forward, on the fastest replica.
        path_s: one microbatch forward and back to the gradient that is sent on.
    """

    own_s: FloatArray
    way_s: FloatArray
    busy_s: FloatArray
    way_busy_s: FloatArray
    end_s: FloatArray
    after_s: FloatArray
    forward_s: FloatArray
    path_s: FloatArray


@dataclass(frozen=True)
class Hops:
    """What passes between two stages at a cut; matrices by the vectors that send and receive.

    Attributes:
        there_s, back_s: a message.
        next_s: at least, between two messages there that follow each other.
        channel_s: all messages, and the way of one beyond the cut.
    """

    there_s: FloatArray
    back_s: FloatArray
    next_s: FloatArray
    channel_s: FloatArray

    def __getitem__(self, ends: tuple[IntArray, IntArray]) -> Hops:
        """Return the figures of some pairs of vectors."""
        rows = (self.there_s, self.back_s, self.next_s, self.channel_s)
        return Hops(*(row[ends] for row in rows))


class ClassFigures:
    """Figures of one problem.

    Args:
        chain: the layers.
        links: of the cluster.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self.chain = chain
        self.links = links
        self.intervals = relaxed_intervals(chain)

    @cached_property
    def classes(self) -> DeviceClasses:
        """Devices that can be exchanged."""
        return DeviceClasses(self.chain.problem.cluster)

    @cached_property
    def work_left(self) -> FloatArray:
        """All work after each cut, in the prices of the work bound."""
        chain, table = self.chain, self.intervals
        cheapest = (chain.load_prices[:, None] * chain.work_s).min(axis=0)
        return table.after(cheapest * table.microbatches) / ROUNDING

    @cached_property
    def price_left(self) -> FloatArray:
        """Prices of all devices that a vector leaves."""
        return np.asarray((np.array(self.chain.counts) - self.replicas) @ self.chain.load_prices)

    # --- between stages ----------------------------------------------------------------------

    @cached_property
    def latency_s(self) -> FloatArray:
        """Return the figures of the quickest path from a vector's devices to another's."""
        return self.classes.pair_figures(self.links.latency_s)

    @cached_property
    def s_per_byte(self) -> FloatArray:
        """Return the figures of the widest path from a vector's devices to another's."""
        return np.minimum(self.classes.pair_figures(self.links.s_per_byte), NO_LINK)

    @cached_property
    def flow_s_per_byte(self) -> FloatArray:
        """If all links from a vector's devices to another's carry all they can."""
        flows, classes = Flows(self.chain.problem.cluster), self.classes
        vectors = classes.vectors
        inverse = np.zeros((classes.count, classes.count))
        for i in range(1, classes.count):
            are_apart = (vectors + vectors[i] <= classes.sizes).all(axis=1)
            for j in np.flatnonzero(are_apart)[1:]:
                ends = classes.devices(vectors[i]), classes.devices(vectors[j], vectors[i])
                width = flows.bytes_per_s(*ends)
                inverse[i, j] = 1 / width if width else NO_LINK
        return inverse

    @cached_property
    def hops(self) -> list[Hops]:
        """What passes between two stages at each cut."""
        return [self._hops(cut) for cut in range(self.intervals.count)]

    def _hops(self, cut: int) -> Hops:
        table, count = self.intervals, self.intervals.microbatches
        sent, received = (bytes_[cut] for bytes_ in table.crossing_bytes)
        none = np.zeros_like(self.latency_s)
        there = self.latency_s + sent * self.s_per_byte if sent else none
        back = (self.latency_s + received * self.s_per_byte).T if received else none
        all_there = count * sent * self.flow_s_per_byte
        all_back = count * received * self.flow_s_per_byte.T
        channel = np.maximum(all_there + back, all_back + there)
        following = np.where(self._are_single, there, 0.0)
        busy = count * np.maximum(there, back) + np.minimum(there, back)
        channel = np.where(self._are_single, np.maximum(channel, busy), channel)
        return Hops(there, back, following, channel + table.rest_s[cut])

    @cached_property
    def _are_single(self) -> BoolArray:
        """Whether two vectors are of a device each, whose messages wait for each other."""
        is_single = self.classes.vectors.sum(axis=1) == 1
        return np.asarray(is_single[:, None] & is_single[None, :] & self.links.is_exclusive)

    # --- stages ------------------------------------------------------------------------------

    @cached_property
    def holds(self) -> BoolArray:
        """Whether each vector may hold a stage."""
        devices = self.classes.vectors.sum(axis=1)
        replication = self.chain.problem.job.replication
        return np.asarray(devices > 0 if replication else devices == 1)

    @cached_property
    def stages(self) -> ClassStageFigures:
        """Stages on every vector that may hold one."""
        never = np.full(self.intervals.is_interval.shape, np.inf)
        nothing = ClassStageFigures(*[never] * len(fields(ClassStageFigures)))
        rows = [
            self._stage(vector) if holds else nothing
            for vector, holds in zip(self.classes.vectors, self.holds, strict=True)
        ]
        names = (field.name for field in fields(ClassStageFigures))
        return ClassStageFigures(
            *(np.array([getattr(row, name) for row in rows]) for name in names)
        )

    def _stage(self, vector: IntArray) -> ClassStageFigures:
        table, counts = self.intervals, self._counts(vector)
        fits = table.fits(counts)
        end = self._reduce_s(vector) + table.optimizer_s(counts)
        busy, way_busy = (self._busy_s(vector, weights=weights) for weights in (True, False))
        return ClassStageFigures(
            own_s=np.where(fits, table.span_s(counts) + end, np.inf),
            way_s=np.where(fits, table.span_s(counts, weights=False), np.inf),
            busy_s=busy,
            way_busy_s=way_busy,
            end_s=end,
            after_s=end + table.least_weight_s(counts),
            forward_s=table.least_forward_s(counts),
            path_s=table.path_s(counts),
        )

    def _counts(self, vector: IntArray) -> Counts:
        """Return devices by type."""
        counts = [0] * len(self.chain.types)
        for type_, count in zip(self._types, vector, strict=True):
            counts[type_] += int(count)
        return tuple(counts)

    @cached_property
    def _types(self) -> list[int]:
        cluster = self.chain.problem.cluster
        return [self.chain.types.index(cluster.type_of(group[0])) for group in self.classes.members]

    @cached_property
    def replicas(self) -> IntArray:
        """Devices by vector and type."""
        return np.array([self._counts(vector) for vector in self.classes.vectors])

    def _busy_s(self, vector: IntArray, *, weights: bool) -> FloatArray:
        """Return the time of the most loaded replica if work and transfers went on at once."""
        held = np.flatnonzero(vector)
        table = self.intervals
        work = table.work_s(weights=weights)
        rows = [np.maximum(work[self._types[k]], self._port_s(int(k))) for k in held]
        none = np.zeros_like(work[0])
        each = [SpanTable(each_s, none, none) for each_s in rows]
        counts = [int(vector[k]) for k in held]
        return np.where(table.is_interval, least_spans_s(each, counts, table.microbatches), np.inf)

    def _port_s(self, number: int) -> FloatArray:
        """Seconds that the transfers of a microbatch hold the links of a device of a class."""
        port = self.links.ports[self.chain.problem.cluster.numbers[self.classes.members[number][0]]]
        there, back = self.intervals.crossing_bytes
        received = there[:-1, None] + back[None, :]
        sent = there[None, :] + back[:-1, None]
        bytes_ = received + sent if port.is_half_duplex else np.maximum(received, sent)
        return np.where(bytes_ > 0, bytes_ * min(port.s_per_byte, NO_LINK), 0.0)

    def _reduce_s(self, vector: IntArray) -> FloatArray:
        """Return all-reduces after a stage, over the best order of its devices."""
        devices = self.classes.devices(vector)
        numbers = [self.chain.problem.cluster.numbers[name] for name in devices]
        inside, apart = self.intervals.reduced_bytes
        seconds = np.zeros_like(inside)
        replicas = len(numbers)
        if replicas > 1:
            for step in self.links.reduction(numbers):
                taken = self.all_reduce_s(replicas, inside, step.latency_s, step.s_per_byte)
                seconds = np.maximum(seconds, taken)
        seconds = exposed_s(seconds, self.intervals.earlier_s(self._counts(vector)))
        return seconds + self.tied_reduce_s(numbers, apart) if apart.any() else seconds

    def tied_reduce_s(self, numbers: list[int], bytes_: FloatArray) -> FloatArray:
        """Return the least all-reduce of these devices with one of another stage at least.

        Each has a link to some other.
        """
        return self.all_reduce_s(len(numbers) + 1, bytes_, *self._worst_port(numbers))

    def all_reduce_s(
        self, replicas: int, bytes_: FloatArray, latency_s: float, s_per_byte: float
    ) -> FloatArray:
        """Return an all-reduce over steps of one kind; 0 for no bytes."""
        moved = 2 * (replicas - 1) / replicas * bytes_
        seconds = fewest_steps(replicas) * latency_s + moved * min(s_per_byte, NO_LINK)
        return np.where(bytes_ > 0, seconds, 0.0)

    def _worst_port(self, numbers: list[int]) -> tuple[float, float]:
        """Return least latency, and seconds a byte of the device that is joined worst."""
        both = [
            2 * port.s_per_byte if port.is_half_duplex else 0.0
            for port in (self.links.ports[number] for number in numbers)
        ]
        widest = [self.links.least_s_per_byte_from(number) for number in numbers]
        return self.links.least_latency_s, max(map(max, zip(both, widest, strict=True)))
