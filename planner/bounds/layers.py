"""What single layers take at least under the freedoms of a space, by type of device."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.costs.roofline import OperationTimes, layer_times, loaded_times
from planner.plan.problem import Problem
from planner.space import Space

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

FAR = 1e60
"""Seconds, or seconds a byte, where nothing is possible: above any time, and sums stay finite."""


def prefix(figures: FloatArray) -> FloatArray:
    """Return running sums along the last axis, from 0: those of an interval are a difference."""
    return np.concatenate([np.zeros_like(figures[..., :1]), np.cumsum(figures, axis=-1)], axis=-1)


class LayerTable:
    """Least seconds and bytes of each of N layers on each of K types of devices.

    Args:
        problem: the layer graph, the cluster and the job.

    Attributes:
        types: names of the K types of devices in use.
        counts: devices of each type.
        working: of these, the devices that can compute at full speed at the same time: fewer where
            devices of a host slow each other.
        forward_s: (K, N) seconds of a forward, with the wait for the loader.
        again_s: (K, N) seconds of a forward that runs again in a backward.
        gradient_s: (K, N) seconds from the gradient of a layer's output to that of its input.
        backward_s: (K, N) seconds of a whole backward or of its two parts, whichever is less.
        weight_s: (K, N) seconds of a backward that remain after the gradient of the input is there.
        may_run: (K, N) whether a device of the type may run the layer.
        sent_bytes, returned_bytes: (N + 1) activations and gradients of a microbatch at each cut;
            0 at both ends.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.space = problem, problem.job.space
        self.record, self.cluster = problem.graph.record, problem.cluster
        self.rows, self.microbatches = self.record.layers, problem.job.microbatches
        kinds = [device.type for device in problem.cluster.devices]
        self.types = list(dict.fromkeys(kinds))
        self.counts = np.array([kinds.count(name) for name in self.types])
        self.working = self.counts - self._slowed_by_neighbours()
        times = [self._times(name) for name in self.types]
        seconds = np.array([[_least(row, self.space) for row in rows] for rows, _ in times])
        self.forward_s, self.gradient_s, self.backward_s, self.weight_s = (
            np.ascontiguousarray(figure) for figure in np.moveaxis(seconds, 2, 0)
        )
        self.again_s = np.array([[row.forward_s for row in rows] for _, rows in times])
        self.may_run = np.array(
            [[row.may_run_on(name) for row in self.rows] for name in self.types]
        )
        self.sent_bytes, self.returned_bytes = self._crossing(False), self._crossing(True)

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.rows)

    def _times(self, name: str) -> tuple[list[OperationTimes], list[OperationTimes]]:
        """Return the times of all layers on a type, with the wait for the loader and without it."""
        device, precision = self.cluster.device_types[name], self.problem.job.precision
        rows = self.problem.graph.on(name).record.layers
        return (
            [layer_times(row, name, device, precision) for row in rows],
            [loaded_times(row, name, device, precision) for row in rows],
        )

    def _slowed_by_neighbours(self) -> FloatArray:
        """Return the devices that hosts lose by type: k at once do the work of k / slowdown."""
        lost = np.zeros(len(self.types))
        for host in self.cluster.hosts:
            slowdown = np.array(host.slowdown)
            most = float((np.arange(1, len(slowdown) + 1) / slowdown).max())
            kinds = [self.cluster.type_of(name) for name in host.devices]
            lost += [max(0.0, kinds.count(name) - most) for name in self.types]
        return lost

    def _crossing(self, gradients: bool) -> FloatArray:
        totals = np.zeros(self.count + 1)
        for tensor in self.record.boundaries:
            if tensor.requires_grad or not gradients:
                first, last = self.span(tensor.producer, tensor.users)
                totals[first : last + 1] += tensor.message_bytes
        totals[[0, -1]] = 0.0
        return totals

    def waits_s(self, into_s: FloatArray, out_s: FloatArray) -> FloatArray:
        """Return the least waits (2, K, N + 1) for a microbatch's messages before, behind a stage.

        One exchange has two messages of a device at most, four with ``pairs``, and takes at least
        their mean. The seconds given are of activations and of gradients, (2, K, N + 1) each.
        """
        rules = self.problem.runtime.behaviour
        sends, receives = rules.send == "blocking", rules.receive == "blocking"
        overlaps = sends and receives and rules.streams == "several" and rules.exchange != "single"
        share = (0.25 if rules.exchange == "pairs" else 0.5) if overlaps else 1.0
        return np.ascontiguousarray(share * (receives * into_s + sends * out_s[::-1]))

    def span(self, producer: str, users: tuple[str, ...]) -> tuple[int, int]:
        """Return the first and the last cut that a tensor crosses."""
        return self.position[producer] + 1, max(self.position[user] for user in users)

    @cached_property
    def position(self) -> dict[str, int]:
        """The number of each layer."""
        return {row.name: number for number, row in enumerate(self.rows)}

    @cached_property
    def holders(self) -> dict[tuple[int, ...], list[str]]:
        """Names of parameters by the layers that use them."""
        used: defaultdict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(self.rows):
            for name in dict.fromkeys(row.parameters):
                used[name].append(number)
        sets: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, numbers in used.items():
            sets[tuple(numbers)].append(name)
        return sets

    @property
    def sharers(self) -> int:
        """The most devices that share the optimizer's state of a parameter."""
        shares = self.space.shards_state
        return len(self.cluster.devices) * self.problem.copies if shares else 1

    def fastest(self, seconds: FloatArray) -> FloatArray:
        """Return figures of layers, by type, on the type that takes least of those that may run."""
        return np.asarray(np.where(self.may_run, seconds, np.inf).min(axis=0))

    @cached_property
    def path_s(self) -> float:
        """A microbatch's way through all layers and back, and the first layer's weight gradient."""
        way = self.fastest(self.forward_s + self.gradient_s)
        return float(way.sum() + self.fastest(self.weight_s)[0])

    def work_s(self, prices: FloatArray) -> float:
        """Return the least time in which devices do all work if a second has a price by type."""
        price = np.asarray(prices) / float(np.max(prices))
        paid = self.fastest(price[:, None] * (self.forward_s + self.backward_s)).sum()
        return float(self.microbatches * paid / (price * self.working).sum())


def _least(times: OperationTimes, space: Space) -> tuple[float, float, float, float]:
    """Return a layer's forward, gradient on its way, all backward and what remains of that."""
    forward, inputs, weights, whole = times
    if not space.splits:
        return forward, whole, whole, 0.0
    if space.backward == "split":
        return forward, inputs, inputs + weights, weights
    gradient = min(whole, inputs)
    return forward, gradient, min(whole, inputs + weights), min(whole - gradient, weights)
