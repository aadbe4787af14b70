"""What single devices can do within a time, where each may hold several stages.

Every layer pays a price for each microbatch of it. If all layers pay more than all devices can earn
within a time, each with the best stages that it may hold, no plan keeps that time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.bounds.class_pass import times_within
from planner.bounds.classes import MARGIN
from planner.bounds.intervals import IntervalTable
from planner.bounds.layers import FAR, BoolArray, FloatArray, IntArray, LayerTable, prefix
from planner.bounds.links import ClassLinks
from planner.bounds.prices import LayerMaster
from planner.errors import PipeplanError
from planner.plan.certificate import LayerPrices
from planner.program.compiled import compiled, entry

MOST_ROUNDS = 60
"""Rounds of new columns for one time."""
SAME = 1e-9
"""A column is new if it earns that much more."""
MOST_STAGES, MOST_PAIR_CELLS = 2, 4e6
"""Stages of a device, and states that are gone through to price the columns of all kinds once."""


class DeviceArrays(NamedTuple):
    """Figures of devices of H kinds: of one type and joined to the others alike; N layers.

    Attributes:
        microbatches: of an iteration.
        replication: whether a stage may have several devices.
        counts: (H) devices.
        forward_s, gradient_s, backward_s, step_s: (H, N + 1) running sums; the step counts a
            parameter at the first layer that uses it.
        into_s, out_s: (H, N + 1) a message into a device at each cut, and its gradient back.
        port_s: (H, N + 1) what both take of the device's port; of two directions the mean.
        fits: (H, N + 1, N + 1) whether a kind may hold an interval.
        static_bytes: (N + 1, N + 1) of weights, gradients and optimizer state.
        capacity_bytes: (H) of memory.
        last_s: what follows the last gradient of all.
    """

    microbatches: int
    replication: bool
    counts: IntArray
    forward_s: FloatArray
    gradient_s: FloatArray
    backward_s: FloatArray
    step_s: FloatArray
    into_s: FloatArray
    out_s: FloatArray
    port_s: FloatArray
    fits: BoolArray
    static_bytes: FloatArray
    capacity_bytes: FloatArray
    last_s: float


class DeviceTable:
    """Makes the arrays of devices.

    Args:
        intervals: of the problem's layers.
    """

    def __init__(self, intervals: IntervalTable) -> None:
        self.intervals, layers = intervals, intervals.layers
        alike: dict[object, list[str]] = {}
        for device in layers.cluster.devices:
            key = device.type, layers.cluster.attachment(device.name)
            alike.setdefault(key, []).append(device.name)
        members = list(alike.values())
        self._types = [layers.types.index(layers.cluster.type_of(row[0])) for row in members]
        self._links = ClassLinks(layers.cluster, members)
        self.arrays = self._arrays(layers, np.array([len(row) for row in members]))

    def _arrays(self, layers: LayerTable, counts: IntArray) -> DeviceArrays:
        kinds = [layers.cluster.device_types[layers.types[k]] for k in self._types]
        width = np.array([kind.optimizer_gb_per_s for kind in kinds])
        # The step of layers 0 to j - 1 counts each parameter once, at the first that uses it.
        step_s = np.diff(self.intervals.parameters.step[0]) / (width[:, None] * 1e9)
        links = self._links
        both = layers.sent_bytes + layers.returned_bytes
        each = np.minimum(links.port_s_per_byte, FAR) * np.where(links.takes_turns, 1.0, 0.5)
        return DeviceArrays(
            layers.microbatches,
            layers.space.replication,
            counts,
            prefix(layers.forward_s[self._types]),
            prefix(layers.gradient_s[self._types]),
            prefix(layers.backward_s[self._types]),
            prefix(step_s),
            self._message_s(layers.sent_bytes, links.latency_s, links.s_per_byte),
            self._message_s(layers.returned_bytes, links.latency_s.T, links.s_per_byte.T),
            each[:, None] * both[None, :],
            np.ascontiguousarray(self.intervals.fits[self._types]),
            self.intervals.parameters.static,
            np.array([float(kind.capacity_bytes) for kind in kinds]),
            float(layers.fastest(layers.weight_s)[0] + step_s[:, 0].min()),
        )

    @staticmethod
    def _message_s(bytes_: FloatArray, latency_s: FloatArray, s_per_byte: FloatArray) -> FloatArray:
        """Return the least message to each kind from any, by cut; 0 where nothing is sent."""
        each = latency_s.min(axis=0)[:, None] + bytes_[None, :] * s_per_byte.min(axis=0)[:, None]
        return np.where(bytes_ > 0, np.minimum(each, FAR), 0.0)

    # --- ways of a microbatch ---------------------------------------------------------------------

    def ways_s(self, limit_s: float) -> tuple[FloatArray, FloatArray]:
        """Return the least times before a device's first operation and after its last gradient.

        Without replicas all microbatches pass every stage: one that does not keep the limit is on
        no way, and every stage costs a message. Stages that adjoin on one device count as one.

        Returns:
            (N + 1) of a microbatch that has been through the layers before each cut, and of a
            gradient from each cut on to the end of the iteration.
        """
        d, layers = self.arrays, self.intervals.layers
        if d.replication:
            passed, left = (
                prefix(layers.fastest(figure)) for figure in (layers.forward_s, layers.gradient_s)
            )
        else:
            allowed = self._allowed(limit_s)
            passed = self._way(d.forward_s, d.into_s, allowed)
            left = self._way(d.gradient_s, d.out_s, allowed)
        return passed, left + d.last_s

    def _allowed(self, limit_s: float) -> BoolArray:
        d, layers = self.arrays, self.intervals.layers
        work = d.microbatches * (d.forward_s + d.backward_s) + d.step_s
        before = prefix(layers.fastest(layers.forward_s)) + d.into_s
        took = before[:, :, None] + (work[:, None, :] - work[:, :, None])
        return np.asarray(d.fits & (took <= limit_s))

    def _way(self, figure: FloatArray, message_s: FloatArray, allowed: BoolArray) -> FloatArray:
        sums = np.where(allowed, figure[:, None, :] - figure[:, :, None], np.inf)
        way = np.full(sums.shape[1], np.inf)
        way[0] = 0.0
        for cut in range(len(way) - 1):
            reached = way[cut] + message_s[:, cut, None] + sums[:, cut]
            way = np.minimum(way, reached.min(axis=0))
        return way

    # --- all-reduces ------------------------------------------------------------------------------

    def reductions_s(self, replicas: IntArray) -> FloatArray:
        """Return what follows the last backward of stages with so many replicas at least.

        Tied parameters may be held by the devices of the stage alone, with another stage on them.

        Args:
            replicas: (N + 1, N + 1) of each interval.

        Returns:
            (H, N + 1, N + 1) seconds; 0 for all where there are no replicas.
        """
        d, parameters = self.arrays, self.intervals.parameters
        if not d.replication:
            return np.zeros((len(d.counts), *replicas.shape))
        rows = []
        for kind in range(len(d.counts)):
            if self.intervals.layers.space.overlap_reduction:
                own = self._left_s(kind, replicas)
            else:
                own = self._reduce_s(kind, replicas, parameters.own)
            shared = self._reduce_s(kind, replicas, parameters.shared)
            rows.append(np.minimum(own + shared, FAR))
        return np.array(rows)

    def _reduce_s(self, kind: int, replicas: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least all-reduces over so many devices, at least two, of which one is known.

        Args:
            kind: of the one.
            replicas: of each stage; more than there are never end.
            bytes_: that each reduces.
        """
        kept = np.arange(len(self.arrays.counts)) == kind
        seconds = np.zeros(np.broadcast_shapes(replicas.shape, bytes_.shape))
        for count in np.unique(replicas).tolist():
            least_s = self._links.least_reduce_s(kept, count, bytes_)
            seconds = np.where(replicas == count, least_s, seconds)
        return np.where(replicas > self.arrays.counts.sum(), FAR, seconds)

    def _left_s(self, kind: int, replicas: IntArray) -> FloatArray:
        """Return what is left of overlapped all-reduces after the last backward, at least.

        The gradients of a stage's layers up to any one of them wait for that one's backward, and
        only the layers before it follow.
        """
        own, backward_s = self.intervals.parameters.own, self.arrays.backward_s[kind]
        ahead = np.maximum(backward_s[:-1] - backward_s[:, None], 0.0)
        # By the stage's begin, the end of the layers that are reduced, and the stage's end.
        beyond = self._reduce_s(kind, replicas[:, None], own[:, 1:, None]) - ahead[:, :, None]
        within = np.arange(1, len(own))[:, None] <= np.arange(len(own))
        return np.asarray(np.where(within, np.maximum(beyond, 0.0), 0.0).max(axis=1))


