"""What a single device takes at least, where devices may hold several stages each."""

from __future__ import annotations

import math
from functools import cached_property

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
        layers: of the problem.
        intervals: of these layers.

    Attributes:
        counts: devices of each kind.
        forward_s, gradient_s, backward_s, step_s: of layers on each kind; a step counts a
            parameter at the first layer that holds it.
        into_s, out_s: a message into a device of each kind at each cut, and its gradient back.
        port_s: what both take of the device's port; of two directions the mean.
        fits: whether a kind may hold an interval of layers.
        last_s: what follows the last gradient of all.
    """

    def __init__(self, layers: ProvedLayers, intervals: ProvedIntervals) -> None:
        self.layers, self.intervals = layers, intervals
        members = _kinds(layers)
        self.links = ClassLinks(layers.cluster, members)
        self.counts = np.array([len(names) for names in members])
        self._types = [layers.types.index(layers.cluster.type_of(names[0])) for names in members]
        self.forward_s, self.gradient_s, self.backward_s = (
            figure[self._types]
            for figure in (layers.forward_s, layers.gradient_s, layers.backward_s)
        )
        widths = [
            layers.cluster.device_types[layers.types[k]].optimizer_gb_per_s for k in self._types
        ]
        self.step_s = self._step_bytes[None, :] / (np.array(widths)[:, None] * 1e9)
        self.fits = np.array([intervals.fits_type[k] for k in self._types])
        self.last_s = float(layers.on_fastest(layers.weight_s)[0] + self.step_s[:, 0].min())
        self.into_s, self.out_s, self.port_s = self._messages()

    @cached_property
    def _step_bytes(self) -> FloatArray:
        layers = self.layers
        parameters = {row.name: row for row in layers.graph.parameters}
        moved = np.zeros(layers.length)
        for numbers, names in layers.holders.items():
            rows = [parameters[name] for name in names]
            moved[numbers[0]] += sum(layers.costs.stepped_bytes(r) for r in rows if r.trainable)
        return moved / layers.most_sharers

    def _messages(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        there, back = (self.layers.crossing_bytes(gradients=g) for g in (False, True))
        for row in (there, back):
            row[0] = row[-1] = 0.0
        links = self.links
        into = _message_s(there, links.latency_s.min(axis=0), links.s_per_byte.min(axis=0))
        out = _message_s(back, links.latency_s.min(axis=1), links.s_per_byte.min(axis=1))
        shares = [port.s_per_byte * (1.0 if port.takes_turns else 0.5) for port in links.ports]
        return into, out, np.array(shares)[:, None] * (there + back)[None, :]

    def capacity_bytes(self, kind: int) -> int:
        """Return the bytes that a plan may use of a device of a kind."""
        return self.layers.costs.capacity_bytes(self.layers.types[self._types[kind]])

    def sums(self, per_layer: FloatArray) -> FloatArray:
        """Return sums over intervals, kinds x cuts x cuts."""
        return np.array([self.intervals.sums(row) for row in per_layer])

    @cached_property
    def _joining(self) -> FloatArray:
        """Least latency and seconds a byte of the worst link of a device of a kind and others.

        By kind and the number of all these devices.
        """
        total = int(self.counts.sum())
        table = np.zeros((len(self.counts), total + 1, 2))
        for k in range(len(self.counts)):
            for count in range(2, total + 1):
                table[k, count] = self.links.joining([k], count)
        return table

    def reduction_s(self, kind: int, replicas: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least all-reduces of gradients of all intervals over so many devices.

        Args:
            kind: of one of the devices.
            replicas: by interval, at least; one reduces nothing, more than there are never end.
            bytes_: by interval.
        """
        total = int(self.counts.sum())
        counted = np.clip(replicas, 2, total) if total > 1 else np.full_like(replicas, 2)
        joint = self._joining[kind][np.minimum(counted, total)]
        seconds = np.maximum(
            reduced_s(counted, bytes_, joint[..., 0], joint[..., 1]),
            reduced_s(counted, bytes_, *self.links.alone(kind)),
        )
        seconds = np.where((bytes_ > 0) & (replicas > 1), np.minimum(seconds, FAR), 0.0)
        return np.where(replicas > total, FAR, seconds)


def _message_s(bytes_: FloatArray, latency_s: FloatArray, s_per_byte: FloatArray) -> FloatArray:
    seconds = latency_s[:, None] + bytes_[None, :] * s_per_byte[:, None]
    return np.where(bytes_ > 0, np.minimum(seconds, FAR), 0.0)


def _kinds(layers: ProvedLayers) -> list[list[str]]:
    routes = Routes(layers.cluster)
    alike: dict[object, list[str]] = {}
    for device in layers.cluster.devices:
        alike.setdefault((device.type, routes.attachment(device.name)), []).append(device.name)
    return list(alike.values())


class Ways:
    """The least times before a device's first operation, and after its last gradient.

    Without replicas all microbatches pass every stage: one that does not keep the limit is on no
    way, and every stage costs a message. Stages that adjoin on one device count as one.

    Args:
        devices: figures by kind.
        limit_s: to keep.

    Attributes:
        passed_s: of a microbatch that has been through the layers before a cut.
        left_s: of a gradient from a cut on to the end of the iteration.
    """

    def __init__(self, devices: ProvedDevices, limit_s: float) -> None:
        self._devices, self._limit_s = devices, limit_s
        layers = devices.layers
        if layers.space.replication:
            rows = (
                np.concatenate([[0.0], np.cumsum(layers.on_fastest(figure))])
                for figure in (layers.forward_s, layers.gradient_s)
            )
            self.passed_s, left_s = rows
        else:
            allowed = self._allowed()
            self.passed_s = self._way(devices.forward_s, devices.into_s, allowed)
            left_s = self._way(devices.gradient_s, devices.out_s, allowed)
        self.left_s = left_s + devices.last_s

    def _allowed(self) -> BoolArray:
        devices = self._devices
        work = devices.layers.microbatches * (devices.forward_s + devices.backward_s)
        least = devices.layers.on_fastest(devices.layers.forward_s)
        before = np.concatenate([[0.0], np.cumsum(least)]) + devices.into_s
        took = before[:, :, None] + devices.sums(work + devices.step_s)
        return np.asarray(devices.fits & (took <= self._limit_s))

    def _way(self, per_layer: FloatArray, message_s: FloatArray, allowed: BoolArray) -> FloatArray:
        sums = np.where(allowed, self._devices.sums(per_layer), math.inf)
        way = np.full(sums.shape[1], math.inf)
        way[0] = 0.0
        for cut in range(len(way) - 1):
            reached = way[cut] + message_s[:, cut, None] + sums[:, cut]
            way = np.minimum(way, reached.min(axis=0))
        return way
