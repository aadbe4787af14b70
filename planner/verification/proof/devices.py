"""What a single device takes at least, where devices may hold several stages each."""

from __future__ import annotations

import math

import numpy as np

from planner.verification.proof.layers import (
    BoolArray,
    FloatArray,
    IntArray,
    ProvedIntervals,
    ProvedLayers,
)
from planner.verification.proof.links import FAR, ClassLinks, reduced_s
from planner.verification.routes import Routes


class ProvedDevices:
    """Least figures of devices by kind: of one type and joined to the others alike.

    Args:
        intervals: of the problem's layers.

    Attributes:
        intervals, layers: of the problem.
        counts: devices of each kind.
        capacity_bytes: that a plan may use of a device of each kind.
        forward_s, gradient_s, backward_s, step_s: by kind and interval; a step counts a parameter
            at the first layer that holds it.
        into_s, out_s: a message into a device of each kind at each cut, and its gradient back.
        port_s: what both take of the device's port; of two directions the mean.
        fits: whether a kind may hold an interval of layers.
        last_s: what follows the last gradient of all.
    """

    def __init__(self, intervals: ProvedIntervals) -> None:
        self.intervals = intervals
        self.layers = layers = intervals.layers
        members = _kinds(layers)
        self.counts = np.array([len(names) for names in members])
        types = [layers.types.index(layers.cluster.type_of(names[0])) for names in members]
        self.capacity_bytes = [layers.costs.capacity_bytes(layers.types[k]) for k in types]
        self.forward_s, self.gradient_s = intervals.forward_s[types], intervals.gradient_s[types]
        self.backward_s, self.fits = intervals.backward_s[types], intervals.fits[types]
        step_s = _step_bytes(layers) / layers.optimizer_bytes_per_s[types, None]
        self.step_s = intervals.sums(step_s)
        self.last_s = float(layers.on_fastest(layers.weight_s)[0] + step_s[:, 0].min())
        self._links = links = ClassLinks(layers.cluster, members)
        self.into_s = links.message_s(layers.sent_bytes).min(axis=1).T
        self.out_s = links.message_s(layers.returned_bytes).min(axis=2).T
        shares = links.port_s_per_byte * np.where(links.takes_turns, 1.0, 0.5)
        self.port_s = shares[:, None] * (layers.sent_bytes + layers.returned_bytes)
        # Latency and seconds a byte of the worst link of a device of a kind and so many in all.
        total = int(self.counts.sum())
        self._joining = np.zeros((len(self.counts), total + 1, 2))
        for kind in range(len(self.counts)):
            self._joining[kind, 2:] = [links.joining([kind], n) for n in range(2, total + 1)]

    def reduction_s(self, kind: int, replicas: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least all-reduces of gradients of all intervals over so many devices.

        Args:
            kind: of one of the devices.
            replicas: by interval, at least; one reduces nothing, more than there are never end.
            bytes_: by interval.
        """
        total = int(self.counts.sum())
        counted = np.clip(replicas, 2, max(total, 2))
        joint = self._joining[kind][np.minimum(counted, total)]
        seconds = np.maximum(
            reduced_s(counted, bytes_, joint[..., 0], joint[..., 1]),
            reduced_s(counted, bytes_, *self._links.alone(kind)),
        )
        seconds = np.where((bytes_ > 0) & (replicas > 1), np.minimum(seconds, FAR), 0.0)
        return np.where(replicas > total, FAR, seconds)


def _step_bytes(layers: ProvedLayers) -> FloatArray:
    """Return what the optimizer steps of a device move, by the first layer of a parameter."""
    parameters = {row.name: row for row in layers.graph.parameters if row.trainable}
    moved = np.zeros(len(layers.rows))
    for numbers, names in layers.holders.items():
        trained = [parameters[name] for name in names if name in parameters]
        moved[numbers[0]] += sum(map(layers.costs.stepped_bytes, trained))
    return moved / layers.most_sharers


def _kinds(layers: ProvedLayers) -> list[list[str]]:
    routes = Routes(layers.cluster)
    alike: dict[object, list[str]] = {}
    for device in layers.cluster.devices:
        alike.setdefault((device.type, routes.attachment(device.name)), []).append(device.name)
    return list(alike.values())


def least_ways(devices: ProvedDevices, limit_s: float) -> tuple[FloatArray, FloatArray]:
    """Return the least times before a device's first operation, and after its last gradient.

    Without replicas all microbatches pass every stage: one that does not keep the limit is on no
    way, and every stage costs a message. Stages that adjoin on one device count as one.

    Args:
        devices: figures by kind.
        limit_s: to keep.

    Returns:
        By cut: of a microbatch that has been through the layers before it; of a gradient from there
        on to the end of the iteration.
    """
    layers = devices.layers
    forward, gradient = (
        np.concatenate([[0.0], np.cumsum(layers.on_fastest(figure))])
        for figure in (layers.forward_s, layers.gradient_s)
    )
    if layers.space.replication:
        return forward, gradient + devices.last_s
    work = layers.microbatches * (devices.forward_s + devices.backward_s) + devices.step_s
    took = (forward + devices.into_s)[:, :, None] + work
    allowed = devices.fits & (took <= limit_s)
    passed = _least_way(devices.forward_s, devices.into_s, allowed)
    return passed, _least_way(devices.gradient_s, devices.out_s, allowed) + devices.last_s


def _least_way(seconds: FloatArray, message_s: FloatArray, allowed: BoolArray) -> FloatArray:
    sums = np.where(allowed, seconds, math.inf)
    way = np.full(sums.shape[1], math.inf)
    way[0] = 0.0
    for cut in range(len(way) - 1):
        reached = way[cut] + message_s[:, cut, None] + sums[:, cut]
        way = np.minimum(way, reached.min(axis=0))
    return way