def most_single(
    table: DeviceTable, limit_s: float, reduction_s: FloatArray, near: bool
) -> IntArray:
    """Return how many microbatches of each interval a device of each kind can run.

    Args:
        table: of the devices.
        limit_s: to keep.
        reduction_s: (H, N + 1, N + 1) after the last of them, unless it runs all.
        near: whether the stages around may be on the same device: no message is needed then.
    """
    d, (passed, left) = table.arrays, table.ways_s(limit_s)
    head, home = (
        np.broadcast_to(way if near else way + message, message.shape)[:, :, None]
        for way, message in ((passed, d.into_s), (left, d.out_s))
    )
    forward, gradient, backward, step = (
        figure[:, None, :] - figure[:, :, None]
        for figure in (d.forward_s, d.gradient_s, d.backward_s, d.step_s)
    )
    spare = limit_s - head - step
    most = _times_within(spare, forward + backward)
    reduced = _times_within(spare - reduction_s, forward + backward)
    most = np.where(most < d.microbatches, np.minimum(reduced, d.microbatches - 1), most)
    most = np.minimum(most, _times_within(limit_s - head - home, forward + gradient))
    if not near:
        window, ports = limit_s - passed - left, d.port_s[:, :, None] + d.port_s[:, None, :]
        most = np.minimum(most, _times_within(window[:, None], ports))
    most = np.clip(most, 0, d.microbatches)
    may_run = d.fits & (d.replication | (most >= d.microbatches))
    return np.where(may_run, most, 0).astype(np.int64)


