"""What stages take at least on a number of devices of each class, and what passes between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from planner.verification.proof.buckets import OverlappedReductions
from planner.verification.proof.figures import FAR, BoolArray, Figures, FloatArray, IntArray
from planner.verification.proof.links import ClassLinks
from planner.verification.proof.memory import memory_levels
from planner.verification.proof.vectors import Vectors


class StageTails(NamedTuple):
    """What follows on a stage itself, but for the optimizer step and others' reductions.

    Attributes:
        after_gradient_s: its last gradient on the way, by option and interval.
        after_backward_s: its last backward on a replica, by type of that, option and interval.
    """

    after_gradient_s: FloatArray
    after_backward_s: FloatArray


class CutFigures(NamedTuple):
    """What passes a cut, for every pair of vectors that are apart: of both sides of it.

    Attributes:
        there_s, back_s: a message of activations, and one of gradients.
        channel_s: all messages, with one on its way home.
    """

    there_s: FloatArray
    back_s: FloatArray
    channel_s: FloatArray


class StageFigures:
    """Least figures of all stages of a problem, by option of devices and interval of layers.

    Args:
        figures: of the layers.
        links: between the classes.
        vectors: of devices by class.
        kinds: number of each class's type.

    Attributes:
        figures, links, vectors, kinds: the same.
        held: devices by option and class.
        fits: whether all types held may run an interval, and a microbatch fits their memory.
        forward_s, gradient_s: a microbatch's on the fastest type held.
        way_s: both.
        step_s: the optimizer step of the slowest memory: each device takes its own.
        head_s: least time before the first forward, by option and cut.
        rest_s: least way of a microbatch from a cut to the end and back, by cut.
        ahead_s: the same from behind a stage on, with the messages there, by option and cut.
        at: returns what passes a cut.
        port_s: what a microbatch's messages hold the links of a device for, by class and interval.
        waits_s: for a microbatch's messages before a stage, and behind it, by class and cut.
        memory_levels: microbatches in flight, by type; none where any number fits.
        is_tight: whether memory limits the microbatches in flight on some device.
    """

    def __init__(
        self, figures: Figures, links: ClassLinks, vectors: Vectors, kinds: Sequence[int]
    ) -> None:
        self.figures, self.links, self.vectors = figures, links, vectors
        self.kinds, self.held = np.array(kinds), vectors.rows[vectors.options]
        types = (self.held > 0) @ (self.kinds[:, None] == np.arange(len(figures.types)))
        # Which types are held, and by option the place among these.
        self._types, place = np.unique(types, axis=0, return_inverse=True)
        self._place = place.reshape(-1)
        seconds = figures.of_interval
        self.fits = self._of_types(np.all, figures.fits) > 0
        self.forward_s = self._of_types(np.min, seconds.forward)
        self.gradient_s = self._of_types(np.min, seconds.gradient)
        self.way_s = self.forward_s + self.gradient_s
        self.step_s = self._of_types(np.max, figures.step_s)
        self._there_s = links.message_s(figures.sent_bytes)
        self._back_s = links.message_s(figures.returned_bytes)
        messages = np.array([self._there_s, self._back_s])
        received, sent = (np.swapaxes(messages.min(axis=side), 1, 2) for side in (2, 3))
        self.waits_s = figures.waits_s(received, sent)
        arrives, leaves = self._nearest_s()
        passed, self.rest_s = self._least_ways(arrives.min(axis=0), leaves.min(axis=0))
        self.head_s, self.ahead_s = passed + arrives, self.rest_s + leaves
        there, back = figures.sent_bytes, figures.returned_bytes
        received, sent = there[:, None] + back, there + back[:, None]
        turns = links.takes_turns[:, None, None]
        bytes_ = np.where(turns, received + sent, np.maximum(received, sent))
        self.port_s = bytes_ * links.port_s_per_byte[:, None, None]
        self.at = cache(self._at)
        self.memory_levels = memory_levels(figures)
        nowhere = np.zeros(figures.is_stage.shape)
        again_s = [rows[-1].again_s if rows else nowhere for rows in self.memory_levels]
        self.is_tight = self._of_types(np.any, np.array(again_s)) > 0

    def _of_types(
        self, least: Callable[..., FloatArray], by_type: FloatArray | BoolArray
    ) -> FloatArray:
        """Return a figure of the types that each option holds, of a figure by type."""
        return np.array([least(by_type[held], axis=0) for held in self._types])[self._place]

    def rest_of_all_s(self, each_s: FloatArray) -> FloatArray:
        """Return the longer of a microbatch's way and the work that is left for devices not used.

        Each second of a device has a price by its type. All layers behind a cut together cost at
        least what each costs on its cheapest type, and the devices left pay for it with the seconds
        that they have. Any prices hold; these are the speeds of the types in all these layers.

        Args:
            each_s: that a microbatch takes, by type and layer.

        Returns:
            By vector of devices used before a cut and by cut.
        """
        left = self.vectors.rows[-1] - self.vectors.rows
        table = np.zeros((len(left), len(self.rest_s)))
        for cut in range(len(self.rest_s) - 1):
            behind, may_run = each_s[:, cut:], self.figures.may_run[:, cut:]
            prices = 1 / np.maximum(np.where(may_run, behind, 0.0).sum(axis=1), 1 / FAR)
            cheapest = np.where(may_run, prices[:, None] * behind, FAR).min(axis=0)
            paid, needed = left @ prices[self.kinds], self.figures.microbatches * cheapest.sum()
            table[:, cut] = np.where(paid > 0, needed / np.maximum(paid, 1 / FAR), FAR)
        return np.minimum(np.maximum(table, self.rest_s), FAR)

    # --- between stages ---------------------------------------------------------------------------

    def _nearest_s(self) -> tuple[FloatArray, FloatArray]:
        """Return the least message to each option, and those on from it and back, by cut."""
        others = self.held < self.vectors.rows[-1]
        between = others[:, :, None] & (self.held > 0)[:, None, :]
        inner, on_and_back = slice(1, -1), np.swapaxes(self._there_s, 1, 2) + self._back_s
        arrives, leaves = np.zeros((2, len(self.held), len(on_and_back)))
        for option, row in enumerate(between):
            arrives[option, inner] = np.where(row, self._there_s[inner], FAR).min(axis=(1, 2))
            leaves[option, inner] = np.where(row, on_and_back[inner], FAR).min(axis=(1, 2))
        return arrives, leaves

    def _least_ways(
        self, arrives_s: FloatArray, leaves_s: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the least time before each cut, and from it to the end and back.

        Over all ways to cut the layers there into stages that fit some type.

        Args:
            arrives_s: a message on, by cut.
            leaves_s: a message on and one back.
        """
        seconds, fits = self.figures.of_interval, self.figures.fits
        forward = np.where(fits, seconds.forward, np.inf).min(axis=0)
        path = np.where(fits, seconds.forward + seconds.gradient, np.inf).min(axis=0)
        passed, rest = np.zeros((2, len(forward)))
        for cut in range(1, len(passed)):
            passed[cut] = (passed[:cut] + arrives_s[:cut] + forward[:cut, cut]).min()
        for cut in range(len(rest) - 2, -1, -1):
            behind = slice(cut + 1, None)
            rest[cut] = (path[cut, behind] + rest[behind] + leaves_s[behind]).min()
        return np.minimum(passed, FAR), np.minimum(rest, FAR)

    def _at(self, cut: int) -> CutFigures:
        figures, on = self.figures, self.vectors.rows > 0
        sides = on, self.vectors.apart_used, self.vectors.apart_stage
        there, back = _least(self._there_s[cut], *sides), _least(self._back_s[cut].T, *sides)
        flow_there, flow_back, single = self._flows
        all_there = figures.microbatches * figures.sent_bytes[cut] * flow_there
        all_back = figures.microbatches * figures.returned_bytes[cut] * flow_back
        # Of two single devices each message follows the one before, with its latency.
        all_there = np.where(single, np.maximum(all_there, figures.microbatches * there), all_there)
        all_back = np.where(single, np.maximum(all_back, figures.microbatches * back), all_back)
        channel = np.maximum(all_there + back, all_back + there) + self.rest_s[cut]
        return CutFigures(there, back, channel)

    @cached_property
    def _flows(self) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Seconds a byte there and back for pairs of vectors, and which are of single devices."""
        vectors, links = self.vectors, self.links
        used, stage = vectors.rows[vectors.apart_used], vectors.rows[vectors.apart_stage]
        there, back = np.zeros((2, len(used)))
        some = vectors.apart_used > 0
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
        latency_s, s_per_byte = self.links.latency_s[sides], self.links.s_per_byte[sides]
        alone = np.where(bytes_ > 0, latency_s + bytes_ * s_per_byte, 0.0)
        each_s = self._across_s_per_byte[list(sides)]
        there, back = self.figures.microbatches * bytes_ * each_s[:, None]
        most = np.maximum(there + alone[1], back + alone[0])
        return np.asarray(np.minimum(most + self.rest_s[cut], FAR))

    # --- after the last gradient ------------------------------------------------------------------

    @cached_property
    def tails(self) -> StageTails:
        """What remains on a stage itself, if layers run again for nothing."""
        return self._tails(np.zeros_like(self.figures.of_layer.forward))

    @cached_property
    def tails_with_reruns(self) -> StageTails:
        """The same where time of layers that run again in the last backward has been counted."""
        return self._tails(self.figures.of_layer.forward)

    def _tails(self, again_s: FloatArray) -> StageTails:
        """Return the rest of the last backward and the reductions, of which a part overlaps it.

        Args:
            again_s: that each layer takes at most besides in that backward, by type.
        """
        weight_s = self._of_types(np.min, self.figures.of_interval.weight)
        own_s, types = self._own_reduction_s, len(self.figures.types)
        if not self.figures.space.overlap_reduction:
            return StageTails(weight_s + own_s, np.broadcast_to(own_s, (types, *own_s.shape)))
        layer = self.figures.of_layer
        gradient, backward = layer.gradient + again_s, layer.backward + again_s
        slowest = self._of_types(np.max, gradient)
        rows = [
            self._overlapped.left_s(
                partial(self.links.all_reduce_s, held), np.array([slow, *backward]), own
            )
            for held, slow, own in zip(self.held, slowest, own_s, strict=True)
        ]
        left_s = np.moveaxis(np.array(rows), 0, 1)
        return StageTails(np.maximum(weight_s, left_s[0]), left_s[1:])

    @cached_property
    def _own_reduction_s(self) -> FloatArray:
        """All-reduces of a stage's own gradients."""
        own = self.figures.parameters.own_bytes
        return np.array([self.links.all_reduce_s(row, own) for row in self.held])

    @cached_property
    def _overlapped(self) -> OverlappedReductions:
        return OverlappedReductions(self.figures)

    def joint_reduction_s(self, shared: FloatArray) -> FloatArray:
        """Return all-reduces together with another stage or more, after the stage's own.

        Args:
            shared: bytes of each interval.
        """
        if not shared.any():
            return np.zeros_like(self.way_s)
        reduced_s = self.links.reduced_s
        return np.array([reduced_s(row > 0, int(row.sum()) + 1, shared) for row in self.held])


def _least(between: FloatArray, on: BoolArray, first: IntArray, second: IntArray) -> FloatArray:
    """Return the least entry over the classes that two vectors hold, for pairs of vectors."""
    rows = np.where(on[:, :, None], between[None], np.inf).min(axis=1)
    return np.asarray(np.where(on[second], rows[first], np.inf).min(axis=1))
