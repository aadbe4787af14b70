"""What stages take at least on a number of devices of each class, and what passes between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from planner.verification.proof.buckets import OverlappedReductions
from planner.verification.proof.layers import BoolArray, FloatArray, IntArray, ProvedIntervals
from planner.verification.proof.links import FAR, ClassLinks
from planner.verification.proof.memory import memory_levels
from planner.verification.proof.vectors import Vectors


class StageTails(NamedTuple):
    """What follows on a stage itself, but for the optimizer step and others' reductions.

    Attributes:
        after_gradient_s: its last gradient on the way, by option and interval.
        after_backward_s: its last backward on a replica, by type of that.
    """

    after_gradient_s: FloatArray
    after_backward_s: Sequence[FloatArray]


class ProvedStages:
    """Least figures of all stages of a problem.

    Args:
        intervals: of the problem's layers.
        links: between the classes.
        vectors: of devices by class.
        kinds: number of each class's type.

    Attributes:
        kinds: the same.
        fits: whether types may run intervals, and a microbatch fits their memory, by option.
        forward_s, gradient_s: a microbatch's on the fastest type held, by option.
        way_s: both.
        step_s: the optimizer step of the slowest memory, by option: each device takes its own.
        head_s: least time before the first forward, by option and cut.
        rest_s: least way of a microbatch from a cut to the end and back, by cut.
        ahead_s: the same from behind a stage on, with the messages there, by option and cut.
        messages_s: messages there and back at a cut, for every pair of vectors that are apart.
        channel_s: what all messages at a cut take, with one on its way home, for these pairs.
        memory_levels: microbatches in flight, by type; none where any number fits.
        is_tight: whether memory limits the microbatches in flight on some device, by option.
    """

    def __init__(
        self,
        intervals: ProvedIntervals,
        links: ClassLinks,
        vectors: Vectors,
        kinds: Sequence[int],
    ) -> None:
        self.intervals, self.links, self.vectors = intervals, links, vectors
        self.layers = layers = intervals.layers
        self.kinds, self._held = np.array(kinds), vectors.rows[vectors.options]
        types = (self._held > 0) @ (self.kinds[:, None] == np.arange(len(layers.types)))
        # Which types are held, and by option the place among these.
        self._types, self._place = np.unique(types, axis=0, return_inverse=True)
        self._place = self._place.reshape(-1)
        self.fits = self._of_types(np.all, intervals.fits) > 0
        self.forward_s = self._of_types(np.min, intervals.forward_s)
        self.gradient_s = self._of_types(np.min, intervals.gradient_s)
        self.way_s = self.forward_s + self.gradient_s
        self.step_s = self._of_types(np.max, intervals.step_s)
        arrives, leaves = self._nearest_s()
        passed, self.rest_s = self._least_ways(arrives.min(axis=0), leaves.min(axis=0))
        self.head_s, self.ahead_s = passed + arrives, self.rest_s + leaves
        self.messages_s, self.channel_s = cache(self._messages_at), cache(self._channel_at)
        self.memory_levels = memory_levels(intervals)
        nowhere = np.zeros(intervals.is_stage.shape)
        again_s = [rows[-1].again_s if rows else nowhere for rows in self.memory_levels]
        self.is_tight = self._of_types(np.any, np.array(again_s)) > 0

    def _of_types(
        self, least: Callable[..., FloatArray], by_type: FloatArray | BoolArray
    ) -> FloatArray:
        """Return a figure of the types that each option holds, of a figure by type."""
        return np.array([least(by_type[held], axis=0) for held in self._types])[self._place]

    def _of_vectors(self, figure: Callable[[IntArray], FloatArray]) -> FloatArray:
        """Return a figure of intervals by option, of one for a vector of devices."""
        return np.array([figure(row) for row in self._held])

    def _least_ways(
        self, arrives_s: FloatArray, leaves_s: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the least time before each cut, and from it to the end and back.

        Over all ways to cut the layers there into stages that fit some type.

        Args:
            arrives_s: a message on, by cut.
            leaves_s: a message on and one back.
        """
        rows, fits = self.intervals, self.intervals.fits
        forward = np.where(fits, rows.forward_s, np.inf).min(axis=0)
        path = np.where(fits, rows.forward_s + rows.gradient_s, np.inf).min(axis=0)
        passed, rest = np.zeros((2, rows.count))
        for cut in range(1, len(passed)):
            passed[cut] = (passed[:cut] + arrives_s[:cut] + forward[:cut, cut]).min()
        for cut in range(len(rest) - 2, -1, -1):
            behind = slice(cut + 1, None)
            rest[cut] = (path[cut, behind] + rest[behind] + leaves_s[behind]).min()
        return np.minimum(passed, FAR), np.minimum(rest, FAR)

    def rest_of_all_s(self, back_s: FloatArray) -> FloatArray:
        """Return the longer of a microbatch's way and the work that is left for devices not used.

        Each second of a device has a price by its type. All layers behind a cut together cost at
        least what each costs on its cheapest type, and the devices left pay for it with the seconds
        that they have. Any prices hold; these are the speeds of the types in all these layers.

        Args:
            back_s: that each microbatch takes besides its forward, by type and layer.

        Returns:
            By vector of devices used before a cut and by cut.
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

    def _nearest_s(self) -> tuple[FloatArray, FloatArray]:
        """Return the least message to each option, and those on from it and back, by cut."""
        others = self._held < self.vectors.rows[-1]
        between = others[:, :, None] & (self._held > 0)[:, None, :]
        there, back = self._between_classes_s
        on_and_back = np.swapaxes(there, 1, 2) + back
        inner = slice(1, -1)
        arrives, leaves = np.zeros((2, len(self._held), self.intervals.count))
        for option, row in enumerate(between):
            arrives[option, inner] = np.where(row, there[inner], FAR).min(axis=(1, 2))
            leaves[option, inner] = np.where(row, on_and_back[inner], FAR).min(axis=(1, 2))
        return arrives, leaves

    @cached_property
    def _between_classes_s(self) -> tuple[FloatArray, FloatArray]:
        """Messages of activations and of gradients, by cut and classes."""
        layers, message_s = self.layers, self.links.message_s
        return message_s(layers.sent_bytes), message_s(layers.returned_bytes)

    def _messages_at(self, cut: int) -> tuple[FloatArray, FloatArray]:
        """Return messages there and back at a cut, for every pair of vectors that are apart."""
        rows, (there, back) = self.vectors.rows > 0, self._between_classes_s
        first, second = self.vectors.apart_used, self.vectors.apart_stage
        return (
            _least(there[cut], rows, first, second),
            _least(back[cut].T, rows, first, second),
        )

    @cached_property
    def _flows(self) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Seconds a byte there and back for pairs of vectors, and which are of single devices."""
        vectors, links = self.vectors, self.links
        used, stage = vectors.rows[vectors.apart_used], vectors.rows[vectors.apart_stage]
        there, back = np.zeros((2, len(used)))
        some = np.flatnonzero(vectors.apart_used)
        there[some] = links.flow_s_per_byte(used[some], stage[some])
        back[some] = links.flow_s_per_byte(stage[some], used[some])
        a, b = used.argmax(axis=1), stage.argmax(axis=1)
        single = (used.sum(axis=1) == 1) & (stage.sum(axis=1) == 1)
        return there, back, single & links.is_exclusive[a, b] & links.is_exclusive[b, a]

    @cached_property
    def _across_s_per_byte(self) -> FloatArray:
        """Seconds a byte from all of the first of two classes to the other, and back."""
        everything = np.diag(self.links.sizes)
        return self.links.flow_s_per_byte(everything, everything[::-1])

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
        ways, each = (sides, sides[::-1]), self._across_s_per_byte[list(sides)]
        alone = [
            np.where(row > 0, self.links.latency_s[way] + row * self.links.s_per_byte[way], 0.0)
            for row, way in zip(bytes_, ways, strict=True)
        ]
        there, back = self.layers.microbatches * bytes_ * each[:, None]
        most = np.maximum(there + alone[1], back + alone[0])
        return np.asarray(np.minimum(most + self.rest_s[cut], FAR))

    def _channel_at(self, cut: int) -> FloatArray:
        """Return what all messages at a cut take, with one on its way home, by pair."""
        layers, count = self.layers, self.layers.microbatches
        there, back = self.messages_s(cut)
        flow_there, flow_back, single = self._flows
        all_there = count * layers.sent_bytes[cut] * flow_there
        all_back = count * layers.returned_bytes[cut] * flow_back
        all_there = np.where(single, np.maximum(all_there, count * there), all_there)
        all_back = np.where(single, np.maximum(all_back, count * back), all_back)
        return np.asarray(np.maximum(all_there + back, all_back + there) + self.rest_s[cut])

    @cached_property
    def port_s(self) -> FloatArray:
        """What a microbatch's messages hold the links of a device for, by class and interval."""
        there, back = self.layers.sent_bytes, self.layers.returned_bytes
        received, sent = there[:, None] + back, there + back[:, None]
        turns = self.links.takes_turns[:, None, None]
        bytes_ = np.where(turns, received + sent, np.maximum(received, sent))
        return np.asarray(bytes_ * self.links.port_s_per_byte[:, None, None])

    # --- after the last gradient ------------------------------------------------------------------

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
        layers, weight_s = self.layers, self._of_types(np.min, self.intervals.weight_s)
        reduction = self._own_reduction_s
        if not layers.space.overlap_reduction:
            return StageTails(weight_s + reduction, [reduction] * len(layers.types))
        gradient, backward = layers.gradient_s + again_s, layers.backward_s + again_s
        slowest = self._of_types(np.max, gradient)
        rows = [
            self._overlapped.left_s(
                partial(self.links.all_reduce_s, held),
                np.array([slowest[place], *backward]),
                reduction[place],
            )
            for place, held in enumerate(self._held)
        ]
        after_gradient, *after_backward = np.moveaxis(np.array(rows), 0, 1)
        return StageTails(np.maximum(weight_s, after_gradient), after_backward)

    @cached_property
    def _own_reduction_s(self) -> FloatArray:
        """All-reduces of a stage's own gradients."""
        own = self.intervals.own_gradient_bytes
        return self._of_vectors(lambda held: self.links.all_reduce_s(held, own))

    @cached_property
    def _overlapped(self) -> OverlappedReductions:
        return OverlappedReductions(self.intervals)

    def joint_reduction_s(self, shared: FloatArray) -> FloatArray:
        """Return all-reduces together with another stage or more, after the stage's own.

        Args:
            shared: bytes of each interval.
        """
        if not shared.any():
            return np.zeros_like(self.way_s)
        return self._of_vectors(lambda held: self.links.joined_reduce_s(held, shared))


def _least(between: FloatArray, held: BoolArray, first: IntArray, second: IntArray) -> FloatArray:
    """Return the least entry over the classes that two vectors hold, for pairs of vectors."""
    rows = np.where(held[:, :, None], between[None], np.inf).min(axis=1)
    return np.asarray(np.where(held[second], rows[first], np.inf).min(axis=1))
