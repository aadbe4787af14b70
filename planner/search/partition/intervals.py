"""Seconds and bytes of every interval of a chain on any number of devices of each type, at once.

Dynamic programs over cuts ask for the same figures of all intervals; here they are matrices.
Rows are the cut before the first layer, columns the cut after the last; entries where the column
is not after the row are infinite. Long chains are looked at in cells of layers: see
:func:`coarse_cuts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cluster.link_table import moving_s
from planner.costs.optimizer import most_holders
from planner.search.partition.chain import Chain, FloatArray, IntArray
from planner.search.partition.spans import (
    MemoryLevel,
    Spans,
    SpanTable,
    least_spans_s,
    spans_in_memory,
)

MOST_KEPT = 256
"""Matrices kept at a time, one for each number of devices by type."""
BoolArray = NDArray[np.bool_]
MAX_CUTS = 400
"""Matrices of so many cuts take a megabyte; longer chains are coarsened."""
Counts = tuple[int, ...]
"""A number of devices of each type, in the order of ``chain.types``."""


class Intervals:
    """Figures of the intervals between cuts.

    Args:
        chain: the layers.
        cuts: positions at which stages may begin and end, from 0 to the chain's length; all of
            them if not given.
        relaxed: the cuts are cells instead: a stage that begins somewhere in one cell and ends
            somewhere in another counts only what lies between for sure, so that the least over
            intervals of cells is at most the least over all intervals.
        levels: by type, what microbatches in flight cost where memory is short, of all intervals;
            left out of account if not given.
    """

    def __init__(
        self,
        chain: Chain,
        cuts: Sequence[int] | None = None,
        *,
        relaxed: bool = False,
        levels: Sequence[tuple[MemoryLevel, ...]] | None = None,
    ) -> None:
        self.chain = chain
        self.cuts = np.arange(chain.length + 1) if cuts is None else np.array(cuts, dtype=int)
        self.relaxed = relaxed and len(self.cuts) < chain.length + 1
        self.count = len(self.cuts) - 1
        self.microbatches = chain.problem.job.microbatches
        types = chain.problem.cluster.device_types
        self.types = [types[name] for name in chain.types]
        rows, columns = np.arange(self.count)[:, None], np.arange(self.count + 1)[None, :]
        self.is_interval = columns > rows
        self._first = self.cuts[:-1].copy()
        if self.relaxed:
            self._first[1:] = self.cuts[2:]
        self._levels = levels or [() for _ in self.types]
        self._of_types: dict[int, Intervals] = {}
        self._spans: dict[bool, list[Spans]] = {}
        self._span_s: dict[tuple[Counts, bool], FloatArray] = {}

    def sums(self, per_layer: FloatArray | IntArray) -> FloatArray:
        """Return the sum of a figure over each interval; 0 where there is none."""
        prefix = np.concatenate([[0.0], np.cumsum(per_layer, dtype=float)])
        sums = prefix[self.cuts][None, :] - prefix[self._first][:, None]
        return np.where(self.is_interval, np.maximum(sums, 0.0), 0.0)

    def before(self, per_layer: FloatArray) -> FloatArray:
        """Return the sum over all layers before each cut."""
        prefix = np.concatenate([[0.0], np.cumsum(per_layer, dtype=float)])
        return np.asarray(prefix[self.cuts])

    def after(self, per_layer: FloatArray) -> FloatArray:
        """Return the sum over the layers after each cut but the last, without its own cell's."""
        total = float(per_layer.sum())
        rest = total - np.append(self.before(per_layer), total)
        return np.asarray(rest[1:-1] if self.relaxed else rest[:-2])

    @cached_property
    def crossing_bytes(self) -> tuple[FloatArray, FloatArray]:
        """Activations there and gradients back at each cut, nothing at the ends.

        The least within a cell.
        """
        return self._at_cuts(self.chain.cut_bytes), self._at_cuts(self.chain.cut_gradient_bytes)

    def _at_cuts(self, bytes_: IntArray) -> FloatArray:
        if not self.relaxed:
            crossing = bytes_[self.cuts].astype(float)
        else:
            crossing = np.minimum.reduceat(bytes_.astype(float), self.cuts)
        crossing[0] = crossing[-1] = 0.0
        return np.asarray(crossing)

    @cached_property
    def forward_s(self) -> list[FloatArray]:
        """Forward seconds of a microbatch, by type."""
        return [self.sums(self.chain.forward_s(name)) for name in self.chain.types]

    @cached_property
    def backward_s(self) -> list[FloatArray]:
        """Backward seconds of a microbatch, by type."""
        return [self.sums(self.chain.backward_s(name)) for name in self.chain.types]

    @cached_property
    def gradient_s(self) -> list[FloatArray]:
        """Least seconds of a microbatch from its gradient to the one sent back, by type."""
        return [self.sums(self.chain.gradient_s(name)) for name in self.chain.types]

    @cached_property
    def weight_s(self) -> list[FloatArray]:
        """Least seconds of a microbatch's backward after its gradient is sent back, by type."""
        return [self.sums(self.chain.weight_s(name)) for name in self.chain.types]

    @cached_property
    def static_bytes(self) -> FloatArray:
        """Weights, gradients and optimizer state, at least, on however many devices."""
        return self.sums(self.chain.static_bytes)

    def static_bytes_on(self, counts: Counts, place: Any = np.s_[:, :]) -> FloatArray:
        """Return the same on replicas that share the optimizer's state, or more, if any do.

        Args:
            counts: devices by type, all that hold the stage.
            place: of the intervals asked for; all of them by default.
        """
        problem, own = self.chain.problem, self._alike(counts)
        static, shared = own.static_bytes[place], own._shared_bytes
        if shared is None:
            return np.asarray(static)
        more = 1 / (sum(counts) * problem.copies) - 1 / most_holders(problem)
        return np.asarray(static + shared[place] * max(0.0, more))

    def _alike(self, counts: Counts) -> Intervals:
        """Return the same intervals with the bytes of the types that hold a stage.

        Where types have bytes of their own, stages are on types that are alike in that.
        """
        chain = self.chain.on(self.chain.types[_held(counts)[0]])
        if chain is self.chain:
            return self
        if id(chain) not in self._of_types:
            self._of_types[id(chain)] = Intervals(chain, self.cuts.tolist(), relaxed=self.relaxed)
        return self._of_types[id(chain)]

    @cached_property
    def _shared_bytes(self) -> FloatArray | None:
        each = self.chain.shared_bytes
        return None if each is None else self.sums(each)

    @cached_property
    def stash_bytes(self) -> FloatArray:
        """Stash of a microbatch, at least."""
        return self.sums(self.chain.stash_bytes)

    @cached_property
    def least_stash_bytes(self) -> FloatArray:
        """Stash of a microbatch, at least, if layers are recomputed wherever the job allows it."""
        if not self.chain.problem.job.recompute:
            return self.stash_bytes
        return self.sums(self.chain.stashes.kept_bytes)

    @cached_property
    def gradient_bytes(self) -> FloatArray:
        """Gradients reduced among the replicas of a stage."""
        return self.sums(self.chain.gradient_bytes)

    @cached_property
    def reduced_bytes(self) -> tuple[FloatArray, FloatArray]:
        """Gradients reduced within a stage, and tied ones reduced together with other stages.

        Of tied parameters of a chain in cells it is not known which; these are left out, and so is
        what :meth:`Chain.reduced_tied_bytes` leaves out.
        """
        inside, apart = self.gradient_bytes.astype(float), np.zeros(self.is_interval.shape)
        for layers, bytes_ in self.chain.tied_parameters.items() if not self.relaxed else ():
            holds = np.zeros(self.chain.length)
            holds[list(layers)] = 1
            within, among = self.chain.reduced_tied_bytes(self.sums(holds), layers, bytes_)
            inside, apart = inside + within, apart + among
        return inside, apart

    def earlier_s(self, counts: Counts, place: Any = np.s_[:, :]) -> FloatArray | None:
        """Return the most seconds of a last backward on the layers before an interval's last.

        On any of these types. Nothing is recomputed, unless spans count recomputation, where memory
        binds: then all may be. None if reductions do not overlap with backwards.

        Args:
            counts: devices by type.
            place: of the intervals asked for; all of them by default.
        """
        if not self.chain.problem.job.overlap_reduction:
            return None
        return np.asarray(np.max([self._earlier_s[k][place] for k in _held(counts)], axis=0))

    @cached_property
    def _earlier_s(self) -> list[FloatArray]:
        """The same by type; of cells from the first place at which the stage may begin."""
        rows = []
        for name, levels in zip(self.chain.types, self._levels, strict=True):
            each = self.chain.last_backward_s(name)
            each = each + self.chain.forward_s(name) if levels else each
            prefix = np.concatenate([[0.0], np.cumsum(each)])
            until = prefix[np.maximum(self.cuts - 1, 0)]
            rows.append(np.maximum(until[None, :] - prefix[self.cuts[:-1]][:, None], 0.0))
        return rows

    @cached_property
    def optimizer_traffic_bytes(self) -> FloatArray:
        """What the optimizer step reads and writes."""
        return self.sums(self.chain.optimizer_traffic_bytes)

    def least_forward_s(self, counts: Counts) -> FloatArray:
        """Return a microbatch forward on the fastest replica."""
        return np.asarray(np.min([self.forward_s[k] for k in _held(counts)], axis=0))

    def path_s(self, counts: Counts) -> FloatArray:
        """Return a microbatch's way forward and back, each on the fastest replica."""
        gradient = np.min([self.gradient_s[k] + self.forced_s[k] for k in _held(counts)], axis=0)
        return np.asarray(self.least_forward_s(counts) + gradient)

    def least_weight_s(self, counts: Counts) -> FloatArray:
        """Return what remains of a backward after its gradient, on the fastest replica."""
        return np.asarray(np.min([self.weight_s[k] for k in _held(counts)], axis=0))

    def span_s(self, counts: Counts, *, weights: bool = True) -> FloatArray:
        """Return the least time from a stage's first forward to its last gradient.

        That of the replica with the longest span, under the best split of whole microbatches.

        Args:
            counts: devices by type.
            weights: count weight gradients that run apart as well.
        """
        key = (counts, weights or not self.chain.splits)
        if key not in self._span_s:
            if len(self._span_s) >= MOST_KEPT:
                self._span_s.clear()
            span = least_spans_s(self.spans(weights=key[1]), counts, self.microbatches)
            self._span_s[key] = np.where(self.is_interval, span, np.inf)
        return self._span_s[key]

    def spans(self, *, weights: bool = True) -> list[Spans]:
        """Return spans on a device of each type, perhaps without weight gradients."""
        weights = weights or not self.chain.splits
        if weights not in self._spans:
            self._spans[weights] = [self._spans_on(k, weights) for k in range(len(self.types))]
        return self._spans[weights]

    def _spans_on(self, kind: int, weights: bool) -> Spans:
        backward = self.backward_s if weights else self.gradient_s
        beyond = np.broadcast_to(self.beyond_s[None, :], self.is_interval.shape)
        trip = self.forward_s[kind] + beyond + self.gradient_s[kind]
        freely = SpanTable(self.forward_s[kind], backward[kind], beyond)
        return spans_in_memory(freely, trip, self._levels[kind], self.microbatches)

    # --- the way of a microbatch -------------------------------------------------------------

    @cached_property
    def beyond_s(self) -> FloatArray:
        """Least time between the end of a forward before each cut and the start of its backward."""
        return self.rest_s + self._hops_s[0] + self._hops_s[1]

    @cached_property
    def rest_s(self) -> FloatArray:
        """A microbatch's way from each cut to the last layer and back to the cut, at least.

        Over all ways to cut the layers behind it: every stage on one of the types that it fits,
        every cut on the widest link; and each layer on its fastest type.
        """
        ways = [
            np.where(self._fits_alone(k), work + self.forced_s[k], np.inf)
            for k, work in enumerate(self.work_s(weights=False))
        ]
        least, hops = np.min(ways, axis=0), self._hops_s[0] + self._hops_s[1]
        rest = np.append(self.after(self.chain.least_path_s), 0.0)
        for cut in reversed(range(self.count)):
            ways_s = least[cut, cut + 1 :] + hops[cut + 1 :] + rest[cut + 1 :]
            rest[cut] = max(rest[cut], ways_s.min())
        return rest

    @cached_property
    def head_s(self) -> FloatArray:
        """Least time between the start of the iteration and the first arrival behind each cut.

        Over all ways to cut the layers before it, as for ``rest_s``.
        """
        ways = [np.where(self._fits_alone(k), x, np.inf) for k, x in enumerate(self.forward_s)]
        least, head = np.min(ways, axis=0), self.before(self.chain.least_forward_s)
        for cut in range(1, self.count + 1):
            way_s = (head[:cut] + least[:cut, cut]).min() + self._hops_s[0][cut]
            head[cut] = max(head[cut], way_s)
        return head

    @cached_property
    def _hops_s(self) -> tuple[FloatArray, FloatArray]:
        """Seconds over the widest link at each cut, forward and back; none at the ends."""
        links = self.chain.problem.cluster.link_table
        widest = links.least_s_per_byte_to(np.arange(links.count))
        there, back = (
            moving_s(bytes_, links.least_latency_s, widest) for bytes_ in self.crossing_bytes
        )
        return there, back

    def _fits_alone(self, kind: int) -> BoolArray:
        """Return whether a type may hold a replica, with others as many as there can be."""
        return self.fits(tuple(int(k == kind) for k in range(len(self.types))), are_all=False)

    @cached_property
    def forced_s(self) -> list[FloatArray]:
        """Recomputation of a microbatch without which not even one fits, by type; at least."""
        none = np.zeros(self.is_interval.shape)
        return [
            np.where(np.isfinite(levels[0].extra_s), levels[0].extra_s, 0.0) if levels else none
            for levels in self._levels
        ]

    def work_s(self, *, weights: bool = True) -> list[FloatArray]:
        """Return seconds of a microbatch forward and back by type, perhaps without weights."""
        backward = self.backward_s if weights else self.gradient_s
        return [f + b for f, b in zip(self.forward_s, backward, strict=True)]

    def optimizer_s(self, counts: Counts) -> FloatArray:
        """Return the optimizer step, on the replica with the widest memory."""
        widest = max(self.types[k].optimizer_gb_per_s for k in _held(counts))
        return self.optimizer_traffic_bytes / (widest * 1e9)

    def fits(self, counts: Counts, *, are_all: bool = True) -> BoolArray:
        """Return whether the layers may run on these types and one microbatch fits each memory.

        Layers are recomputed if need be.

        Args:
            counts: devices by type.
            are_all: whether they are all that hold the stage; else others may share its state.
        """
        own = self._alike(counts)
        static = self.static_bytes_on(counts) if are_all else own.static_bytes
        needed = static + own.least_stash_bytes
        fits = self.is_interval & (needed <= self._room_bytes(counts))
        for k in _held(counts):
            fits &= self._foreign[k] == 0
        # Replicas of a stage are groups of one size.
        sizes = {self.types[k].members for k in _held(counts)}
        return np.asarray(fits if len(sizes) == 1 else np.zeros_like(fits))

    @cached_property
    def _foreign(self) -> list[FloatArray]:
        """Layers that may not run on each type."""
        return [self.sums(self.chain.foreign_layers(name)) for name in self.chain.types]

    def most_in_flight(self, counts: Counts, *, recompute: bool = False) -> FloatArray:
        """Return how many microbatches fit each replica; negative if not even the state does.

        Args:
            counts: devices by type.
            recompute: everything is recomputed that may be.
        """
        room = self._room_bytes(counts) - self.static_bytes_on(counts)
        own = self._alike(counts)
        stash = own.least_stash_bytes if recompute else own.stash_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            stashes = np.floor(room / stash)
        return np.asarray(np.where(room < 0, -1.0, np.where(stash > 0, stashes, np.inf)))

    def _room_bytes(self, counts: Counts) -> int:
        return min(self.types[k].capacity_bytes for k in _held(counts))


