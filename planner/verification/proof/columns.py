"""What devices with several stages can earn, if every layer pays for each microbatch of it.

Each layer gets all microbatches from the devices of any plan. If all layers together pay more than
all devices can earn within a time, each with the best that it may hold, no plan keeps that time.
"""

from __future__ import annotations

import numpy as np

from planner.errors import PipeplanError
from planner.verification.proof.devices import ProvedDevices, least_ways
from planner.verification.proof.layers import FloatArray, IntArray, before_last
from planner.verification.proof.links import FAR
from planner.verification.proof.rules import MARGIN

MOST_CELLS = 4e6
"""Pairs of stages times numbers of microbatches times kinds of devices that are looked at."""
MOST_STAGES = 2
"""Stages of a device of which all pairs are looked at."""
CHUNK = 20_000
"""Pairs that are looked at at a time."""


def earned_too_little(devices: ProvedDevices, prices: FloatArray, time_s: float) -> bool:
    """Return whether devices earn less within a time than all layers pay.

    Args:
        devices: figures by kind.
        prices: of a microbatch of each layer.
        time_s: that no plan keeps then.

    Raises:
        PipeplanError: if there are too many stages to look at.
    """
    paid = devices.layers.microbatches * float(prices.sum())
    limit_s = time_s * MARGIN
    held = _Pairs(devices, prices, limit_s)
    earned = sum(int(count) * held.most_earned(kind) for kind, count in enumerate(devices.counts))
    return paid > earned * MARGIN


def _require_few_pairs(devices: ProvedDevices) -> None:
    """Refuse layers with too many pairs of stages, on each kind and for each number."""
    layers = devices.layers
    numbers = layers.microbatches if layers.space.replication else 1
    cells = len(layers.rows) ** 4 / 24 * numbers * len(devices.counts)
    if cells > MOST_CELLS:
        raise PipeplanError(
            f"certificate: pairs of stages of {len(layers.rows)} layers are too many to check, for "
            f"{numbers} microbatches on {len(devices.counts)} kinds of devices"
        )


def _pairs_of(length: int) -> IntArray:
    """Return all a < b <= c < e: a stage of a device and one further on."""
    begin, end = np.triu_indices(length + 1, 1)
    first, second = np.nonzero(end[:, None] <= begin)
    return np.stack([begin[first], end[first], begin[second], end[second]], axis=1)


