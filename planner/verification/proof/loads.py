"""What a device with any number of stages can earn: loads on a grid, rounded down.

From the last layer to the first: what is the most that a device earns from a layer on, by how many
more messages it may take part in and how much of its time is left? A stage that begins behind the
first layer takes messages, and so does one that ends before the last.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.errors import PipeplanError
from planner.verification.proof.devices import ProvedDevices, Ways
from planner.verification.proof.layers import FloatArray, IntArray
from planner.verification.proof.program import MARGIN

MOST_CELLS = 1e8
"""States that are gone through for one time."""
NOTHING = -1e30
"""Earned where nothing is possible."""


def _require_few_states(devices: ProvedDevices, steps: int) -> None:
    """Refuse a grid for which there are too many states to go through."""
    layers = devices.layers
    numbers = layers.microbatches if layers.space.replication else 1
    messages = 2 * layers.space.max_stages_per_device + 1
    cells = 2.0 * len(devices.counts) * numbers * layers.length * messages * steps
    if cells > MOST_CELLS:
        raise PipeplanError(
            f"certificate: {layers.length} layers on a grid of {steps} steps are too many to "
            f"check, for {numbers} microbatches on {len(devices.counts)} kinds of devices"
        )


class Loads:
    """Devices with any stages.

    Args:
        devices: figures by kind.
        prices: of a microbatch of each layer.
        limit_s: to keep.
        steps: of the grid, for the whole limit.
    """

    def __init__(
        self, devices: ProvedDevices, prices: FloatArray, limit_s: float, steps: int
    ) -> None:
        _require_few_states(devices, steps)
        self._devices, self._prices, self._limit_s = devices, prices, limit_s
        self._step_s = limit_s / steps
        self._ways = Ways(devices, limit_s)
        layers = devices.layers
        self._replication, count = layers.space.replication, layers.microbatches
        self._numbers = np.arange(1 if self._replication else count, count + 1)

    def most_earned(self, kind: int) -> float:
        """Return the most that a device of a kind earns.

        By its first layer the lesser of what two loads allow: all forwards and gradients on their
        way, with the way home of the last one; and all work with the optimizer step.
        """
        devices, ways = self._devices, self._ways
        head = self._first_s(ways.passed_s + devices.into_s[kind])[:-1]
        home = self._first_s(ways.left_s + devices.out_s[kind])[:-1]
        forward, each = devices.forward_s[kind], np.zeros(devices.layers.length)
        way, work = forward + devices.gradient_s[kind], forward + devices.backward_s[kind]
        rooms = (
            (self._limit_s - head - home, way, each),
            (self._limit_s - head, work, devices.step_s[kind]),
        )
        earned = [self._earned(kind, *room) for room in rooms]
        return float(np.min(earned, axis=0).max(initial=0.0))

    def _first_s(self, seconds: FloatArray) -> FloatArray:
        """Return the least time at each cut; with replicas at any later cut as well.

        A microbatch may come to a later stage of the device without having been at the first one.
        """
        if not self._replication:
            return seconds
        return np.asarray(np.minimum.accumulate(seconds[::-1])[::-1])

    def _earned(
        self, kind: int, room_s: FloatArray, each_s: FloatArray, once_s: FloatArray
    ) -> FloatArray:
        """Return what a device earns at most, by its first layer.

        Args:
            kind: of the device.
            room_s: time for all layers, by the first one.
            each_s: of a layer, for each microbatch.
            once_s: of a layer besides.
        """
        steps = np.floor(np.maximum(room_s, -self._step_s) * MARGIN / self._step_s + 1e-9)
        room = steps.astype(np.int64)
        width = int(max(room.max(initial=-1), 0)) + 1
        loads = self._on_grid(kind, each_s, once_s, width)
        messages = self._most_messages(kind)
        earned = np.zeros(len(room))
        for first, began in self._tables(loads, int(messages.max()) + 1, width):
            left = int(messages[first]) - (first > 0)
            if room[first] >= 0 and left >= 0:
                earned[first] = max(0.0, float(began[left, room[first]]))
        return earned

    def _on_grid(self, kind: int, each_s: FloatArray, once_s: FloatArray, width: int) -> IntArray:
        """Return loads by number of microbatches and layer; too large where none may be."""
        seconds = self._numbers[:, None] * each_s[None, :] + once_s[None, :]
        loads = np.floor(seconds / (self._step_s * MARGIN))
        length = self._devices.layers.length
        alone = self._devices.fits[kind][np.arange(length), np.arange(length) + 1]
        return np.where(alone, np.minimum(loads, width), width).astype(np.int64)

    def _most_messages(self, kind: int) -> IntArray:
        """Return at how many cuts a device may exchange messages, by its first layer.

        Without replicas all microbatches' messages pass its port at each of them.
        """
        devices, layers = self._devices, self._devices.layers
        at_most = 2 * layers.space.max_stages_per_device - (np.arange(layers.length) == 0)
        least_s = devices.port_s[kind, 1:-1].min(initial=np.inf) * layers.microbatches
        if self._replication or not 0 < least_s < np.inf:
            return np.asarray(at_most, dtype=np.int64)
        window_s = self._limit_s - self._ways.passed_s[:-1] - self._ways.left_s[:-1]
        carried = np.floor(np.maximum(window_s, 0.0) * MARGIN / least_s + 1e-9)
        return np.asarray(np.minimum(at_most, carried), dtype=np.int64)

    def _tables(
        self, loads: IntArray, messages: int, width: int
    ) -> Iterator[tuple[int, FloatArray]]:
        """Yield, from the last layer on, what is earned if a stage begins with the layer.

        By messages left after its beginning and steps left before it.
        """
        outside = np.zeros((messages, width))
        inside = np.full((len(self._numbers), messages, width), NOTHING)
        for layer in range(loads.shape[1] - 1, -1, -1):
            ended = np.full((messages, width), NOTHING)
            ended[1:] = outside[:-1]
            if layer == loads.shape[1] - 1:
                ended = outside
            after = np.maximum(inside, ended[None])
            for row, number in enumerate(self._numbers):
                load = int(loads[row, layer])
                inside[row] = NOTHING
                inside[row, :, load:] = after[row, :, : max(width - load, 0)]
                inside[row] += number * self._prices[layer]
            began = inside.max(axis=0)
            yield layer, began
            outside = outside.copy()
            outside[1:] = np.maximum(outside[1:], began[:-1])
