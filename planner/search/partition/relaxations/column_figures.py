"""What layers and cuts cost a single device of each kind, for the column relaxation.

Devices are of one kind if they have the same type, the same best links in and out and the same
port. Figures never exceed those of any device of the kind in any plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cluster.link_table import NO_LINK, FloatArray, IntArray, LinkTable, moving_s
from planner.costs.collectives import fewest_steps
from planner.search.partition.chain import Chain
from planner.search.partition.intervals import BoolArray, Intervals, interval_sums

UP, DOWN = 1 + 1e-12, 1 - 1e-12
"""Factors that keep rounding from making a room too small, or a load too large."""


@dataclass(frozen=True)
class DeviceColumn:
    """What one device may hold: each layer for a number of microbatches.

    Attributes:
        kind: of the device.
        first: its first layer.
        taken: microbatches of each layer.
        value: their prices.
    """

    kind: int
    first: int
    taken: FloatArray
    value: float


class ColumnFigures:
    """Figures of one problem.

    Args:
        chain: the layers.
        links: of the cluster.

    Attributes:
        counts: devices of each kind.
        forward_s, gradient_s, backward_s: of a microbatch, kinds x layers; the gradient is the
            part of the backward after which a gradient is sent on.
        step_s: optimizer step, kinds x layers.
        hop_s, back_s: a microbatch into a device at each cut, and its gradient out of it, over
            the best link; kinds x cuts.
        port_s: what both messages at a cut take of a device's port, kinds x cuts.
        fits: whether layers may run on a kind together and fit its memory, kinds x cuts x cuts.
        may_hold: whether a kind may run a layer, kinds x layers.
        shares: numbers of microbatches that a device may take of a stage.
        count: devices of all kinds.
        last_s: least time from the end of the last gradient of all to the iteration's end.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self.chain = chain
        self.microbatches = chain.problem.job.microbatches
        self.replication = chain.problem.job.replication
        members = _kinds(chain, links)
        types = [chain.types[chain.kinds[devices[0]]] for devices in members]
        self.counts = np.array([len(devices) for devices in members])
        self.count = links.count
        self.forward_s = np.array([chain.forward_s(name) for name in types])
        self.gradient_s = np.array([chain.gradient_s(name) for name in types])
        self.backward_s = np.array([chain.backward_s(name) for name in types])
        self.step_s = np.array([_step_s(chain, name) for name in types])
        self.hop_s, self.back_s = _hops_s(chain, links, members)
        self.port_s = np.array([_port_s(chain, links, int(devices[0])) for devices in members])
        self._reductions = _Reductions(links, members)
        self._last_s = np.array([interval_sums(chain.last_backward_s(name)) for name in types])
        self.fits = _fits(chain, types)
        layers = np.arange(chain.length)
        self.may_hold = self.fits[:, layers, layers + 1]
        least = 1 if self.replication else self.microbatches
        self.shares = np.arange(least, self.microbatches + 1)
        weight_s = min(float(chain.weight_s(name)[0]) for name in types)
        self.last_s = weight_s + float(self.step_s[:, 0].min())

    @property
    def kinds(self) -> int:
        """How many kinds there are."""
        return len(self.counts)

    @property
    def length(self) -> int:
        """How many layers there are."""
        return self.chain.length

    def reduction_s(
        self, kind: int, begin: IntArray, end: IntArray, replicas: IntArray
    ) -> FloatArray:
        """Return how long a device of a kind reduces a stage's gradients after its last backward.

        Parameters tied to layers outside the stage may be held by its own devices alone. Where
        reductions overlap with backwards, they begin at the earliest when the last backward has
        run the stage's last layer (:func:`planner.search.partition.intervals.exposed_s`); tied
        parameters wait for its end.

        Args:
            kind: of the device.
            begin: the cut before each stage.
            end: the cut after it.
            replicas: of each stage, at least.
        """
        inside = interval_sums(self.chain.gradient_bytes)[begin, end]
        apart = np.zeros(len(begin))
        for layers, bytes_ in self.chain.tied_parameters.items():
            held = np.sum([(begin <= layer) & (layer < end) for layer in layers], axis=0)
            within, among = self.chain.reduced_tied_bytes(held, layers, bytes_)
            inside, apart = inside + within, apart + among
        inside_s = self._reductions.least_s(kind, replicas, inside)
        if self.chain.problem.job.overlap_reduction:
            inside_s = np.maximum(inside_s - self._last_s[kind, begin, end - 1], 0.0)
        return inside_s + self._reductions.least_s(kind, replicas, apart)


