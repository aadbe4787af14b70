"""What a stage takes, and what passes between two, where devices count by classes of like ones.

For ``classed_cluster``. A vector says how many devices of each class hold a stage; figures never
exceed those of any stage on such devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.artifacts.link_table import NO_LINK, LinkTable
from planner.costs.collectives import fewest_steps
from planner.partition.bounds.device_classes import DeviceClasses
from planner.partition.bounds.link_loads import Flows
from planner.partition.chain import Chain, FloatArray, IntArray
from planner.partition.intervals import Counts, Intervals, best_split, coarse_cuts


@dataclass(frozen=True)
class StageOption:
    """A stage on a vector of devices; figures by cut and end.

    Attributes:
        number: of the vector.
        load_s: work of the most loaded replica; infinite where memory does not suffice.
        busy_s: the same, each microbatch for the longer of its work and its transfers.
        end_s: reduction and optimizer step after it.
        path_s: one microbatch forward and back.
    """

    number: int
    load_s: FloatArray
    busy_s: FloatArray
    end_s: FloatArray
    path_s: FloatArray


class ClassedFigures:
    """Figures of one problem.

    Args:
        chain: the layers.
        links: of the cluster.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self.chain = chain
        self.links = links
        self.intervals = Intervals(chain, coarse_cuts(chain), relaxed=True)

    @cached_property
    def classes(self) -> DeviceClasses:
        """Devices that can be exchanged."""
        return DeviceClasses(self.chain.problem.cluster)

    # --- between stages ----------------------------------------------------------------------

    @cached_property
    def latency_s(self) -> FloatArray:
        """Of the quickest path from a vector's devices to another's."""
        return self.classes.pair_figures(self.links.latency_s)

    @cached_property
    def s_per_byte(self) -> FloatArray:
        """Of the widest path from a vector's devices to another's."""
        return np.minimum(self.classes.pair_figures(self.links.s_per_byte), NO_LINK)

    @cached_property
    def are_apart(self) -> FloatArray:
        """Whether there are enough devices for two vectors at a time."""
        vectors = self.classes.vectors
        both = vectors[:, None, :] + vectors[None, :, :]
        return np.asarray((both <= self.classes.sizes).all(axis=2))

    @cached_property
    def flow_s_per_byte(self) -> FloatArray:
        """If all links from a vector's devices to another's carry all they can."""
        flows, classes = Flows(self.chain.problem.cluster), self.classes
        vectors = classes.vectors
        inverse = np.zeros((classes.count, classes.count))
        for i in range(1, classes.count):
            for j in np.flatnonzero(self.are_apart[i])[1:]:
                ends = classes.devices(vectors[i]), classes.devices(vectors[j], vectors[i])
                width = flows.bytes_per_s(*ends)
                inverse[i, j] = 1 / width if width else NO_LINK
        return inverse

    # --- stages ------------------------------------------------------------------------------

    @cached_property
    def options(self) -> list[StageOption]:
        """All vectors that may hold a stage."""
        vectors, replication = self.classes.vectors, self.chain.problem.job.replication
        return [
            self._option(number)
            for number in range(1, len(vectors))
            if replication or vectors[number].sum() == 1
        ]

    def _option(self, number: int) -> StageOption:
        table, vector = self.intervals, self.classes.vectors[number]
        counts = self._counts(vector)
        fits = table.fits(counts)
        load = np.where(fits, table.load_s(counts), np.inf)
        busy = np.where(fits, self._busy_s(vector), np.inf)
        end = self._reduce_s(vector) + table.optimizer_s(counts)
        return StageOption(number, load, busy, end, table.path_s(counts))

    def _counts(self, vector: IntArray) -> Counts:
        """Devices by type."""
        counts = [0] * len(self.chain.types)
        for type_, count in zip(self._types, vector, strict=True):
            counts[type_] += int(count)
        return tuple(counts)

    @cached_property
    def _types(self) -> list[int]:
        cluster = self.chain.problem.cluster
        return [self.chain.types.index(cluster.type_of(group[0])) for group in self.classes.members]

    def _busy_s(self, vector: IntArray) -> FloatArray:
        """Of the most loaded replica, if work and transfers of a microbatch went on at once."""
        held = np.flatnonzero(vector)
        table = self.intervals
        each = [
            np.maximum(
                table.forward_s[self._types[k]] + table.backward_s[self._types[k]],
                self._port_s(int(k)),
            )
            for k in held
        ]
        counts = tuple(int(vector[k]) for k in held)
        return np.where(table.is_interval, best_split(each, counts, table.microbatches), np.inf)

    def _port_s(self, number: int) -> FloatArray:
        """Seconds that the transfers of a microbatch hold the links of a device of a class."""
        port = self.links.ports[self.chain.problem.cluster.numbers[self.classes.members[number][0]]]
        there, back = self.intervals.crossing_bytes
        received = there[:-1, None] + back[None, :]
        sent = there[None, :] + back[:-1, None]
        bytes_ = received + sent if port.is_half_duplex else np.maximum(received, sent)
        return np.where(bytes_ > 0, bytes_ * min(port.s_per_byte, NO_LINK), 0.0)

    def _reduce_s(self, vector: IntArray) -> FloatArray:
        """All-reduces after a stage, over the best order of its devices."""
        devices = self.classes.devices(vector)
        numbers = [self.chain.problem.cluster.numbers[name] for name in devices]
        inside, apart = self._gradient_bytes
        seconds = np.zeros_like(inside)
        replicas = len(numbers)
        if replicas > 1:
            for step in self.links.reduction(numbers):
                taken = self._all_reduce_s(replicas, inside, step.latency_s, step.s_per_byte)
                seconds = np.maximum(seconds, taken)
        if apart.any():
            # At least one device of another stage takes part; each has a link to some other.
            seconds = seconds + self._all_reduce_s(replicas + 1, apart, *self._worst_port(numbers))
        return seconds

    def _all_reduce_s(
        self, replicas: int, bytes_: FloatArray, latency_s: float, s_per_byte: float
    ) -> FloatArray:
        moved = 2 * (replicas - 1) / replicas * bytes_
        seconds = fewest_steps(replicas) * latency_s + moved * min(s_per_byte, NO_LINK)
        return np.where(bytes_ > 0, seconds, 0.0)

    def _worst_port(self, numbers: list[int]) -> tuple[float, float]:
        """Least latency, and seconds a byte of the device that is joined worst."""
        both = [
            2 * port.s_per_byte if port.is_half_duplex else 0.0
            for port in (self.links.ports[number] for number in numbers)
        ]
        widest = [self.links.least_s_per_byte_from(number) for number in numbers]
        return self.links.least_latency_s, max(map(max, zip(both, widest, strict=True)))

    @cached_property
    def _gradient_bytes(self) -> tuple[FloatArray, FloatArray]:
        """Reduced within a stage, and together with other stages.

        Of tied parameters of a chain in cells it is not known which; these are left out.
        """
        table = self.intervals
        inside, apart = table.gradient_bytes.astype(float), np.zeros(table.is_interval.shape)
        for layers, bytes_ in self.chain.tied_parameters.items() if not table.relaxed else ():
            holds = np.zeros(self.chain.length)
            holds[list(layers)] = 1
            held = table.sums(holds)
            inside = inside + np.where(held == len(layers), bytes_, 0.0)
            apart = apart + np.where((held > 0) & (held < len(layers)), bytes_, 0.0)
        return inside, apart