class _Pairs:
    """Devices with one stage or two.

    Args:
        devices: figures by kind.
        prices: of a microbatch of each layer.
        limit_s: to keep.
    """

    def __init__(self, devices: ProvedDevices, prices: FloatArray, limit_s: float) -> None:
        self._devices, self._limit_s = devices, limit_s
        self._count = devices.layers.microbatches
        self._replication = devices.layers.space.replication
        self._numbers = np.arange(1 if self._replication else self._count, self._count + 1)
        self._paid = np.concatenate([[0.0], np.cumsum(prices)])
        self._passed_s, self._left_s = least_ways(devices, limit_s)
        # Time for all messages of a device, by its first cut.
        self._window_s = limit_s - self._passed_s - self._left_s
        _require_few_pairs(devices)
        self._pairs = _pairs_of(len(devices.layers.rows))
        self._static = devices.intervals.static_bytes
        self._replicas = np.full(self._static.shape, 2)
        if self._replication:
            kinds = range(len(devices.counts))
            most = [self._most_single(k, self._reduction_s(k), near=True) for k in kinds]
            self._replicas = np.maximum(self._least_replicas(most), 2)

    def _reduction_s(self, kind: int) -> FloatArray:
        """Return what follows the last backward of a stage with replicas, at least.

        Tied parameters may be held by the devices of the stage alone, with another stage on them.
        """
        if not self._replication:
            return np.zeros(self._static.shape)
        devices, replicas = self._devices, self._replicas
        shared = devices.reduction_s(kind, replicas, devices.intervals.shared_gradient_bytes)
        overlaps = devices.layers.space.overlap_reduction
        own = self._overlapped_s(kind) if overlaps else self._own_s(kind)
        return np.minimum(own + shared, FAR)

    def _own_s(self, kind: int, end: slice = slice(None)) -> FloatArray:
        """Return the all-reduces of each interval's own gradients, or of those up to an end."""
        own = self._devices.intervals.own_gradient_bytes[:, end]
        return self._devices.reduction_s(kind, self._replicas, own)

    def _overlapped_s(self, kind: int) -> FloatArray:
        """Return what is left of overlapped all-reduces after the last backward, at least.

        The gradients of a stage's layers up to any one of them wait for that one's backward, and
        only the layers before it follow.
        """
        before, left = before_last(self._devices.backward_s[kind]), np.zeros_like(self._static)
        for end in range(1, len(left)):
            place = slice(end, end + 1)
            beyond = self._own_s(kind, place) - before[:, place]
            left[:, end:] = np.maximum(left[:, end:], beyond[:, end:])
        return left

    def most_earned(self, kind: int) -> float:
        """Return the most that a device of a kind earns."""
        reduction_s = self._reduction_s(kind)
        single = self._most_single(kind, reduction_s, near=False)
        most = self._most_single(kind, reduction_s, near=True)
        paid = self._paid[None, :] - self._paid[:, None]
        best = float((single * np.maximum(paid, 0.0)).max())
        for begin in range(0, len(self._pairs), CHUNK):
            pairs = self._pairs[begin : begin + CHUNK]
            best = max(best, self._most_of_pairs(kind, pairs, most, reduction_s))
        return best

    # --- one stage --------------------------------------------------------------------------------

    def _most_single(self, kind: int, reduction_s: FloatArray, *, near: bool) -> IntArray:
        """Return how many microbatches of each interval a device can run.

        Args:
            kind: of the device.
            reduction_s: after the last of them, unless it runs all.
            near: whether the stages around may be on the same device: no message is needed then.
        """
        devices, count = self._devices, self._count
        head, home = self._passed_s, self._left_s
        if not near:
            head, home = head + devices.into_s[kind], home + devices.out_s[kind]
        work = devices.forward_s[kind] + devices.backward_s[kind]
        way = devices.forward_s[kind] + devices.gradient_s[kind]
        spare = (self._limit_s - head)[:, None] - devices.step_s[kind]
        most = _times(spare, work)
        reduced = np.minimum(_times(spare - reduction_s, work), count - 1)
        most = np.where(most >= count, most, reduced)
        most = np.minimum(most, _times((self._limit_s - head - home)[:, None], way))
        if not near:
            port = devices.port_s[kind]
            most = np.minimum(most, _times(self._window_s[:, None], port[:, None] + port))
        most = np.where(devices.fits[kind], np.clip(most, 0, count), 0)
        least = 0 if self._replication else count
        return np.where(most >= least, most, 0).astype(np.int64)

    def _least_replicas(self, most: list[IntArray]) -> IntArray:
        """Return how many devices all microbatches of each interval need at least."""
        table = np.array(most)
        left = np.full(table.shape[1:], self._count)
        replicas = np.zeros_like(left)
        for rank in range(len(most)):
            kinds = np.argsort(-table, axis=0, kind="stable")[rank]
            each = np.take_along_axis(table, kinds[None], axis=0)[0]
            needed = np.where(each > 0, -(-left // np.maximum(each, 1)), 0)
            used = np.minimum(needed, self._devices.counts[kinds])
            left, replicas = np.maximum(left - used * each, 0), replicas + used
        return np.where(left > 0, int(self._devices.counts.sum()) + 1, np.maximum(replicas, 1))

    # --- two stages -------------------------------------------------------------------------------

    def _most_of_pairs(
        self, kind: int, pairs: IntArray, most: IntArray, reduction_s: FloatArray
    ) -> float:
        """Return the most that a device earns with two stages, of each so many at most."""
        devices, (a, b, c, e) = self._devices, pairs.T
        static = self._static[a, b] + self._static[c, e]
        kept = devices.fits[kind][a, b] & devices.fits[kind][c, e]
        kept &= static <= devices.capacity_bytes[kind]
        if not kept.any():
            return 0.0
        a, b, c, e = pairs[kept].T
        numbers = self._numbers[None, :].astype(float)
        first = self._most_of_first(kind, (a, b, c, e), numbers, reduction_s)
        first = np.minimum(first, most[a, b][:, None])
        first = np.where(first >= self._numbers[0], first, 0.0)
        first = np.where(numbers <= most[c, e][:, None], first, 0.0)
        earned = first * (self._paid[b] - self._paid[a])[:, None]
        earned += numbers * (self._paid[e] - self._paid[c])[:, None]
        return float(np.where(first > 0, earned, 0.0).max())

    def _most_of_first(
        self, kind: int, cuts: tuple[IntArray, ...], numbers: FloatArray, reduction_s: FloatArray
    ) -> FloatArray:
        """Return how many microbatches of the first stage fit beside each number of the second."""
        devices, (a, b, c, e) = self._devices, cuts
        forward, gradient, backward, step = (
            (figure[kind][a, b][:, None], figure[kind][c, e][:, None])
            for figure in (
                devices.forward_s,
                devices.gradient_s,
                devices.backward_s,
                devices.step_s,
            )
        )
        spare = self._limit_s - step[0] - step[1]
        heads, homes = self._ends(kind, cuts)
        all_back = numbers * backward[1]
        most = np.full((len(a), numbers.shape[1]), float(self._count))
        work = forward[0] + backward[0]
        for head, own in zip(heads, (forward[0], 0.0), strict=True):
            begun = head + numbers * forward[1]
            most = np.minimum(most, _times(spare - begun - all_back, own + backward[0]))
            for home, again in zip(homes, (gradient[0], 0.0), strict=True):
                room = self._limit_s - begun - home - numbers * gradient[1]
                most = np.minimum(most, _times(room, own + again))
        reduced = np.minimum(reduction_s[a, b], reduction_s[c, e])[:, None]
        room = spare - np.minimum(*heads) - numbers * forward[1] - all_back - reduced
        fewer = np.minimum(most, np.minimum(_times(room, work), self._count - 1))
        most = np.where((most >= self._count) | (numbers >= self._count), most, fewer)
        return self._carried(kind, cuts, numbers, most)

    def _ends(
        self, kind: int, cuts: tuple[IntArray, ...]
    ) -> tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]:
        """Return the least times before and after what both stages do, and what the second does.

        Backwards come after a whole way forward, forwards before a whole way back. A microbatch
        comes to the second stage over a link or, where the stages adjoin, from the first one.
        """
        devices, (a, b, c, _) = self._devices, cuts
        found = []
        for way, message, seconds in (
            (self._passed_s, devices.into_s[kind], devices.forward_s[kind]),
            (self._left_s, devices.out_s[kind], devices.gradient_s[kind]),
        ):
            first, second = way[a] + message[a], way[c] + message[c]
            on_device = first + seconds[a, c]
            near = np.minimum(second, on_device) if self._replication else on_device
            second = np.minimum(np.where(b == c, near, second), way[-1])
            found.append((np.minimum(first, second)[:, None], second[:, None]))
        return found[0], found[1]

    def _carried(
        self, kind: int, cuts: tuple[IntArray, ...], numbers: FloatArray, most: FloatArray
    ) -> FloatArray:
        """Return the most of the first stage for which the device's port has time; -1: none.

        Where the stages adjoin, what only one of them takes passes between the two.
        """
        window = self._window_s[cuts[0]][:, None]
        at = [self._devices.port_s[kind][cut][:, None] for cut in cuts]
        apart = _times(window - numbers * (at[2] + at[3]), at[0] + at[1])
        more = _times(window - numbers * (at[3] - at[2]), at[0] + at[2])
        # With fewer of the first than of the second, each one more may save a message between.
        room, each = window - numbers * (at[3] + at[2]), at[0] - at[2]
        fewer = np.minimum(numbers - 1, _times(room, np.maximum(each, 0.0)))
        saving = np.where(room - (numbers - 1) * each >= 0, numbers - 1, -1.0)
        fewer = np.where(each < 0, saving, fewer)
        adjoining = np.where(more >= numbers, more, fewer)
        adjoin = (cuts[1] == cuts[2])[:, None]
        return np.asarray(np.minimum(most, np.where(adjoin, adjoining, apart)))


def _times(spare_s: FloatArray, each_s: FloatArray | float) -> FloatArray:
    """Return how many times something fits; any number if it takes nothing."""
    free = np.where(spare_s >= 0, FAR, -1.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fits = np.floor(spare_s / each_s)
    return np.where(each_s > 0, np.minimum(fits, FAR), free)
