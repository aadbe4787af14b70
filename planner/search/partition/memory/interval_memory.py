"""Memory of every interval of layers at once, and what it costs to fit: tables for programs."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.costs.optimizer import most_holders, static_bytes
from planner.search.partition.chain import Chain, FloatArray, IntArray
from planner.search.partition.intervals import interval_sums

MOST_PRICES = 12
"""Prices of a saved byte at which the extra time is bounded; more change little."""


class IntervalMemory:
    """Matrices over intervals: entry ``[i, j]`` is of the layers i to j, ``j`` exclusive."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._allowed = chain.problem.job.recompute
        layers = np.array([row.stash_bytes for row in chain.graph.record.layers])
        self._saving = np.maximum(layers - chain.stashes.kept_bytes, 0).astype(float)
        self._bonus = chain.stashes.unsaved_bytes.astype(float)
        self._layers = layers

    @cached_property
    def stash_bytes(self) -> FloatArray:
        """Bytes of one microbatch, nothing recomputed."""
        received = self._chain.stashes.received_by_interval().astype(float)
        return np.asarray(interval_sums(self._layers) + received, dtype=np.float64)

    @cached_property
    def held_bytes(self) -> FloatArray:
        """What is held besides the stashes when most is held, whatever the schedule.

        Of stages that recompute nothing, and at least that much of those that do.
        """
        return self.held_with(self._layers)

    def held_with(self, kept_bytes: IntArray) -> FloatArray:
        """Return what is held if the layers keep so many bytes.

        Weights, gradients, optimizer state, workspace; and the output being made or, in the
        backward, the gradients received and being made.
        """
        chain = self._chain
        gradients = chain.cut_gradient_bytes
        buffers = np.maximum(chain.cut_bytes[None, :], gradients[:, None] + gradients[None, :])
        return np.asarray(self.always_with(kept_bytes) + buffers)

    def always_with(self, kept_bytes: IntArray) -> FloatArray:
        """Return weights, gradients, optimizer state and workspace if the layers keep so much."""
        held = self._static_bytes() + self.workspace_bytes(kept_bytes)
        return np.asarray(held, dtype=np.float64)

    @cached_property
    def always_bytes(self) -> FloatArray:
        """Weights, gradients, optimizer state and workspace, at least."""
        return self.always_with(self._layers)

    def _static_bytes(self) -> FloatArray:
        """Return weights, gradients and optimizer state, a tied parameter once an interval."""
        chain = self._chain
        table = interval_sums(chain.static_bytes)
        holders: dict[str, list[int]] = {}
        for position, layer in enumerate(chain.graph.record.layers):
            for name in layer.parameters:
                holders.setdefault(name, []).append(position)
        for name, held in holders.items():
            size = static_bytes(
                chain.problem, [chain.graph.parameters[name]], most_holders(chain.problem)
            )
            for before, first in pairwise(held):
                table[before + 1 : first + 1, first + 1 :] += size
        return table

    def workspace_bytes(self, kept_bytes: IntArray) -> FloatArray:
        """Return what is held besides whole stashes while layers run.

        Args:
            kept_bytes: by layer, of its stash. What is more than a layer keeps makes a lower bound.
        """
        # planner.costs.stage_bytes at once: from the layer on that holds most, kept bytes go off.
        before = np.concatenate([[0.0], np.cumsum(kept_bytes)])
        length = self._chain.length
        held = np.broadcast_to(self._chain.peak_bytes + before[:-1], (length, length))
        table = np.zeros((length + 1,) * 2)
        most = np.maximum.accumulate(np.where(np.tri(length, dtype=bool).T, held, -np.inf), axis=1)
        table[:-1, 1:] = np.maximum(most - before[1:], 0.0)
        return table

    @cached_property
    def _most_saving(self) -> FloatArray:
        return interval_sums(self._saving)

    def extra_s(
        self,
        device_type: str,
        in_flight: int,
        capacity_bytes: float,
        held_bytes: FloatArray | None = None,
    ) -> FloatArray:
        """Return the least seconds of recomputation a microbatch to fit; infinite if none does.

        The fractional knapsack by its dual: at a price of p seconds a byte, what must be saved
        costs p a byte less what the layers that save a byte for less gain on it. Each price gives
        a lower bound, the best ratio of each layer an exact one.

        Args:
            device_type: runs the layers.
            in_flight: microbatches whose stashes are to fit.
            capacity_bytes: of the device.
            held_bytes: besides the stashes, if not all that is held when most is.
        """
        held = self.held_bytes if held_bytes is None else held_bytes
        return self._extra_s(device_type, self.stash_bytes - (capacity_bytes - held) / in_flight)

    def _extra_s(self, device_type: str, need: FloatArray) -> FloatArray:
        """Return the least seconds that save so many bytes of each stash."""
        extra = np.where(need <= 0, 0.0, np.inf)
        if not self._allowed or not extra.any():
            return extra
        need = np.where(need <= 0, need, np.maximum(need - self._bonus[:, None], 0.0))
        extra = np.where(need <= self._most_saving, 0.0, np.inf)
        for price, gain in self._prices(device_type):
            extra = np.maximum(extra, price * need - gain)
        return extra

    def _prices(self, device_type: str) -> list[tuple[float, FloatArray]]:
        """Return prices of a byte with the gain of each interval's layers at them."""
        if device_type not in self._gains_by_type:
            cost = self._chain.again_s(device_type)
            useful = self._saving > 0
            ratios = np.unique(cost[useful] / self._saving[useful])
            if len(ratios) > MOST_PRICES:
                ratios = np.quantile(ratios, np.linspace(0, 1, MOST_PRICES))
            self._gains_by_type[device_type] = [
                (float(p), interval_sums(np.maximum(p * self._saving - cost, 0.0))) for p in ratios
            ]
        return self._gains_by_type[device_type]

    @cached_property
    def _gains_by_type(self) -> dict[str, list[tuple[float, FloatArray]]]:
        return {}
