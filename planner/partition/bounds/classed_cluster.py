"""A bound on every plan where many devices can be exchanged, with all links as they are.

As ``relaxed_cluster``, but only devices that can be exchanged count as alike: a state says how many
devices of each class are used and which of them hold the last stage. So every transfer has its own
links, and a stage's work is spread with regard to what each replica's links carry. Whether a time
can be reached is decided by dynamic programming over the cuts, for every state the least sum of the
next stage's head and of its way back to the end of the iteration. One stage a device, any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.artifacts.link_table import NO_LINK, LinkTable
from planner.costs.collectives import fewest_steps
from planner.partition.bisection import narrowed_s
from planner.partition.bounds.device_classes import DeviceClasses
from planner.partition.bounds.link_loads import Flows
from planner.partition.chain import Chain, FloatArray, IntArray, Partition, StageChoice
from planner.partition.intervals import MAX_CUTS, Counts, Intervals, best_split, coarse_cuts
from planner.partition.symmetry import MOST_DEVICES

ROUNDING = 1 + 1e-9
GROWTH = 1.25
"""By how much a limit that cannot be kept is raised."""
MAX_WORK = 3e8
"""Steps of the program for one limit, beyond which it takes too long."""


@dataclass(frozen=True)
class _Option:
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


@dataclass(frozen=True)
class _Before:
    """How a stage can be reached at a cut.

    Attributes:
        used: vectors used before it.
        last: of each, the vector of the stage before that is left the earliest.
        arrival_s: head and way back of the stage.
        left_s: those of the stage before, without any transfer.
    """

    used: IntArray
    last: IntArray
    arrival_s: FloatArray
    left_s: FloatArray


class ClassedCluster:
    """The relaxation of one problem.

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

    @property
    def is_tractable(self) -> bool:
        """Whether the program is small enough to be run."""
        if len(self.chain.problem.cluster.devices) > MOST_DEVICES:
            return False
        states = self.classes.count
        options = states if self.chain.problem.job.replication else len(self.classes.sizes)
        return states * states * options * min(self.chain.length, MAX_CUTS) <= MAX_WORK

    def bound_s(
        self,
        low_s: float,
        guess_s: float,
        longest_s: float,
        tolerance: float = 1e-3,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """No plan is faster.

        Args:
            low_s: no plan is faster than this either.
            guess_s: a limit to try first.
            longest_s: what some plan keeps, or any valid time limit; not more is returned.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step of it.
        """
        high_s = min(max(guess_s, low_s), longest_s)
        while may_go_on():
            if self._is_reachable(high_s):
                return narrowed_s(self._is_reachable, low_s, high_s, tolerance, may_go_on)[0]
            low_s = max(low_s, high_s)
            if high_s >= longest_s:
                break
            high_s = min(GROWTH * high_s, longest_s)
        return low_s

    def partition(self, limit_s: float) -> Partition | None:
        """Stages that keep a limit on the relaxed cluster; None if there are none."""
        program = _Program(self, limit_s * ROUNDING)
        program.run()
        return program.partition()

    def _is_reachable(self, limit_s: float) -> bool:
        program = _Program(self, limit_s * ROUNDING)
        program.run()
        return program.is_reached

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
    def options(self) -> list[_Option]:
        """All vectors that may hold a stage."""
        vectors, replication = self.classes.vectors, self.chain.problem.job.replication
        return [
            self._option(number)
            for number in range(1, len(vectors))
            if replication or vectors[number].sum() == 1
        ]

    def _option(self, number: int) -> _Option:
        table, vector = self.intervals, self.classes.vectors[number]
        counts = self._counts(vector)
        fits = table.fits(counts)
        load = np.where(fits, table.load_s(counts), np.inf)
        busy = np.where(fits, self._busy_s(vector), np.inf)
        end = self._reduce_s(vector) + table.optimizer_s(counts)
        return _Option(number, load, busy, end, table.path_s(counts))

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


class _Program:
    """The dynamic program for one limit.

    Args:
        cluster: the relaxation.
        limit_s: to keep.
    """

    def __init__(self, cluster: ClassedCluster, limit_s: float) -> None:
        self._cluster = cluster
        self._limit_s = limit_s
        self._table = cluster.intervals
        chain, count = cluster.chain, cluster.classes.count
        self._head_s = self._table.before(chain.least_forward_s)
        self._rest_s = self._table.behind(chain.least_work_s)
        shape = (self._table.count + 1, count, count)
        self._reached = np.full(shape, np.inf)
        """Head and way back by cut, vector used and vector of the last stage."""
        self._came_from = np.zeros(shape, dtype=np.int64)
        """Cut, vector used and vector of the last stage before, as one number."""
        self._reached[0, 0, 0] = 0.0

    @property
    def is_reached(self) -> bool:
        """Whether all layers are in stages."""
        return bool((self._reached[-1] <= self._limit_s).any())

    def run(self) -> None:
        """Extend all states by a stage, cut after cut."""
        for cut in range(self._table.count):
            row = self._reached[cut]
            row = np.where(row <= self._limit_s - self._rest_s[cut], row, np.inf)
            used = np.flatnonzero(np.isfinite(row).any(axis=1))
            last = np.flatnonzero(np.isfinite(row).any(axis=0))
            if len(used):
                block = row[np.ix_(used, last)]
                for option in self._cluster.options:
                    self._extend(cut, option, self._before(cut, option, block, used, last))

    def _before(
        self, cut: int, option: _Option, block: FloatArray, used: IntArray, last: IntArray
    ) -> _Before:
        cluster = self._cluster
        there, back, channel = self._transfers(cut, option.number, last)
        good = (block + channel <= self._limit_s) & cluster.are_apart[last, option.number]
        arrival = np.where(good, block + there + back, np.inf)
        left = np.where(good, block, np.inf)
        vectors, own = cluster.classes.vectors, cluster.classes.vectors[option.number]
        room = (vectors[used] + own <= cluster.classes.sizes).all(axis=1)
        first = arrival.argmin(axis=1)
        room &= np.isfinite(arrival[np.arange(len(used)), first])
        return _Before(
            used[room],
            last[first[room]],
            arrival[room, first[room]],
            left.min(axis=1)[room],
        )

    def _transfers(
        self, cut: int, number: int, last: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """There and back for a microbatch, and all of them until the last one's way back begins."""
        cluster, count = self._cluster, self._table.microbatches
        sent, received = (bytes_[cut] for bytes_ in self._table.crossing_bytes)
        none = np.zeros(len(last))
        if cut == 0:
            return none, none, none
        there = cluster.latency_s[last, number] + sent * cluster.s_per_byte[last, number]
        back = cluster.latency_s[number, last] + received * cluster.s_per_byte[number, last]
        there, back = (there if sent else none), (back if received else none)
        all_there = count * sent * cluster.flow_s_per_byte[last, number]
        all_back = count * received * cluster.flow_s_per_byte[number, last]
        channel = np.maximum(all_there + back, all_back + there)
        if cluster.links.is_exclusive and cluster.classes.vectors[number].sum() == 1:
            single = cluster.classes.vectors[last].sum(axis=1) == 1
            busy = count * np.maximum(there, back) + np.minimum(there, back)
            channel = np.where(single, np.maximum(channel, busy), channel)
        return there, back, channel + self._rest_s[cut]

    def _extend(self, cut: int, option: _Option, before: _Before) -> None:
        if not len(before.used):
            return
        spare_s = self._limit_s - before.arrival_s.min()
        kept = np.flatnonzero(option.load_s[cut, cut + 1 :] <= spare_s)
        if not len(kept):
            return
        ends = slice(cut + 1, cut + 2 + int(kept[-1]))
        classes = self._cluster.classes
        target = classes.numbers(classes.vectors[before.used] + classes.vectors[option.number])
        home = self._head_s[cut] + option.end_s[cut, ends]
        spent = np.maximum(before.arrival_s[:, None], home)
        keeps = spent + option.load_s[cut, ends] <= self._limit_s
        keeps &= before.left_s[:, None] + option.busy_s[cut, ends] <= self._limit_s
        new = np.where(keeps, spent + option.path_s[cut, ends], np.inf).T
        old = self._reached[ends, target, option.number]
        is_better = new < old
        self._reached[ends, target, option.number] = np.where(is_better, new, old)
        came = (cut * classes.count + before.used) * classes.count + before.last
        was = self._came_from[ends, target, option.number]
        self._came_from[ends, target, option.number] = np.where(is_better, came, was)

    def partition(self) -> Partition | None:
        """The stages with the least head and way back."""
        if not self.is_reached:
            return None
        stages = [*self._stages()][::-1]
        classes, cuts = self._cluster.classes, self._table.cuts
        used = np.zeros(len(classes.sizes), dtype=np.int64)
        chosen = []
        for begin, end, number in stages:
            vector = classes.vectors[number]
            devices = classes.devices(vector, used)
            chosen.append(StageChoice(int(cuts[begin]), int(cuts[end]), devices))
            used = used + vector
        return tuple(chosen)

    def _stages(self) -> Iterator[tuple[int, int, int]]:
        """Begin, end and vector of the stages, the last first."""
        count = self._cluster.classes.count
        used, last = divmod(int(self._reached[-1].argmin()), count)
        end = self._table.count
        while end > 0:
            came = int(self._came_from[end, used, last])
            begin, came = divmod(came, count * count)
            yield begin, end, last
            end, (used, last) = begin, divmod(came, count)
