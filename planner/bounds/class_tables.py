"""What stages take at least on so many devices of each class, in arrays for the compiled pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from planner.bounds.buckets import bucket_table, reduced_after_s
from planner.bounds.devices import DeviceVectors
from planner.bounds.intervals import IntervalTable
from planner.bounds.layers import FAR, BoolArray, FloatArray, IntArray, prefix
from planner.bounds.links import ClassLinks
from planner.bounds.memory import MemoryTable


class ClassArrays(NamedTuple):
    """Figures of stages on O sets of devices (options) of V, with P pairs (used before, option).

    N layers, K types, C classes. Seconds of layers are running sums, so that those of an interval
    are a difference.

    Attributes:
        microbatches: of an iteration.
        used, option, after, way_begin, way_before, way_between, side, is_mixed, begins,
            way_crosses: of :class:`DeviceVectors`.
        sent_bytes, returned_bytes: (N + 1) of a microbatch at each cut.
        way_s: (N + 1) least time from a cut to the end and back.
        crossing: (3, 2, 2) from one of two classes to the other: seconds a byte of everything,
            latency and seconds a byte of one message.
        held: (O, C) devices of each class.
        kind: (C) type of each class.
        has_type: (O, K) whether a type is held.
        forward_s, gradient_s, backward_s: (K, N + 1) running sums.
        fits: (O, N + 1, N + 1) whether the types may run an interval, and a microbatch fits.
        head_s: (O, N + 1) least time before the first forward of a stage.
        ahead_s: (O, N + 1) least way of a microbatch behind a stage and back to it.
        rest_s: (2, V, N + 1) what has to follow a cut at least, by what is used before: of all
            work; of forwards and gradients.
        there_s, back_s: (N + 1, P) messages between two stages, by the pair of their sets.
        busy_s: (N + 1, P) all messages at the cut, with one microbatch on its way home.
        joint_s: (O, N + 1, N + 1) all-reduces together with other stages.
        step_s: (O, N + 1, N + 1) the optimizer step.
        after_gradient_s: (2, O, N + 1, N + 1) what follows a stage's last gradient on the stage;
            with a forward more in the time of each layer that may run again, in the second row.
        after_backward_s: (2, K, O, N + 1, N + 1) the same of its last backward on a type.
        port_s: (C, N + 1, N + 1) a microbatch's messages on the links of a device.
        waits_s: (2, C, N + 1) of :meth:`LayerTable.waits_s`.
        in_flight: (K, L) most microbatches in flight on each level of memory; 0: no level.
        again_s: (K, L, N + 1, N + 1) what a microbatch runs again at least on each level.
        is_tight: (O, N + 1, N + 1) whether memory limits the microbatches in flight.
    """

    microbatches: int
    used: IntArray
    option: IntArray
    after: IntArray
    way_begin: IntArray
    way_before: IntArray
    way_between: IntArray
    side: IntArray
    is_mixed: BoolArray
    begins: BoolArray
    way_crosses: BoolArray
    sent_bytes: FloatArray
    returned_bytes: FloatArray
    way_s: FloatArray
    crossing: FloatArray
    held: IntArray
    kind: IntArray
    has_type: BoolArray
    forward_s: FloatArray
    gradient_s: FloatArray
    backward_s: FloatArray
    fits: BoolArray
    head_s: FloatArray
    ahead_s: FloatArray
    rest_s: FloatArray
    there_s: FloatArray
    back_s: FloatArray
    busy_s: FloatArray
    joint_s: FloatArray
    step_s: FloatArray
    after_gradient_s: FloatArray
    after_backward_s: FloatArray
    port_s: FloatArray
    waits_s: FloatArray
    in_flight: IntArray
    again_s: FloatArray
    is_tight: BoolArray


class ClassTables:
    """Makes the arrays of one problem and one set of classes.

    Args:
        intervals: of the problem's layers.
        links: between the classes.
        vectors: of devices by class.
        kinds: number of each class's type.
    """

    def __init__(
        self,
        intervals: IntervalTable,
        links: ClassLinks,
        vectors: DeviceVectors,
        kinds: Sequence[int],
    ) -> None:
        self.intervals, self.links, self.vectors, self.kinds = intervals, links, vectors, kinds
        self._layers = layers = intervals.layers
        self._there, self._back = map(self._message_s, (layers.sent_bytes, layers.returned_bytes))
        self.held = vectors.rows[vectors.options]
        types = np.arange(len(self._layers.types))
        of_type = np.array(kinds)[:, None] == types[None, :]
        self.has_type = (self.held > 0) @ of_type
        self._forward, self._gradient, self._backward, self._weight = (
            intervals.sums(figure)
            for figure in (layers.forward_s, layers.gradient_s, layers.backward_s, layers.weight_s)
        )

    def arrays(self) -> ClassArrays:
        """Return all arrays."""
        layers, vectors, intervals = self._layers, self.vectors, self.intervals
        arrives, leaves = self._nearest_s()
        passed, way_s = self._least_ways(arrives.min(axis=0), leaves.min(axis=0))
        there, back = self._messages_s()
        reduction = self._of_all(
            lambda held: self.links.all_reduce_s(held, intervals.parameters.own)
        )
        after_gradient, after_backward = self._tails(reduction)
        in_flight, again, tight = self._memory()
        return ClassArrays(
            layers.microbatches,
            vectors.used,
            vectors.option,
            vectors.after,
            vectors.way_begin,
            vectors.way_before,
            vectors.way_between,
            vectors.side,
            vectors.is_mixed,
            vectors.begins,
            vectors.way_crosses,
            layers.sent_bytes,
            layers.returned_bytes,
            way_s,
            self._crossings(),
            self.held,
            np.array(self.kinds),
            self.has_type,
            prefix(layers.forward_s),
            prefix(layers.gradient_s),
            prefix(layers.backward_s),
            self._fits(intervals.fits),
            passed + arrives,
            way_s + leaves,
            np.array(
                [self._rest_s(back, way_s) for back in (layers.backward_s, layers.gradient_s)]
            ),
            there,
            back,
            self._busy_s(there, back) + way_s[:, None],
            self.joint_reduce_s(intervals.parameters.shared),
            self._of_all(self._step_s),
            after_gradient,
            after_backward,
            self._ports_s(),
            self._waits_s(),
            in_flight,
            again,
            tight,
        )

    def _of_all(self, figure: Callable[[IntArray], FloatArray]) -> FloatArray:
        """Return a figure of all intervals for each option."""
        return np.array([figure(row) for row in self.held])

    # --- ways of a microbatch ---------------------------------------------------------------------

    def _message_s(self, bytes_: FloatArray) -> FloatArray:
        """Return the messages between classes (N + 1, C, C); 0 where nothing is sent."""
        size = bytes_[:, None, None]
        seconds = np.minimum(self.links.latency_s + size * self.links.s_per_byte, FAR)
        return np.where(size > 0, seconds, 0.0)

    def _nearest_s(self) -> tuple[FloatArray, FloatArray]:
        """Return the least message to each option, and those on from it and back, by cut."""
        others = self.held < self.vectors.rows[-1]
        between = others[:, :, None] & (self.held > 0)[:, None, :]
        arrives, leaves = np.zeros((2, len(self.held), self.intervals.cuts))
        for cut in range(1, self.intervals.cuts - 1):
            there, back = self._there[cut], self._back[cut]
            arrives[:, cut] = np.where(between, there, FAR).min(axis=(1, 2))
            leaves[:, cut] = np.where(between, there.T + back, FAR).min(axis=(1, 2))
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
        fits, count = self.intervals.fits, self.intervals.cuts
        forward = np.where(fits, self._forward, np.inf).min(axis=0)
        path = np.where(fits, self._forward + self._gradient, np.inf).min(axis=0)
        passed, rest = np.zeros((2, count))
        for cut in range(1, count):
            passed[cut] = (passed[:cut] + arrives_s[:cut] + forward[:cut, cut]).min()
        for cut in range(count - 2, -1, -1):
            behind = slice(cut + 1, None)
            rest[cut] = (path[cut, behind] + rest[behind] + leaves_s[behind]).min()
        return np.minimum(passed, FAR), np.minimum(rest, FAR)

    def _rest_s(self, back_s: FloatArray, way_s: FloatArray) -> FloatArray:
        """Return the longer of a microbatch's way and the work that is left for devices not used.

        Each second of a device has a price by its type. All layers behind a cut together cost at
        least what each costs on its cheapest type, and the devices left pay for it with the seconds
        that they have. Any prices hold; these are the speeds of the types in all these layers.

        Args:
            back_s: that each microbatch takes besides its forward, by type and layer.
            way_s: of a microbatch, by cut.
        """
        layers, each_s = self._layers, self._layers.forward_s + back_s
        left = self.vectors.rows[-1] - self.vectors.rows
        table = np.zeros((len(left), self.intervals.cuts))
        for cut in range(self.intervals.cuts - 1):
            behind, may_run = each_s[:, cut:], layers.may_run[:, cut:]
            prices = 1 / np.maximum(np.where(may_run, behind, 0.0).sum(axis=1), 1 / FAR)
            cheapest = np.where(may_run, prices[:, None] * behind, FAR).min(axis=0)
            paid, needed = left @ prices[self.kinds], layers.microbatches * cheapest.sum()
            table[:, cut] = np.where(paid > 0, needed / np.maximum(paid, 1 / FAR), FAR)
        return np.minimum(np.maximum(table, way_s), FAR)

    # --- between stages ---------------------------------------------------------------------------

    def _pair_rows(self) -> tuple[IntArray, IntArray]:
        rows = self.vectors.rows
        return rows[self.vectors.pair_used], self.held[self.vectors.pair_option]

    def _messages_s(self) -> tuple[FloatArray, FloatArray]:
        """Return messages there and back at each cut, for every pair of sets."""
        count, pairs = self.intervals.cuts, len(self.vectors.pair_used)
        there, back = np.zeros((2, count, pairs))
        first, second = (rows > 0 for rows in self._pair_rows())
        for cut in range(1, count - 1):
            there[cut] = _least(self._there[cut], first, second)
            back[cut] = _least(self._back[cut].T, first, second)
        return there, back

    def _busy_s(self, there: FloatArray, back: FloatArray) -> FloatArray:
        """Return what all messages at each cut take, with one message the other way."""
        flow_there, flow_back, single = self._flows()
        count, layers = self._layers.microbatches, self._layers
        ways = []
        bytes_ = (layers.sent_bytes, layers.returned_bytes)
        for of_cut, flow, message in zip(
            bytes_, (flow_there, flow_back), (there, back), strict=True
        ):
            moved = count * of_cut[:, None] * flow[None, :]
            ways.append(np.where(single, np.maximum(moved, count * message), moved))
        return np.asarray(np.maximum(ways[0] + back, ways[1] + there))

    def _crossings(self) -> FloatArray:
        """Return from one of two classes to the other: seconds a byte of all, and of a message."""
        found = np.zeros((3, 2, 2))
        if len(self.links.sizes) == 2:
            first, second = np.diag(self.links.sizes)
            found[0, 0, 1] = self.links.flow_s_per_byte(first, second)
            found[0, 1, 0] = self.links.flow_s_per_byte(second, first)
            found[1:] = self.links.latency_s, self.links.s_per_byte
        return found

    def _flows(self) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Return seconds a byte there and back for pairs of sets, and which are of two devices."""
        there, back = np.zeros((2, len(self.vectors.pair_used)))
        first, second = self._pair_rows()
        single = (first.sum(axis=1) == 1) & (second.sum(axis=1) == 1)
        for n in np.flatnonzero(first.any(axis=1)):
            there[n] = self.links.flow_s_per_byte(first[n], second[n])
            back[n] = self.links.flow_s_per_byte(second[n], first[n])
        a, b = first.argmax(axis=1), second.argmax(axis=1)
        exclusive = self.links.is_exclusive[a, b] & self.links.is_exclusive[b, a]
        return there, back, single & exclusive

    def _ports_s(self) -> FloatArray:
        sent, returned = self._layers.sent_bytes, self._layers.returned_bytes
        into, out = sent[:, None] + returned[None, :], sent[None, :] + returned[:, None]
        turns = self.links.takes_turns[:, None, None]
        bytes_ = np.where(turns, into + out, np.maximum(into, out))
        port = self.links.port_s_per_byte[:, None, None]
        return np.where(bytes_ > 0, bytes_ * np.minimum(port, FAR), 0.0)

    def _waits_s(self) -> FloatArray:
        each = np.array([self._there, self._back])
        into, out = (np.swapaxes(each.min(axis=side), 1, 2) for side in (2, 3))
        return self._layers.waits_s(into, out)

    # --- stages -----------------------------------------------------------------------------------

    def _fits(self, of_type: BoolArray) -> BoolArray:
        """Return whether all types held by each option may run an interval."""
        foreign = (~of_type).reshape(len(of_type), -1).astype(float)
        lacks = self.has_type.astype(float) @ foreign > 0
        return np.asarray(~lacks.reshape(len(self.held), *of_type.shape[1:]))

    def _step_s(self, held: IntArray) -> FloatArray:
        """Return the optimizer step on the narrowest memory: each device takes its own."""
        layers = self._layers
        names = {layers.types[self.kinds[int(k)]] for k in np.nonzero(held)[0]}
        narrowest = min(layers.cluster.device_types[name].optimizer_gb_per_s for name in names)
        return np.asarray(self.intervals.parameters.step / (narrowest * 1e9))

    def joint_reduce_s(self, shared: FloatArray) -> FloatArray:
        """Return all-reduces of some bytes of each interval together with another stage or more."""
        if not shared.any():
            return np.zeros((len(self.held), *shared.shape))
        reduce_s = self.links.least_reduce_s
        return self._of_all(lambda held: reduce_s(held > 0, int(held.sum()) + 1, shared))

    def _tails(self, reduction: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return what follows a stage's last gradient and last backward on the stage itself."""
        layers, shape = self._layers, reduction.shape
        weight = np.array([self._weight[types].min(axis=0) for types in self.has_type])
        if not layers.space.overlap_reduction:
            after = np.broadcast_to(weight + reduction, (2, *shape))
            both = np.broadcast_to(reduction, (2, len(layers.types), *shape))
            return np.ascontiguousarray(after), np.ascontiguousarray(both)
        after, both = np.zeros((2, *shape)), np.zeros((2, len(layers.types), *shape))
        table = bucket_table(self.intervals)
        for option, held in enumerate(self.held):
            left_s = partial(reduced_after_s, table, self.links.all_reduce_s(held, table.sizes))
            types = np.flatnonzero(self.has_type[option])
            for row, again in enumerate((0.0, layers.forward_s)):
                gradient, backward = layers.gradient_s + again, layers.backward_s + again
                slowest = prefix(gradient[types].max(axis=0))
                left = left_s(slowest, at_once_s=reduction[option])
                after[row, option] = np.maximum(weight[option], left)
                for k in types:
                    passed = prefix(backward[k])
                    both[row, k, option] = left_s(passed, at_once_s=reduction[option])
        return after, both

    def _memory(self) -> tuple[IntArray, FloatArray, BoolArray]:
        levels = MemoryTable(self.intervals).levels
        count, most = self.intervals.cuts, max([1, *map(len, levels)])
        in_flight = np.zeros((len(levels), most), dtype=np.int64)
        again = np.zeros((len(levels), most, count, count))
        tight = np.zeros((len(levels), count, count), dtype=bool)
        for k, rows in enumerate(levels):
            for n, (number, again_s) in enumerate(rows):
                in_flight[k, n], again[k, n] = number, again_s
                tight[k] = again_s > 0
        return in_flight, again, ~self._fits(~tight)


def _least(between: FloatArray, first: BoolArray, second: BoolArray) -> FloatArray:
    """Return the least entry over the classes that two sets have, for pairs of sets.

    Args:
        between: (C, C) of a pair of classes.
        first: (P, C) whether the first set of each pair has a class.
        second: (P, C) whether the second one has it.
    """
    least = np.full(len(first), np.inf)
    for a, b in np.ndindex(*between.shape):
        has_both = first[:, a] & second[:, b]
        least[has_both] = np.minimum(least[has_both], between[a, b])
    return least