class _Reductions:
    """The least times of all-reduces in which a device of a kind takes part."""

    def __init__(self, links: LinkTable, members: Sequence[IntArray]) -> None:
        replicas = np.arange(2, links.count + 1)
        share = 2 * (replicas - 1) / replicas
        steps = np.array([fewest_steps(int(count)) for count in replicas])
        never = np.inf
        self._start_s = np.array([0.0, 0.0, *(steps * links.least_latency_s), never])
        rows = [np.maximum(links.joint_s_per_byte[2:], _own_s(links, d[0])) for d in members]
        each = [np.minimum(share * row, NO_LINK) for row in rows]
        self._s_per_byte = np.array([[0.0, 0.0, *row, never] for row in each])

    def least_s(self, kind: int, replicas: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the seconds among so many devices; none for nothing, infinite for too many."""
        with np.errstate(invalid="ignore"):
            seconds = self._start_s[replicas] + bytes_ * self._s_per_byte[kind, replicas]
        return np.where(bytes_ > 0, seconds, 0.0)


def _own_s(links: LinkTable, device: int) -> float:
    """Return the least seconds a byte of a device that sends and receives as much."""
    port = links.ports[device]
    both_s = 2 * port.s_per_byte if port.is_half_duplex else 0.0
    return max(links.least_s_per_byte_from(int(device)), both_s)


class Heads:
    """The least times before a device's first operation and after its last gradient.

    Without replicas every stage on the way has all microbatches, so one that does not keep the
    limit is left out, and each of the others costs a hop. Neighbouring stages of one device count
    as one, which costs none.

    Args:
        figures: of layers and cuts.
        limit_s: on the iteration time.

    Attributes:
        arrival_s: of the first microbatch at each cut, on each kind; kinds x cuts.
        home_s: the way of a gradient from each cut to the end of the iteration, kinds x cuts.
        passed_s, left_s: the same before the message into the device, and after the one out of it;
            by cut.
    """

    def __init__(self, figures: ColumnFigures, limit_s: float) -> None:
        self._figures = figures
        allowed = None if figures.replication else self._allowed(limit_s)
        self.passed_s, self.arrival_s = self._way_s(figures.forward_s, figures.hop_s, allowed)
        left_s, home_s = self._way_s(figures.gradient_s, figures.back_s, allowed)
        self.left_s, self.home_s = left_s + figures.last_s, home_s + figures.last_s

    def _allowed(self, limit_s: float) -> BoolArray:
        """Return which stages keep the limit, kinds x cuts x cuts."""
        figures = self._figures
        work = figures.microbatches * (figures.forward_s + figures.backward_s) + figures.step_s
        before_s = np.concatenate([[0.0], np.cumsum(figures.forward_s.min(axis=0))])[:-1]
        arrival_s = before_s + figures.hop_s[:, :-1]
        sums = np.array([interval_sums(row)[:-1] for row in work])
        return np.asarray(figures.fits & (arrival_s[:, :, None] + sums <= limit_s))

    def _way_s(
        self, per_layer: FloatArray, hop_s: FloatArray, allowed: BoolArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Return the least time to pass the layers before each cut, without and with the hop."""
        if allowed is None:
            passed_s = np.concatenate([[0.0], np.cumsum(per_layer.min(axis=0))])
            hopped_s = passed_s + hop_s
            # Replicas elsewhere may run the earlier layers of some microbatch.
            return passed_s, np.minimum.accumulate(hopped_s[:, ::-1], axis=1)[:, ::-1]
        passed_s = np.full(per_layer.shape[1] + 1, np.inf)
        passed_s[0] = 0.0
        sums = np.array([interval_sums(row) for row in per_layer])
        for cut in range(per_layer.shape[1]):
            if np.isfinite(passed_s[cut]):
                begun_s = passed_s[cut] + hop_s[:, cut]
                ends_s = np.where(allowed[:, cut], begun_s[:, None] + sums[:, cut], np.inf)
                np.minimum(passed_s, ends_s.min(axis=0), out=passed_s)
        return passed_s, passed_s + hop_s


def _kinds(chain: Chain, links: LinkTable) -> list[IntArray]:
    """Return the devices of each kind, by number."""
    found: dict[object, list[int]] = {}
    for number, kind in enumerate(chain.kinds):
        alone = np.array([number])
        into_s, out_s = links.least_s_per_byte_to(alone), links.least_s_per_byte_from(number)
        found.setdefault((kind, into_s, out_s, links.ports[number]), []).append(number)
    return [np.array(devices) for devices in found.values()]


def _step_s(chain: Chain, name: str) -> FloatArray:
    width = chain.problem.cluster.device_types[name].optimizer_gb_per_s * 1e9
    return np.asarray(chain.optimizer_traffic_bytes / width)


def _hops_s(
    chain: Chain, links: LinkTable, members: Sequence[IntArray]
) -> tuple[FloatArray, FloatArray]:
    """Return activations into each kind and gradients out of it, at every cut."""
    there, back = crossing_bytes(chain)
    latency_s = links.least_latency_s
    into = [moving_s(there, latency_s, links.least_s_per_byte_to(devices)) for devices in members]
    out = [
        moving_s(back, latency_s, links.least_s_per_byte_from(int(devices[0])))
        for devices in members
    ]
    return np.array(into), np.array(out)


def crossing_bytes(chain: Chain) -> tuple[FloatArray, FloatArray]:
    """Return activations there and gradients back at every cut, nothing at the ends."""
    rows = (chain.cut_bytes.astype(float), chain.cut_gradient_bytes.astype(float))
    for row in rows:
        row[0] = row[-1] = 0.0
    return rows


def _port_s(chain: Chain, links: LinkTable, device: int) -> FloatArray:
    """Return the seconds of a port that the messages at each cut take.

    Of a full duplex port half of both directions together: neither takes less than that.
    """
    port, (there, back) = links.ports[device], crossing_bytes(chain)
    share = 1.0 if port.is_half_duplex else 0.5
    return (there + back) * share * min(port.s_per_byte, NO_LINK)


def _fits(chain: Chain, types: Sequence[str]) -> BoolArray:
    intervals = Intervals(chain)
    unit = np.eye(len(chain.types), dtype=int)
    of_type = [intervals.fits(tuple(int(n) for n in row), are_all=False) for row in unit]
    return np.array([of_type[chain.types.index(name)] for name in types])
