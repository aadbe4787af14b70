"""What stages take at least, wherever they lie: figures of all intervals of a chain of layers."""

from __future__ import annotations

from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from planner.bounds.layers import BoolArray, FloatArray, IntArray, LayerTable, prefix
from planner.costs.gradients import gradient_bytes, least_reduced_bytes
from planner.costs.optimizer import step_traffic_bytes
from planner.errors import PipeplanError
from planner.model.graph_record import Parameter

MOST_LAYERS = 400
"""Layers of a chain of which all intervals are looked at."""
MOST_HOLDERS = 2e8
"""Sets of layers that hold the same parameters, times intervals, that are looked at."""


class TiedPair(NamedTuple):
    """Parameters that the same two layers hold.

    Attributes:
        first_alone, last_alone: (N + 1, N + 1) intervals with one of the two layers.
        bytes: that they reduce, at least.
    """

    first_alone: BoolArray
    last_alone: BoolArray
    bytes: float


class ParameterBytes(NamedTuple):
    """Bytes of the parameters of each interval, (N + 1, N + 1).

    Attributes:
        own: what the replicas of the stage reduce alone, at least.
        shared: what they reduce together with other stages, at least.
        step: what the optimizer step reads and writes.
        static: weights, gradients and optimizer state.
    """

    own: FloatArray
    shared: FloatArray
    step: FloatArray
    static: FloatArray


class IntervalTable:
    """Figures of all intervals of N layers: row i, column j is of the layers i to j - 1.

    Args:
        layers: of the problem.

    Raises:
        PipeplanError: if there are too many layers.
    """

    def __init__(self, layers: LayerTable) -> None:
        if layers.count > MOST_LAYERS:
            raise PipeplanError(
                f"bounds: {layers.count} layers are too many to look at all intervals (at most "
                f"{MOST_LAYERS})"
            )
        if len(layers.holders) * layers.count**2 > MOST_HOLDERS:
            raise PipeplanError("bounds: parameters are shared by too many sets of layers")
        self.layers, self.cuts = layers, layers.count + 1
        self.begin, self.end = np.arange(self.cuts)[:, None], np.arange(self.cuts)[None, :]
        self.is_stage = self.end > self.begin

    def sums(self, figures: FloatArray | IntArray) -> FloatArray:
        """Return sums of a figure of layers over each interval; 0 where there is none."""
        total = prefix(np.asarray(figures, dtype=float))
        difference = np.maximum(total[..., None, :] - total[..., :, None], 0.0)
        return np.asarray(np.where(self.is_stage, difference, 0.0))

    def _held(self, numbers: tuple[int, ...]) -> tuple[BoolArray, BoolArray]:
        """Return whether an interval has some of these layers, and whether it has all."""
        inside = sum((self.begin <= n) & (n < self.end) for n in map(np.int64, numbers))
        count = np.asarray(inside, dtype=np.int64)
        return count > 0, count == len(numbers)

    @cached_property
    def parameters(self) -> ParameterBytes:
        """Bytes of parameters; each set of layers with the same parameters is added once."""
        layers, rows = self.layers, self.layers.problem.graph.parameters
        found = ParameterBytes(*np.zeros((4, self.cuts, self.cuts)))
        for numbers, names in layers.holders.items():
            some, every = self._held(numbers)
            held = [rows[name] for name in names]
            divided = layers.space.shards_parameters and len(numbers) == 1
            self._add_reduced(found, held, (some, every), divided)
            static, step = np.sum([self._bytes(p, divided) for p in held], axis=0)
            found.static[some] += static
            found.step[some] += step / layers.sharers
        return found

    def _add_reduced(
        self,
        found: ParameterBytes,
        held: list[Parameter],
        where: tuple[BoolArray, BoolArray],
        divided: bool,
    ) -> None:
        """Add gradients; what replicas divide is reduced in every backward and not counted."""
        some, every = where
        reduced = partial(least_reduced_bytes, self.layers.problem.job)
        gradient = float(sum(reduced(row) for row in held if row.trainable))
        found.own[every] += 0.0 if divided else gradient
        apart = some & ~every
        if self.layers.problem.runtime.tied != "in_turn":
            found.shared[apart] += gradient
        elif self.layers.space.has_pipelines:
            found.own[apart] += gradient

    def _bytes(self, row: Parameter, divided: bool) -> tuple[float, float]:
        """Return least static bytes of a parameter, and bytes that a step moves."""
        if not row.trainable:
            return float(row.bytes), 0.0
        job, sharers = self.layers.problem.job, self.layers.sharers
        parts = sharers if divided else 1
        held = sum(-(-bytes_ // parts) for bytes_ in (row.bytes, gradient_bytes(job, row)))
        state = job.optimizer_bytes_per_element * -(-row.elements // sharers)
        return float(held + state), float(step_traffic_bytes(job, row))

    @cached_property
    def tied_pair(self) -> TiedPair | None:
        """The two layers that hold most parameters together; None if no two alone hold any.

        None as well where the stages that hold a parameter reduce its gradient in turn.
        """
        if self.layers.problem.runtime.tied == "in_turn":
            return None
        trained = [row for row in self.layers.record.parameters if row.trainable]
        job = self.layers.problem.job
        bytes_ = {row.name: least_reduced_bytes(job, row) for row in trained}
        most, numbers = max(
            (
                (float(sum(bytes_.get(name, 0) for name in names)), numbers)
                for numbers, names in self.layers.holders.items()
                if len(numbers) == 2
            ),
            default=(0.0, (0, 0)),
        )
        if not most:
            return None
        first, last = (self._held((number,))[0] for number in numbers)
        return TiedPair(first & ~last, last & ~first, most)

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """The least that each layer keeps of a microbatch: its stash, or what it runs again from.

        0 where stashes may go to the host.
        """
        layers = self.layers
        if layers.space.offload:
            return np.zeros(layers.count)
        stash = np.array([float(row.stash_bytes) for row in layers.rows])
        if not layers.space.recompute:
            return stash
        inputs = np.zeros(layers.count)
        for tensor in layers.record.boundaries:
            alone = tensor.saved_by is None and len(set(tensor.users)) == 1
            if alone or tensor.saved_by in tensor.users:
                inputs[layers.position[tensor.saved_by or tensor.users[0]]] += tensor.bytes
        return np.asarray(np.minimum(stash, inputs))

    @cached_property
    def fits(self) -> BoolArray:
        """(K, N + 1, N + 1) whether a type may run an interval and a microbatch of it fits."""
        layers = self.layers
        least = self.parameters.static + self.sums(self.kept_bytes)
        capacity = [layers.cluster.device_types[name].capacity_bytes for name in layers.types]
        foreign = self.sums((~layers.may_run).astype(float))
        enough = least[None] <= np.array(capacity)[:, None, None]
        return np.asarray(enough & (foreign == 0) & self.is_stage)
