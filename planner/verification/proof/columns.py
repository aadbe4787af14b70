"""What devices with up to two stages can earn, if every layer pays for each microbatch of it.

Each layer gets all microbatches from the devices of any plan. If all layers together pay more than
all devices can earn within a time, each with the best that it may hold, no plan keeps that time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.errors import PipeplanError
from planner.verification.proof.figures import (
    FAR,
    MARGIN,
    BoolArray,
    Figures,
    FloatArray,
    IntArray,
    Seconds,
)
from planner.verification.proof.links import ClassLinks
from planner.verification.proof.terms import Term, fewest
from planner.verification.routes import Routes

MOST_CELLS = 4e6
"""Pairs of stages times numbers of microbatches times kinds of devices that are looked at."""
MOST_STAGES = 2
"""Stages of a device of which all pairs are looked at."""
CHUNK = 20_000
"""Pairs that are looked at at a time."""


def earned_too_little(figures: Figures, prices: FloatArray, time_s: float) -> bool:
    """Return whether devices earn less within a time than all layers pay.

    Args:
        figures: of the layers.
        prices: of a microbatch of each layer.
        time_s: that no plan keeps then.

    Raises:
        PipeplanError: if there are too many stages to look at.
    """
    members = _alike(figures)
    numbers = figures.microbatches if figures.space.replication else 1
    if len(figures.layers) ** 4 / 24 * numbers * len(members) > MOST_CELLS:
        raise PipeplanError(
            f"certificate: pairs of stages of {len(figures.layers)} layers are too many to check, "
            f"for {numbers} microbatches on {len(members)} kinds of devices"
        )
    devices = _Devices(figures, members, time_s * MARGIN)
    earned = sum(n * devices.most_earned(k, prices) for k, n in enumerate(map(len, members)))
    return figures.microbatches * float(prices.sum()) > earned * MARGIN


def _alike(figures: Figures) -> list[list[str]]:
    """Return devices by kind: of one type and joined to the others alike."""
    routes, alike = Routes(figures.cluster), dict[object, list[str]]()
    for device in figures.cluster.devices:
        alike.setdefault((device.type, routes.attachment(device.name)), []).append(device.name)
    return list(alike.values())


class _Way(NamedTuple):
    """One direction of a microbatch's way: its activations onwards, or its gradients back.

    Attributes:
        least_s: (N + 1) before a cut at least, or from it to the end of the iteration.
        message_s: (K, N + 1) a message at a cut.
        seconds: (K, N + 1, N + 1) on a stage.
    """

    least_s: FloatArray
    message_s: FloatArray
    seconds: FloatArray


class _Devices:
    """K kinds of devices, with one stage or two.

    Args:
        figures: of the layers.
        members: devices of each kind.
        limit_s: to keep.
    """

    def __init__(self, figures: Figures, members: list[list[str]], limit_s: float) -> None:
        self._figures, self._limit_s = figures, limit_s
        self._count, self._replication = figures.microbatches, figures.space.replication
        self._links = links = ClassLinks(figures.cluster, members)
        types = [figures.types.index(figures.cluster.type_of(names[0])) for names in members]
        self._seconds = Seconds(*(row[types] for row in figures.of_interval))
        self._fits, self._capacity = figures.fits[types], figures.capacity_bytes[types]
        self._static = figures.parameters.static_bytes
        # A device steps a parameter once, whatever of its layers it holds.
        moved = np.zeros(len(figures.layers))
        for numbers, rows in figures.holders.items():
            stepped = (figures.costs.stepped_bytes(row) for row in rows if row.trainable)
            moved[numbers[0]] += sum(stepped)
        moved /= figures.most_sharers
        step_s = moved / figures.optimizer_bytes_per_s[types, None]
        self._step_s = figures.sums(step_s)
        # Of a port that carries both directions at once the mean of both.
        shares = links.port_s_per_byte * np.where(links.takes_turns, 1.0, 0.5)
        self._port_s = shares[:, None] * (figures.sent_bytes + figures.returned_bytes)
        into_s = links.message_s(figures.sent_bytes).min(axis=1).T
        out_s = links.message_s(figures.returned_bytes).min(axis=2).T
        last_s = float(figures.on_fastest(figures.of_layer.weight)[0] + step_s[:, 0].min())
        forward = np.insert(np.cumsum(figures.on_fastest(figures.of_layer.forward)), 0, 0.0)
        gradient = np.insert(np.cumsum(figures.on_fastest(figures.of_layer.gradient)), 0, 0.0)
        if not self._replication:
            # All microbatches pass every stage: one that does not keep the limit is on no way.
            work = self._count * (self._seconds.forward + self._seconds.backward) + self._step_s
            allowed = self._fits & ((forward + into_s)[:, :, None] + work <= limit_s)
            forward = _least_way(self._seconds.forward, into_s, allowed)
            gradient = _least_way(self._seconds.gradient, out_s, allowed)
        self._onwards = _Way(forward, into_s, self._seconds.forward)
        self._back = _Way(gradient + last_s, out_s, self._seconds.gradient)
        # Time for all messages of a device, by its first cut.
        self._window_s = limit_s - forward - self._back.least_s
        self._replicas = np.full(self._static.shape, 2)
        if self._replication:
            kinds = range(len(members))
            most = [self._most_single(k, self._reduction_s(k), near=True) for k in kinds]
            self._replicas = np.maximum(self._least_replicas(np.array(most)), 2)

    # --- all-reduces ------------------------------------------------------------------------------

    def _reduction_s(self, kind: int) -> FloatArray:
        """Return what follows the last backward of a stage with replicas, at least.

        Tied parameters may be held by the devices of the stage alone, with another stage on them.
        """
        own, shared = self._figures.parameters[:2]
        if not self._replication:
            return np.zeros(own.shape)
        if not self._figures.space.overlap_reduction:
            left = self._all_reduce_s(kind, own)
        else:
            # The gradients of a stage's layers up to any one of them wait for that one's backward,
            # and only the layers before it follow. By begin, that layer's end, and the stage's.
            earlier = self._seconds.backward[kind][:, :-1, None]
            beyond = self._all_reduce_s(kind, own[:, 1:, None]) - earlier
            within = np.arange(1, len(own))[:, None] <= np.arange(len(own))
            left = np.where(within, np.maximum(beyond, 0.0), 0.0).max(axis=1)
        return np.minimum(left + self._all_reduce_s(kind, shared), FAR)

    def _all_reduce_s(self, kind: int, bytes_: FloatArray) -> FloatArray:
        """Return the least all-reduces over the replicas of each interval, one of a kind."""
        kept = np.arange(len(self._links.sizes)) == kind
        replicas = self._replicas if bytes_.ndim == 2 else self._replicas[:, None]
        seconds = np.zeros(np.broadcast_shapes(replicas.shape, bytes_.shape))
        for count in np.unique(replicas).tolist():
            least_s = self._links.reduced_s(kept, count, bytes_)
            seconds = np.where(replicas == count, least_s, seconds)
        return np.where(replicas > self._links.sizes.sum(), FAR, seconds)

    def _least_replicas(self, most: IntArray) -> IntArray:
        """Return how many devices all microbatches of each interval need at least.

        Args:
            most: (K, N + 1, N + 1) microbatches that a device can run.
        """
        left, replicas = np.full(most.shape[1:], self._count), np.zeros(most.shape[1:], dtype=int)
        for kinds in np.argsort(-most, axis=0, kind="stable"):
            each = np.take_along_axis(most, kinds[None], axis=0)[0]
            needed = np.where(each > 0, -(-left // np.maximum(each, 1)), 0)
            used = np.minimum(needed, self._links.sizes[kinds])
            left, replicas = np.maximum(left - used * each, 0), replicas + used
        return np.where(left > 0, int(self._links.sizes.sum()) + 1, np.maximum(replicas, 1))

    # --- what a device can run --------------------------------------------------------------------

    def most_earned(self, kind: int, prices: FloatArray) -> float:
        """Return the most that a device of a kind earns.

        Args:
            kind: of the device.
            prices: of a microbatch of each layer.
        """
        reduction_s = self._reduction_s(kind)
        paid = np.insert(np.cumsum(prices), 0, 0.0)
        single = self._most_single(kind, reduction_s, near=False)
        best = float((single * np.maximum(paid - paid[:, None], 0.0)).max())
        most = self._most_single(kind, reduction_s, near=True)
        pairs = _pairs(len(prices))
        a, b, c, e = pairs.T
        static, fits = self._static, self._fits[kind]
        pairs = pairs[
            fits[a, b] & fits[c, e] & (static[a, b] + static[c, e] <= self._capacity[kind])
        ]
        numbers = np.arange(1 if self._replication else self._count, self._count + 1.0)
        for begin in range(0, len(pairs), CHUNK):
            # Each of a column, for every number of the second stage's microbatches in a row.
            a, b, c, e = cuts = pairs[begin : begin + CHUNK].T[:, :, None]
            first = np.minimum(self._most_of_first(kind, cuts, numbers, reduction_s), most[a, b])
            earned = first * (paid[b] - paid[a]) + numbers * (paid[e] - paid[c])
            can = (first > 0) & (first >= numbers[0]) & (numbers <= most[c, e])
            best = max(best, float(np.where(can, earned, 0.0).max()))
        return best

    def _most_single(self, kind: int, reduction_s: FloatArray, *, near: bool) -> IntArray:
        """Return how many microbatches of each interval a device can run.

        Args:
            kind: of the device.
            reduction_s: after the last of them, unless it runs all.
            near: whether the stages around may be on the same device: no message is needed then.
        """
        head, home = (
            (way.least_s + way.message_s[kind] * (not near))[:, None]
            for way in (self._onwards, self._back)
        )
        work = self._seconds.forward[kind] + self._seconds.backward[kind]
        way = self._seconds.forward[kind] + self._seconds.gradient[kind]
        spare, port = self._limit_s - head - self._step_s[kind], self._port_s[kind]
        messages = Term(self._window_s[:, None], port[:, None] + port)
        terms = [Term(spare, work), Term(self._limit_s - head - home, way)]
        most = fewest(terms if near else [*terms, messages], self._count)
        fewer = fewest([Term(spare - reduction_s, work)], self._count - 1)
        most = np.where(most >= self._count, most, np.minimum(most, fewer))
        least = 1 if self._replication else self._count
        return np.where(self._fits[kind] & (most >= least), most, 0).astype(int)

    def _most_of_first(
        self, kind: int, cuts: IntArray, numbers: FloatArray, reduction_s: FloatArray
    ) -> FloatArray:
        """Return how many microbatches of the first stage fit beside each number of the second.

        For each beginning of the two and each end: the work, or the way, between them.

        Args:
            kind: of the device.
            cuts: first and second stage: begin, end, begin, end; each a column of pairs.
            numbers: of the second stage's microbatches, a row.
            reduction_s: after the last microbatch of a stage, unless it runs all.
        """
        a, b, c, e = cuts
        forward, gradient, backward = (
            (row[kind][a, b], numbers * row[kind][c, e])
            for row in (self._seconds.forward, self._seconds.gradient, self._seconds.backward)
        )
        spare = self._limit_s - self._step_s[kind][a, b] - self._step_s[kind][c, e]
        heads, homes = self._ends(kind, cuts, self._onwards), self._ends(kind, cuts, self._back)
        terms = []
        for head, own in zip(heads, (forward[0], 0.0), strict=True):
            begun = head + forward[1]
            terms.append(Term(spare - begun - backward[1], own + backward[0]))
            for home, again in zip(homes, (gradient[0], 0.0), strict=True):
                room = self._limit_s - begun - home - gradient[1]
                terms.append(Term(room, np.asarray(own + again)))
        most = fewest(terms, self._count)
        reduced = np.minimum(reduction_s[a, b], reduction_s[c, e])
        room = spare - heads[0] - forward[1] - backward[1] - reduced
        fewer = np.minimum(most, fewest([Term(room, forward[0] + backward[0])], self._count - 1))
        most = np.where((most >= self._count) | (numbers >= self._count), most, fewer)
        return np.maximum(np.minimum(most, self._most_carried(kind, cuts, numbers)), 0.0)

    def _ends(self, kind: int, cuts: IntArray, way: _Way) -> tuple[FloatArray, FloatArray]:
        """Return the least times before or after what both stages do, and what the second does.

        A microbatch comes to the second stage over a link or, where the stages adjoin, from the
        first one.
        """
        a, b, c, _ = cuts
        arrival = way.least_s + way.message_s[kind]
        first, second = arrival[a], arrival[c]
        on_device = first + way.seconds[kind][a, c]
        near = np.minimum(second, on_device) if self._replication else on_device
        second = np.minimum(np.where(b == c, near, second), way.least_s[-1])
        return np.minimum(first, second), second

    def _most_carried(self, kind: int, cuts: IntArray, numbers: FloatArray) -> FloatArray:
        """Return the most of the first stage for which the device's port has time; -1: none.

        Where the stages adjoin, what only one of them takes passes between the two.
        """
        window, port = self._window_s[cuts[0]], self._port_s[kind][cuts]
        both = Term(window - numbers * (port[2] + port[3]), port[0] + port[1])
        between = Term(window - numbers * (port[3] - port[2]), port[0] + port[2])
        apart, more = fewest([both], self._count), fewest([between], self._count)
        # With fewer of the first than of the second, each one more may save a message between.
        room, each = window - numbers * (port[3] + port[2]), port[0] - port[2]
        fewer = np.minimum(numbers - 1, fewest([Term(room, np.maximum(each, 0.0))], self._count))
        saving = np.where(room - (numbers - 1) * each >= 0, numbers - 1, -1.0)
        fewer = np.where(each < 0, saving, fewer)
        adjoining = np.where(more >= numbers, more, fewer)
        return np.where(cuts[1] == cuts[2], adjoining, apart)


def _pairs(length: int) -> IntArray:
    """Return all a < b <= c < e: a stage of a device and one further on."""
    begin, end = np.triu_indices(length + 1, 1)
    first, second = np.nonzero(end[:, None] <= begin)
    return np.stack([begin[first], end[first], begin[second], end[second]], axis=1)


def _least_way(seconds: FloatArray, message_s: FloatArray, allowed: BoolArray) -> FloatArray:
    """Return the least time of a way from the first cut to each, by stages that are allowed."""
    sums = np.where(allowed, seconds, np.inf)
    way = np.full(sums.shape[1], np.inf)
    way[0] = 0.0
    for cut in range(len(way) - 1):
        reached = way[cut] + message_s[:, cut, None] + sums[:, cut]
        way = np.minimum(way, reached.min(axis=0))
    return way