def _times_within(spare_s: FloatArray, each_s: FloatArray) -> FloatArray:
    """Return :func:`times_within` of each entry."""
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.floor(spare_s / each_s)
    return np.asarray(np.where(each_s > 0, times, np.where(spare_s >= 0, np.inf, -1.0)))


def least_replicas(most: IntArray, counts: IntArray, microbatches: int) -> IntArray:
    """Return how many devices all microbatches of each interval need at least."""
    left = np.full(most.shape[1:], microbatches)
    replicas = np.zeros_like(left)
    order = np.argsort(-most, axis=0, kind="stable")
    for kinds in order:
        each = np.take_along_axis(most, kinds[None], axis=0)[0]
        needed = np.where(each > 0, -(-left // np.maximum(each, 1)), 0)
        used = np.minimum(needed, counts[kinds])
        left, replicas = np.maximum(left - used * each, 0), replicas + used
    return np.where(left > 0, int(counts.sum()) + 1, np.maximum(replicas, 1))


class Pairs:
    """Devices with one stage or two, within a time.

    Args:
        table: of the devices.
        limit_s: to keep.
    """

    def __init__(self, table: DeviceTable, limit_s: float) -> None:
        d = table.arrays
        self._table, self._limit_s = table, limit_s
        replicas = np.full(d.static_bytes.shape, 2)
        if d.replication:
            most = most_single(table, limit_s, table.reductions_s(replicas), near=True)
            replicas = np.maximum(least_replicas(most, d.counts, d.microbatches), 2)
        self._reduction_s = table.reductions_s(replicas)
        self._single = most_single(table, limit_s, self._reduction_s, near=False)
        self._most = most_single(table, limit_s, self._reduction_s, near=True)
        self._passed_s, self._left_s = table.ways_s(limit_s)

    def best(self, kind: int, prices: FloatArray) -> list[FloatArray]:
        """Return microbatches of each layer with which a device earns most, by its first layer."""
        found = _best_pairs(
            self._table.arrays,
            kind,
            self._limit_s,
            self._passed_s,
            self._left_s,
            self._single[kind],
            self._most[kind],
            self._reduction_s[kind],
            prefix(prices),
        )
        columns = []
        for a, b, c, e, first, second in found[found[:, 1] > 0].tolist():
            taken = np.zeros(len(prices))
            taken[a:b] += first
            taken[c:e] += second
            columns.append(taken)
        return columns


@entry
def _best_pairs(
    d: DeviceArrays,
    k: int,
    limit_s: float,
    passed_s: FloatArray,
    left_s: FloatArray,
    single: IntArray,
    most: IntArray,
    reduction_s: FloatArray,
    paid: FloatArray,
) -> IntArray:
    """Return the best two stages by the first layer, each with its microbatches; zeros: none."""
    cuts = len(passed_s)
    found = np.zeros((cuts, 6), dtype=np.int64)
    least = 1 if d.replication else d.microbatches
    for a in range(cuts):
        best = 0.0
        for b in range(a + 1, cuts):
            value = single[a, b] * (paid[b] - paid[a])
            if value > best:
                best = value
                found[a] = (a, b, 0, 0, single[a, b], 0)
            if most[a, b] < least:
                continue
            for c in range(b, cuts):
                for e in range(c + 1, cuts):
                    static = d.static_bytes[a, b] + d.static_bytes[c, e]
                    if static > d.capacity_bytes[k] or most[c, e] < least:
                        continue
                    upper = most[a, b] * (paid[b] - paid[a]) + most[c, e] * (paid[e] - paid[c])
                    if upper <= best:
                        continue
                    for second in range(least, most[c, e] + 1):
                        upper = most[a, b] * (paid[b] - paid[a]) + second * (paid[e] - paid[c])
                        if upper <= best:
                            continue
                        first = _most_beside(
                            d, k, limit_s, passed_s, left_s, reduction_s, (a, b, c, e), second
                        )
                        first = min(first, float(most[a, b]))
                        value = first * (paid[b] - paid[a]) + second * (paid[e] - paid[c])
                        if first >= least and value > best:
                            best = value
                            found[a] = (a, b, c, e, int(first), second)
    return found


@compiled
def _most_beside(
    d: DeviceArrays,
    k: int,
    limit_s: float,
    passed_s: FloatArray,
    left_s: FloatArray,
    reduction_s: FloatArray,
    at: tuple[int, int, int, int],
    n: int,
) -> float:
    """Return how many microbatches of a device's first stage fit beside so many of the second.

    For every beginning x and end y of the two, the forwards from x on and the gradients from y on
    fit between the first arrival at x and the last way home from y. Backwards come after a whole
    way forward, forwards before a whole way back. A microbatch comes to the second stage over a
    link or, where the stages adjoin, from the first one.
    """
    a, b, c, e = at
    f1, f2 = d.forward_s[k, b] - d.forward_s[k, a], d.forward_s[k, e] - d.forward_s[k, c]
    g1, g2 = d.gradient_s[k, b] - d.gradient_s[k, a], d.gradient_s[k, e] - d.gradient_s[k, c]
    b1, b2 = d.backward_s[k, b] - d.backward_s[k, a], d.backward_s[k, e] - d.backward_s[k, c]
    step = d.step_s[k, b] - d.step_s[k, a] + d.step_s[k, e] - d.step_s[k, c]
    spare, count = limit_s - step, float(d.microbatches)
    adjoin = b == c
    head1, head2 = passed_s[a] + d.into_s[k, a], passed_s[c] + d.into_s[k, c]
    home1, home2 = left_s[a] + d.out_s[k, a], left_s[c] + d.out_s[k, c]
    if adjoin:
        on_device, on_back = head1 + f1, home1 + g1
        head2 = min(head2, on_device) if d.replication else on_device
        home2 = min(home2, on_back) if d.replication else on_back
    head2, home2 = min(head2, passed_s[-1]), min(home2, left_s[-1])
    head1, home1 = min(head1, head2), min(home1, home2)
    most = count
    for x in range(2):
        begun = (head1 if x == 0 else head2) + n * f2
        own = f1 if x == 0 else 0.0
        most = min(most, times_within(spare - begun - n * b2, own + b1))
        for y in range(2):
            home, again = (home1, g1) if y == 0 else (home2, 0.0)
            most = min(most, times_within(limit_s - begun - home - n * g2, own + again))
    if most < count and n < count:
        reduced = min(reduction_s[a, b], reduction_s[c, e])
        room = spare - min(head1, head2) - n * f2 - n * b2 - reduced
        most = min(most, times_within(room, f1 + b1), count - 1)
    window = limit_s - passed_s[a] - left_s[a]
    p0, p1, p2, p3 = d.port_s[k, a], d.port_s[k, b], d.port_s[k, c], d.port_s[k, e]
    if not adjoin:
        return min(most, times_within(window - n * (p2 + p3), p0 + p1))
    # What only one of two stages that adjoin takes passes between this device and others.
    more = times_within(window - n * (p3 - p2), p0 + p2)
    if more >= n:
        return min(most, more)
    room, each = window - n * (p3 + p2), p0 - p2
    if each < 0:
        # With fewer of the first than of the second, each one more may save a message.
        return min(most, n - 1.0 if room - (n - 1) * each >= 0 else -1.0)
    return min(most, n - 1.0, times_within(room, each))


class Columns:
    """Whether devices with up to two stages earn less than all layers pay within a time.

    Args:
        intervals: of the problem's layers.

    Attributes:
        looked_at: pairs of stages that have been priced so far.

    Raises:
        PipeplanError: if devices may hold more stages, or there are too many pairs.
    """

    def __init__(self, intervals: IntervalTable) -> None:
        self._table, self._count = DeviceTable(intervals), intervals.layers.count
        d, self.looked_at = self._table.arrays, 0.0
        numbers = d.microbatches if d.replication else 1
        self._cells = self._count**4 / 24 * numbers * len(d.counts)
        stages = intervals.layers.space.max_stages_per_device
        if stages != MOST_STAGES or self._cells > MOST_PAIR_CELLS:
            raise PipeplanError(f"bounds: {self._cells:.2g} sets of {stages} stages are too many")

    def refute(self, time_s: float) -> LayerPrices | None:
        """Return prices of layers by which no plan keeps a time, if there are any."""
        arrays, kinds = self._table.arrays, range(len(self._table.arrays.counts))
        pairs = Pairs(self._table, time_s * MARGIN)
        master = LayerMaster(arrays.counts, self._count, arrays.microbatches)
        for _ in range(MOST_ROUNDS):
            prices = master.prices()
            if prices is None:
                return None
            self.looked_at += self._cells
            found = [pairs.best(kind, prices) for kind in kinds]
            most = [max((float(c @ prices) for c in row), default=0.0) for row in found]
            earned = sum(int(n) * value for n, value in zip(arrays.counts, most, strict=True))
            if arrays.microbatches * float(prices.sum()) > earned * MARGIN:
                return LayerPrices(prices=tuple(map(float, prices)))
            known = [master.earned(kind) + SAME for kind in kinds]
            new = [[c for c in row if c @ prices > known[kind]] for kind, row in enumerate(found)]
            if not any(new):
                return None
            for kind, row in enumerate(new):
                master.add(kind, row)
        return None