def _held(counts: Counts) -> list[int]:
    return [k for k, count in enumerate(counts) if count]


def exposed_s(reduction_s: FloatArray, earlier_s: FloatArray | None) -> FloatArray:
    """Return the least time of a stage's all-reduces after its last backward, by where it ends.

    Let a replica's last backward end at time t, and the stage hold layers a to b. The gradients of
    layers a to l, for any l up to b, are in buckets that wait for a layer up to l; all of these
    wait until the backward has run layer l, which is ``earlier_s`` (layers a to l - 1) before t at
    most. The replica reduces one bucket after the other, and several take no less than one with
    all the bytes. So the stage is reduced no sooner than t + reduction_s(a to l) - earlier_s, nor
    before t. Plans that reduce at once after t, which are in the space too, take no less.

    Recomputation may lengthen that backward by x, as it lengthens every backward of the stage on
    that replica, so t is later by x at least than figures without recomputation say. The sum of
    such figures of at least one of the stage's backwards and this one therefore holds as well.
    Figures that count recomputation need an ``earlier_s`` that does.

    Args:
        reduction_s: least all-reduce of the layers from some cut (rows, if there are several) to
            each later one; 0 where there is nothing to reduce.
        earlier_s: of :meth:`Intervals.earlier_s` at the same places.
    """
    if earlier_s is None:
        return reduction_s
    beyond = np.maximum(reduction_s - earlier_s, 0.0)
    return np.asarray(np.maximum.accumulate(beyond, axis=-1))


