"""What stages take at least on a number of devices of each class, and what passes between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from planner.verification.proof.buckets import OverlappedReductions
from planner.verification.proof.layers import (
    BoolArray,
    FloatArray,
    IntArray,
    ProvedIntervals,
    ProvedLayers,
)
from planner.verification.proof.links import FAR, ClassLinks
from planner.verification.proof.memory import ProvedMemory, ProvedMemoryLevel
from planner.verification.proof.vectors import Vectors


@dataclass(frozen=True)
class TypeSeconds:
    """Seconds of a microbatch in each interval on one type of device."""

    forward: FloatArray
    gradient: FloatArray
    backward: FloatArray


class StageTails(NamedTuple):
    """What follows on a stage itself, but for the optimizer step and others' reductions.

    Attributes:
        after_gradient_s: its last gradient on the way, by option and interval.
        after_backward_s: its last backward on a replica, by type of that.
    """

    after_gradient_s: FloatArray
    after_backward_s: list[FloatArray]


class ProvedStages:
    """Least figures of all stages of a problem.

    Args:
        layers: of the problem.
        intervals: of these layers.
        links: between the classes.
        vectors: of devices by class.
        kinds: number of each class's type.

    Attributes:
        kinds: the same.
        seconds: by type.
        head_s: least time before the first forward, by option and cut.
        rest_s: least way of a microbatch from a cut to the end and back, by cut.
        ahead_s: the same from behind a stage on, with the messages there, by option and cut.
        messages_s: messages there and back at a cut, for every pair of vectors that are apart.
        channel_s: what all messages at a cut take, with one on its way home, for these pairs.
    """

    def __init__(
        self,
        layers: ProvedLayers,
        intervals: ProvedIntervals,
        links: ClassLinks,
        vectors: Vectors,
        kinds: Sequence[int],
    ) -> None:
        self.layers, self.intervals, self.links, self.vectors = layers, intervals, links, vectors
        self.kinds = kinds
        self._held_types = [
            tuple(sorted({kinds[int(k)] for k in np.flatnonzero(row)})) for row in vectors.rows
        ]
        self.seconds = [
            TypeSeconds(*(intervals.sums(s[k]) for s in self._by_type))
            for k in range(len(layers.types))
        ]
        arrives, leaves = self._nearest_s()
        passed, self.rest_s = self._least_ways(arrives.min(axis=0), leaves.min(axis=0))
        self.head_s, self.ahead_s = passed + arrives, self.rest_s + leaves
        self.messages_s, self.channel_s = cache(self._messages_at), cache(self._channel_at)

    @property
    def _by_type(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        layers = self.layers
        return layers.forward_s, layers.gradient_s, layers.backward_s

    def _least_ways(
        self, arrives_s: FloatArray, leaves_s: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the least time before each cut, and from it to the end and back.

        Over all ways to cut the layers there into stages that fit some type.

        Args:
            arrives_s: a message on, by cut.
            leaves_s: a message on and one back.
        """
        fits = np.array(self.intervals.fits_type)
        forwards = [row.forward for row in self.seconds]
        paths = [row.forward + row.gradient for row in self.seconds]
        forward, path = (np.where(fits, rows, np.inf).min(axis=0) for rows in (forwards, paths))
        passed, rest = np.zeros((2, self.intervals.count))
        for cut in range(1, len(passed)):
            passed[cut] = (passed[:cut] + arrives_s[:cut] + forward[:cut, cut]).min()
        for cut in range(len(rest) - 2, -1, -1):
            behind = slice(cut + 1, None)
            rest[cut] = (path[cut, behind] + rest[behind] + leaves_s[behind]).min()
        return np.minimum(passed, FAR), np.minimum(rest, FAR)

    @cached_property
    def rest_ways_s(self) -> FloatArray:
        """What has to follow each cut, with the forwards and gradients of all microbatches.

        By vector of devices used before the cut and by cut.
        """
        return self._rest_of_all_s(self.layers.gradient_s)

    @cached_property
    def rest_works_s(self) -> FloatArray:
        """The same with all work of all microbatches."""
        return self._rest_of_all_s(self.layers.backward_s)

    def _rest_of_all_s(self, back_s: FloatArray) -> FloatArray:
        """Return the longer of a microbatch's way and the work that is left for devices not used.

        Each second of a device has a price by its type. All layers behind a cut together cost at
        least what each costs on its cheapest type, and the devices left pay for it with the seconds
        that they have. Any prices hold; these are the speeds of the types in all these layers.

        Args:
            back_s: that each microbatch takes besides its forward, by type and layer.
        """
        layers, each_s = self.layers, self.layers.forward_s + back_s
        left = self.vectors.rows[-1] - self.vectors.rows
        table = np.zeros((len(left), self.intervals.count))
        for cut in range(self.intervals.count - 1):
            behind, may_run = each_s[:, cut:], layers.may_run[:, cut:]
            prices = 1 / np.maximum(np.where(may_run, behind, 0.0).sum(axis=1), 1 / FAR)
            cheapest = np.where(may_run, prices[:, None] * behind, FAR).min(axis=0)
            paid, needed = left @ prices[self.kinds], layers.microbatches * cheapest.sum()
            table[:, cut] = np.where(paid > 0, needed / np.maximum(paid, 1 / FAR), FAR)
        return np.minimum(np.maximum(table, self.rest_s), FAR)

    # --- between stages ---------------------------------------------------------------------------

    @cached_property
    def crossing_bytes(self) -> tuple[FloatArray, FloatArray]:
        """Activations there and gradients back, by cut; nothing at the two ends."""
        rows = [self.layers.crossing_bytes(gradients=back) for back in (False, True)]
        for row in rows:
            row[0] = row[-1] = 0.0
        return rows[0], rows[1]

    def _messages_s(self, bytes_: float) -> FloatArray:
        """Return the seconds of a message between classes; 0 where nothing is sent."""
        if bytes_ == 0:
            return np.zeros_like(self.links.latency_s)
        return np.minimum(self.links.latency_s + bytes_ * self.links.s_per_byte, FAR)

    def _nearest_s(self) -> tuple[FloatArray, FloatArray]:
        """Return the least message to each option, and those on from it and back, by cut."""
        held = self.vectors.rows[self.vectors.options] > 0
        others = self.vectors.rows[self.vectors.options] < self.vectors.rows[-1]
        between = others[:, :, None] & held[:, None, :]
        arrives, leaves = np.zeros((2, len(held), self.intervals.count))
        for cut in range(1, self.intervals.count - 1):
            there, back = (self._messages_s(bytes_[cut]) for bytes_ in self.crossing_bytes)
            on_and_back = there.T + back
            arrives[:, cut] = np.where(between, there, FAR).min(axis=(1, 2))
            leaves[:, cut] = np.where(between, on_and_back, FAR).min(axis=(1, 2))
        return arrives, leaves

    def _messages_at(self, cut: int) -> tuple[FloatArray, FloatArray]:
        """Return messages there and back at a cut, for every pair of vectors that are apart."""
        rows = self.vectors.rows > 0
        there, back = (self._messages_s(bytes_[cut]) for bytes_ in self.crossing_bytes)
        first, second = self.vectors.apart_used, self.vectors.apart_stage
        return (
            _least(there, rows, first, second),
            _least(back.T, rows, first, second),
        )

    @cached_property
    def _flows(self) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Seconds a byte there and back for pairs of vectors, and which are of single devices."""
        vectors, links = self.vectors, self.links
        there, back = np.zeros((2, len(vectors.apart_used)))
        for number in vectors.apart_later:
            u, n = (vectors.rows[v[number]] for v in (vectors.apart_used, vectors.apart_stage))
            there[number] = links.flow_s_per_byte(u, n)
            back[number] = links.flow_s_per_byte(n, u)
        alone = vectors.rows.sum(axis=1) == 1
        single = alone[vectors.apart_used] & alone[vectors.apart_stage]
        for number in np.flatnonzero(single):
            a, b = (
                int(vectors.rows[v[number]].argmax())
                for v in (vectors.apart_used, vectors.apart_stage)
            )
            single[number] = links.is_exclusive[a, b] and links.is_exclusive[b, a]
        return there, back, single

    def changed_s(self, cut: int, sides: tuple[int, int], bytes_: FloatArray) -> FloatArray:
        """Return what passes while all microbatches go from one of two classes to the other.

        All activations pass what joins the classes, and all gradients the other way; the first
        gradient comes after an activation, the last activation's gradient comes back, and between
        the two a microbatch goes to the end of all layers and back.

        Args:
            cut: at which they have changed; some may have before it.
            sides: the class that they come from, and the other one.
            bytes_: of an activation and of a gradient at least, in two rows.
        """
        (a, b), count = sides, self.layers.microbatches
        everywhere = np.diag(self.links.sizes)
        each = [
            self.links.flow_s_per_byte(everywhere[x], everywhere[y]) for x, y in ((a, b), (b, a))
        ]
        alone = [
            np.where(row > 0, self.links.latency_s[x, y] + row * self.links.s_per_byte[x, y], 0.0)
            for row, (x, y) in zip(bytes_, ((a, b), (b, a)), strict=True)
        ]
        there = count * bytes_[0] * each[0] + alone[1]
        back = count * bytes_[1] * each[1] + alone[0]
        return np.asarray(np.minimum(np.maximum(there, back) + self.rest_s[cut], FAR))

    def _channel_at(self, cut: int) -> FloatArray:
        """Return what all messages at a cut take, with one on its way home, by pair."""
        there, back = self.messages_s(cut)
        count = self.layers.microbatches
        sent, received = (bytes_[cut] for bytes_ in self.crossing_bytes)
        flow_there, flow_back, single = self._flows
        all_there, all_back = count * sent * flow_there, count * received * flow_back
        all_there = np.where(single, np.maximum(all_there, count * there), all_there)
        all_back = np.where(single, np.maximum(all_back, count * back), all_back)
        busy = np.maximum(all_there + back, all_back + there) + self.rest_s[cut]
        return np.asarray(busy)

    # --- stages -----------------------------------------------------------------------------------

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.vectors.options), self.intervals.count, self.intervals.count

    def _of_all(self, figure: Callable[[int], FloatArray]) -> FloatArray:
        """Return a figure of every vector on which a stage may lie, by option."""
        table = np.zeros(self._shape)
        for place, number in enumerate(self.vectors.options):
            table[place] = figure(int(number))
        return table

    @cached_property
    def fits(self) -> BoolArray:
        """Whether types may run intervals, and a microbatch fits their memory."""
        rows = self.intervals.fits_type

        def fit(number: int) -> FloatArray:
            return np.asarray(np.all([rows[k] for k in self._held_types[number]], axis=0))

        return self._of_all(fit) > 0

    @cached_property
    def forward_s(self) -> FloatArray:
        """A microbatch's forward on the fastest type held."""
        return self._of_all(partial(self._fastest, [row.forward for row in self.seconds]))

    @cached_property
    def way_s(self) -> FloatArray:
        """The forward and the gradient of a microbatch."""
        return self.forward_s + self.gradient_s

    @cached_property
    def gradient_s(self) -> FloatArray:
        """A microbatch's gradient on its way, on the fastest type held."""
        return self._of_all(partial(self._fastest, [row.gradient for row in self.seconds]))

    @cached_property
    def weight_s(self) -> FloatArray:
        """What remains of a backward after its gradient, on the fastest type held."""
        rows = [self.intervals.sums(row) for row in self.layers.weight_s]
        return self._of_all(partial(self._fastest, rows))

    def _fastest(self, by_type: Sequence[FloatArray], number: int) -> FloatArray:
        return np.asarray(np.min([by_type[k] for k in self._held_types[number]], axis=0))

    @cached_property
    def reduction_s(self) -> FloatArray:
        """All-reduces of a stage's own gradients."""
        rows, own = self.vectors.rows, self.intervals.own_gradient_bytes
        return self._of_all(lambda number: self.links.all_reduce_s(rows[number], own))

    @cached_property
    def tails(self) -> StageTails:
        """What remains on a stage itself, if layers run again for nothing."""
        return self._tails(np.zeros_like(self.layers.forward_s))

    @cached_property
    def tails_with_reruns(self) -> StageTails:
        """The same where time of layers that run again in the last backward has been counted."""
        return self._tails(self.layers.forward_s)

    def _tails(self, again_s: FloatArray) -> StageTails:
        """Return the rest of the last backward and the reductions, of which a part overlaps it.

        Args:
            again_s: that each layer takes at most besides in that backward, by type.
        """
        layers = self.layers
        if not layers.space.overlap_reduction:
            after_gradient = self.weight_s + self.reduction_s
            return StageTails(after_gradient, [self.reduction_s] * len(layers.types))
        gradient, backward = layers.gradient_s + again_s, layers.backward_s + again_s
        tables = np.zeros((1 + len(backward), *self._shape))
        for place, number in enumerate(self.vectors.options.tolist()):
            slowest = gradient[list(self._held_types[number])].max(axis=0)
            tables[:, place] = self._overlapped.left_s(
                partial(self.links.all_reduce_s, self.vectors.rows[number]),
                np.array([slowest, *backward]),
                self.reduction_s[place],
            )
        return StageTails(np.maximum(self.weight_s, tables[0]), list(tables[1:]))

    @cached_property
    def memory_levels(self) -> list[list[ProvedMemoryLevel]]:
        """Microbatches in flight, by type; none where any number fits."""
        return ProvedMemory(self.intervals).levels

    @cached_property
    def is_tight(self) -> BoolArray:
        """Whether memory limits the microbatches in flight on some device, by option."""
        nowhere = np.zeros(self._shape[1:])
        tight = [rows[-1].again_s > 0 if rows else nowhere > 0 for rows in self.memory_levels]
        some = self._of_all(lambda n: np.any([tight[k] for k in self._held_types[n]], axis=0))
        return some > 0

    @cached_property
    def _overlapped(self) -> OverlappedReductions:
        return OverlappedReductions(self.intervals)

    @cached_property
    def joint_reduction_s(self) -> FloatArray:
        """All-reduces of a stage together with others, after its own on each of its devices."""
        return self.joint_reduce_s(self.intervals.shared_gradient_bytes)

    def joint_reduce_s(self, shared: FloatArray) -> FloatArray:
        """Return all-reduces of some bytes of each interval together with a stage or more."""
        if not shared.any():
            return np.zeros(self._shape)
        rows = self.vectors.rows
        return self._of_all(lambda number: self.links.joined_reduce_s(rows[number], shared))

    @cached_property
    def step_s(self) -> FloatArray:
        """The optimizer step of the slowest memory: each device takes its own."""
        return self._of_all(self._step_s)

    def _step_s(self, number: int) -> FloatArray:
        types = self.layers.cluster.device_types
        names = [self.layers.types[k] for k in self._held_types[number]]
        narrowest = min(types[name].optimizer_gb_per_s for name in names)
        return self.intervals.optimizer_bytes / (narrowest * 1e9)

    @cached_property
    def port_s(self) -> list[FloatArray]:
        """What a microbatch's messages hold the links of a device for, by class."""
        return [self._port_s(k) for k in range(len(self.kinds))]

    def _port_s(self, k: int) -> FloatArray:
        port, (there, back) = self.links.ports[k], self.crossing_bytes
        received, sent = there[:, None] + back[None, :], there[None, :] + back[:, None]
        bytes_ = received + sent if port.takes_turns else np.maximum(received, sent)
        return np.asarray(np.where(bytes_ > 0, bytes_ * port.s_per_byte, 0.0))


def _least(between: FloatArray, held: BoolArray, first: IntArray, second: IntArray) -> FloatArray:
    """Return the least entry over the classes that two vectors hold, for pairs of vectors."""
    rows = np.where(held[:, :, None], between[None], np.inf).min(axis=1)
    return np.asarray(np.where(held[second], rows[first], np.inf).min(axis=1))
