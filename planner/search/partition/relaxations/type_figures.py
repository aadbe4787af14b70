"""What stages and cuts cost where devices count by type and may use the best links of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from planner.cluster.link_table import NO_LINK, LinkTable, moving_s
from planner.costs.collectives import fewest_steps
from planner.search.partition.chain import Chain, FloatArray, IntArray
from planner.search.partition.dynamic_programs.core import ROUNDING, Program
from planner.search.partition.intervals import BoolArray, Counts, exposed_s
from planner.search.partition.relaxations.relaxed_intervals import relaxed_intervals
from planner.search.partition.spans import Spans

MANY_STATES = 20_000
"""With so many states spare crossings of the network are no longer told apart from any number."""


@dataclass(frozen=True)
class TypeOption:
    """A stage on so many devices of each type; by cut and end, or by cut.

    Attributes:
        counts: devices by type.
        own_s: the longest span of a replica with all its work, the reduction and the optimizer
            step.
        load_s: the same span as far as the program counts the work; infinite where memory does not
            suffice.
        end_s: what follows the last gradient on the stage itself.
        path_s: one microbatch as far as the program counts its way.
        crosses: whether it lies in several groups, and its all-reduce crosses the network.
    """

    counts: Counts
    own_s: FloatArray
    load_s: FloatArray
    end_s: FloatArray
    path_s: FloatArray
    crosses: bool


class TypeFigures:
    """What stages and cuts of one problem cost where only the types of devices count.

    Args:
        chain: the layers.
        links: of the cluster.
        program: what counts of a stage.

    Attributes:
        used: devices used of each type, by state.
        needed_groups: groups that these lie in at least, by state.
        spare_end: crossings of the network beyond those needed; as many count as any number.
        work_left: work after each cut, in the prices of the work bound.
        price_left: prices of the devices left, by state.
    """

    def __init__(self, chain: Chain, links: LinkTable, program: Program) -> None:
        self.chain = chain
        self.links = links
        self.program = program
        self.intervals = relaxed_intervals(chain)
        self.kinds = np.array(chain.kinds)
        self.counts = chain.counts
        self.single = not chain.problem.job.replication
        self.shape = tuple(count + 1 for count in self.counts)
        self.used = np.array(list(product(*(range(size) for size in self.shape))))
        self._groups = links.groups
        self.needed_groups = self._count_groups()
        # Crossings beyond those needed so far; as many as the last count as any number.
        self.spare_end = min(int(self.needed_groups.max()) - 1, self._distinct_crossings())
        self.send = self._transfers()
        # By the prices of the work bound: the work after each cut, the devices left in each state.
        cheapest = (chain.load_prices[:, None] * chain.work_s).min(axis=0)
        work_left = self.intervals.after(cheapest * self.intervals.microbatches)
        self.work_left = work_left / ROUNDING
        self.price_left = ((np.array(self.counts) - self.used) * chain.load_prices).sum(axis=1)

    def _distinct_crossings(self) -> int:
        distinct = MANY_STATES // len(self.used)
        # Large stages cross the network anyway; that they reduce over it is counted in any case.
        return distinct if distinct > 20 or not self.single else max(2, distinct)

    # --- what a stage costs ------------------------------------------------------------------

    @cached_property
    def options(self) -> list[TypeOption]:
        """All stages by the devices they lie on."""
        if self.single:
            unit = np.eye(len(self.counts), dtype=int)
            every = [tuple(int(x) for x in row) for row in unit]
        else:
            every = [counts for counts in product(*map(range, self.shape)) if sum(counts)]
        useful = (counts for counts in every if self._is_useful(counts))
        return [option for counts in useful for option in self._options_on(counts)]

    def _is_useful(self, counts: Counts) -> bool:
        """Return whether one replica less would not carry the same load; on one type only."""
        replicas, microbatches = sum(counts), self.intervals.microbatches
        if replicas == 1 or max(counts) < replicas:
            return True
        return -(-microbatches // replicas) < -(-microbatches // (replicas - 1))

    def _options_on(self, counts: Counts) -> Iterator[TypeOption]:
        """Yield the stage inside a group, and the stage across groups."""
        replicas = sum(counts)
        inside = self._most_in_a_group(counts)
        narrowest = self.links.joint_s_per_byte[replicas]
        if inside:
            yield self._option(counts, narrowest, crosses=False)
        if self._groups is not None and replicas > 1:
            between = 1e-9 / self._groups.widest_between_gb_per_s
            yield self._option(counts, max(narrowest, between), crosses=True)

    def _most_in_a_group(self, counts: Counts) -> bool:
        """Return whether some group has so many devices."""
        if self._groups is None:
            return True
        for group in range(int(self._groups.of.max()) + 1):
            members = self.kinds[self._groups.of == group]
            if all(int((members == k).sum()) >= count for k, count in enumerate(counts)):
                return True
        return False

    def _option(self, counts: Counts, s_per_byte: float, *, crosses: bool) -> TypeOption:
        table, replicas = self.intervals, sum(counts)
        load = table.span_s(counts)
        inside, apart = table.reduced_bytes
        s_per_byte = max(s_per_byte, self._own_s_per_byte(counts))
        reduction = self._all_reduce_s(replicas, inside, s_per_byte)
        end = table.optimizer_s(counts) + exposed_s(reduction, table.earlier_s(counts))
        if apart.any():
            # At least one device of another stage takes part.
            joint = self.links.joint_s_per_byte
            further = joint[replicas + 1] if replicas < self.links.count else np.inf
            end = end + self._all_reduce_s(replicas + 1, apart, max(s_per_byte, further))
        own = np.where(table.fits(counts), load + end, np.inf)
        if self.program == "head":
            forward = table.least_forward_s(counts)
            return TypeOption(counts, own, own, np.zeros_like(end), forward, crosses)
        way = np.where(table.fits(counts), table.span_s(counts, weights=False), np.inf)
        end = end + table.least_weight_s(counts)
        return TypeOption(counts, own, way, end, table.path_s(counts), crosses)

    def _own_s_per_byte(self, counts: Counts) -> float:
        """Return what the widest links of so many devices of each type are at best.

        Of m devices one has no wider link to any other than the m-th best of its type.
        """
        return max(self._widest_links[k][count - 1] for k, count in enumerate(counts) if count)

    @cached_property
    def _widest_links(self) -> list[list[float]]:
        """Seconds a byte over the widest link of each device of a type, the least first."""
        return [
            sorted(
                self.links.least_s_per_byte_from(int(d)) for d in np.flatnonzero(self.kinds == k)
            )
            for k in range(len(self.counts))
        ]

    def _all_reduce_s(self, replicas: int, bytes_: FloatArray, s_per_byte: float) -> FloatArray:
        """Return the least time of an all-reduce; infinite where no path joins the replicas."""
        if replicas < 2:
            return np.zeros_like(bytes_)
        if not np.isfinite(s_per_byte):
            return np.where(bytes_ > 0, np.inf, 0.0)
        moved = 2 * (replicas - 1) / replicas * bytes_
        start = fewest_steps(replicas) * self.links.least_latency_s
        return np.where(bytes_ > 0, start + moved * s_per_byte, 0.0)

    def offset(self, counts: Counts) -> int:
        """Return by how much the number of a state grows with so many devices more."""
        strides = [prod(self.shape[k + 1 :]) for k in range(len(self.shape))]
        return sum(count * stride for count, stride in zip(counts, strides, strict=True))

    # --- what a cut costs --------------------------------------------------------------------

    def _transfers(self) -> list[list[tuple[FloatArray, FloatArray]]]:
        """Seconds forward and back at each cut, by the type they reach: any link, a slow one."""
        rows = []
        for k in range(len(self.counts)):
            fast = self.links.least_s_per_byte_to(np.flatnonzero(self.kinds == k))
            row = [self._transfer(fast)]
            if self._groups is not None:
                row.append(self._transfer(1e-9 / self._groups.widest_between_gb_per_s))
            rows.append(row)
        return rows

    def _transfer(self, s_per_byte: float) -> tuple[FloatArray, FloatArray]:
        latency_s = self.links.least_latency_s
        there, back = (
            moving_s(bytes_, latency_s, s_per_byte) for bytes_ in self.intervals.crossing_bytes
        )
        return there, back

    def _count_groups(self) -> IntArray:
        """Return groups that so many devices of each type lie in at least, by state."""
        if self._groups is None:
            return np.ones(len(self.used), dtype=np.int64)
        of, number = self._groups.of, int(self._groups.of.max()) + 1
        needed = np.zeros((len(self.counts), len(self.used)), dtype=np.int64)
        mixed = False
        for k in range(len(self.counts)):
            sizes = np.sort([int(((of == g) & (self.kinds == k)).sum()) for g in range(number)])
            room = np.concatenate([[0], np.cumsum(sizes[::-1])])
            needed[k] = np.searchsorted(room, self.used[:, k])
        for group in range(number):
            mixed |= len(set(self.kinds[of == group].tolist())) > 1
        total = needed.max(axis=0) if mixed else needed.sum(axis=0)
        return np.asarray(np.maximum(total, 1))


@dataclass(frozen=True)
class TypeStages:
    """Figures of stages whose quickest replica is of this type; by cut and end.

    Attributes:
        work_s: all of a microbatch's work on this type; infinite where it does not fit.
        spans, load_spans: of all that work, and as far as the program counts it.
        fits: whether one microbatch fits the type.
        path_s: one microbatch as far as the program counts its way, on the quickest of the types
            that may be in the stage with it.
        weight_s: what remains of a backward after its gradient, on the quickest of them.
        partners: types that are no quicker, by cut and end.
    """

    work_s: FloatArray
    spans: Spans
    load_spans: Spans
    fits: BoolArray
    path_s: FloatArray
    weight_s: FloatArray
    partners: BoolArray


class SurrogateFigures:
    """What stages and cuts of one problem cost, by the type of a stage's quickest replica.

    Args:
        chain: the layers.
        links: of the cluster.
        program: what counts of a stage.

    Attributes:
        types: figures of stages.
        send_s: a microbatch there at each cut, and back if the program counts its way back.
        step_s: least optimizer step, by cut and end.
        reduce_s: seconds at once and seconds a byte of an all-reduce, by the number of replicas.
    """

    def __init__(self, chain: Chain, links: LinkTable, program: Program) -> None:
        self.chain = chain
        self.links = links
        self.program = program
        self.intervals = relaxed_intervals(chain)
        self.kinds = np.array(chain.kinds)
        self.counts = np.array(chain.counts)
        self.replication = chain.problem.job.replication
        self.types = self._stage_figures()
        self.send_s = self._transfers()
        self.step_s = self._least_step_s()
        self.reduce_s = self._reductions()

    def _stage_figures(self) -> list[TypeStages]:
        table, through = self.intervals, self.program == "through"
        work = np.array(table.work_s())
        spans, counted = table.spans(), table.spans(weights=not through)
        back = (np.array(table.gradient_s) + np.array(table.forced_s)) * through
        unit = np.eye(len(self.counts), dtype=int)
        rows = []
        for k in range(len(self.counts)):
            counts = tuple(int(x) for x in unit[k])
            fits = table.fits(counts, are_all=False)
            partners = work >= work[k] * (1 - 1e-12)
            forward, gradient, weight = (
                np.where(partners, figure, np.inf).min(axis=0)
                for figure in (np.array(table.forward_s), back, np.array(table.weight_s))
            )
            rows.append(
                TypeStages(
                    work_s=np.where(fits, work[k], np.inf),
                    spans=spans[k],
                    load_spans=counted[k],
                    fits=fits,
                    path_s=forward + gradient,
                    weight_s=weight if through else np.zeros_like(weight),
                    partners=partners,
                )
            )
        return rows

    def _transfers(self) -> list[FloatArray]:
        """Return transfers by the type of a stage's quickest replica, over the widest link.

        A slower replica may have a wider link.
        """
        alone = np.array([self._transfer_s(k)[:-1, None] for k in range(len(self.counts))])
        if not self.replication:
            return [np.broadcast_to(row, self.types[0].work_s.shape) for row in alone]
        return [np.where(x.partners, alone, np.inf).min(axis=0) for x in self.types]

    def _transfer_s(self, k: int) -> FloatArray:
        """Return the way at each cut, over the widest link to a device of the type."""
        latency_s = self.links.least_latency_s
        s_per_byte = self.links.least_s_per_byte_to(np.flatnonzero(self.kinds == k))
        there, back = (
            moving_s(bytes_, latency_s, s_per_byte) for bytes_ in self.intervals.crossing_bytes
        )
        return there + back if self.program == "through" else there

    def _least_step_s(self) -> FloatArray:
        widest = max(kind.optimizer_gb_per_s for kind in self.intervals.types)
        return self.intervals.optimizer_traffic_bytes / (widest * 1e9)

    def all_reduce_s(self, replicas: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least time of an all-reduce over the widest links; 0 for one replica."""
        start, each = (row[replicas] for row in self.reduce_s)
        return np.where((bytes_ > 0) & (replicas > 1), start + bytes_ * each, 0.0)

    def exposed_s(
        self, replicas: IntArray, bytes_: FloatArray, cut: int, columns: slice
    ) -> FloatArray:
        """Return what follows the last backward of it, as :func:`exposed_s` says.

        Only for all layers of the stage: the least number of replicas may differ by its end.
        """
        seconds = self.all_reduce_s(replicas, bytes_)
        if self._earlier_s is None:
            return seconds
        return np.maximum(seconds - self._earlier_s[cut, columns], 0.0)

    @cached_property
    def _earlier_s(self) -> FloatArray | None:
        return self.intervals.earlier_s(tuple(int(count) for count in self.counts))

    def _reductions(self) -> tuple[FloatArray, FloatArray]:
        """Return seconds at once and seconds a byte of an all-reduce, by the number of replicas."""
        count = self.links.count
        replicas = np.arange(count + 1)
        steps = [fewest_steps(r) if r > 1 else 0 for r in range(count + 1)]
        joint = self.links.joint_s_per_byte
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(replicas > 1, 2 * (replicas - 1) / replicas * joint, 0.0)
        return np.array(steps) * self.links.least_latency_s, np.minimum(each, NO_LINK)