def interval_sums(per_layer: FloatArray | IntArray) -> FloatArray:
    """Return the sums of a figure over layers i to j, ``j`` exclusive; negative if j < i."""
    prefix = np.concatenate([[0.0], np.cumsum(per_layer, dtype=float)])
    return np.asarray(prefix[None, :] - prefix[:, None])


def allowed_cuts(chain: Chain) -> list[int]:
    """Return the cuts of :func:`coarse_cuts`, of those that the job allows."""
    if len(chain.cuts) <= MAX_CUTS:
        return list(chain.cuts)
    return coarse_cuts(chain, among=chain.cuts)


def coarse_cuts(
    chain: Chain, count: int = MAX_CUTS, among: Sequence[int] | None = None
) -> list[int]:
    """Return about ``count`` cuts, spread over the work; where cells meet, the narrowest.

    Every cut of a chain that is short enough.

    Args:
        chain: the layers.
        count: most cuts.
        among: positions to choose from; by default all.
    """
    if chain.length <= count:
        return list(range(chain.length + 1))
    seconds = chain.least_work_s
    even = np.arange(1, chain.length + 1) / chain.length
    spread = np.cumsum(seconds) / max(float(seconds.sum()), 1e-300)
    # Half by work and half by number, so that neither free nor heavy layers make huge cells.
    cell = np.minimum((spread + even) / 2 * count, count - 1e-9).astype(int)
    crossing = chain.cut_bytes + chain.cut_gradient_bytes
    cuts = [0, chain.length]
    for number in range(count - 1):
        inside = np.flatnonzero(cell == number) + 1
        inside = inside if among is None else np.intersect1d(inside, among)
        if len(inside):
            cuts.append(int(inside[crossing[inside].argmin()]))
    return sorted(set(cuts))
