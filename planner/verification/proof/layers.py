"""What the layers of a problem take at least, by type of device; the checker's own arithmetic."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.errors import PipeplanError
from planner.model.graph_record import Layer
from planner.plan.problem import Problem
from planner.space import Space
from planner.verification.layer_costs import ProblemCosts, moved_bytes

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
MOST_LAYERS = 400
"""Layers of a chain whose intervals are looked at one by one."""
MOST_TIED = 2e8
"""Sets of layers that share parameters, times intervals, that are looked at."""


class ProvedLayers:
    """Least seconds and bytes of each layer under the freedoms of a space.

    Args:
        problem: the layer graph, the cluster and the job.
        space: freedoms of the plans that a bound is about.

    Attributes:
        graph, cluster: of the problem.
        costs: of single layers.
        rows: the layers.
        microbatches: their number.
        tied_in_turn: whether stages that hold a parameter reduce its gradient after their replicas.
        types: names of the device types in use, in order of first use.
        counts: devices of each.
        at_once: devices of each that compute at full speed at most: fewer than there are on hosts
            whose devices slow each other.
        forward_s: by type and layer, with the wait for the loader; again_s without it.
        gradient_s: from a layer's gradient to the one it sends back.
        backward_s: all of the backward, whether whole or split.
        weight_s: what remains of the backward once its gradient is on its way.
        may_run: whether a type may run a layer.
    """

    def __init__(self, problem: Problem, space: Space) -> None:
        self.graph, self.cluster = problem.graph.record, problem.cluster
        self.space = space
        self.costs = ProblemCosts(problem.cluster, problem.job)
        self.rows = self.graph.layers
        self.microbatches = problem.job.microbatches
        self.tied_in_turn = problem.runtime.tied == "in_turn"
        kinds = [device.type for device in problem.cluster.devices]
        self.types = list(dict.fromkeys(kinds))
        self.counts = np.array([kinds.count(name) for name in self.types])
        self.at_once = self.counts - self._lost_to_others()
        rows = {name: self.graph.on_types.get(name, self.graph).layers for name in self.types}
        seconds = np.array([[self._seconds(r, name) for r in rows[name]] for name in self.types])
        self.forward_s, self.gradient_s, self.backward_s, self.weight_s = np.moveaxis(seconds, 2, 0)
        # Running a layer again waits for no batch.
        self.again_s = np.array(
            [[self.costs.loaded(row, name)[0] for row in rows[name]] for name in self.types]
        )
        self.may_run = np.array(
            [[row.may_run_on(name) for row in self.rows] for name in self.types]
        )

    def _lost_to_others(self) -> FloatArray:
        """By type, the devices less what they do at once: k of them do the work of k / slowdown."""
        lost = np.zeros(len(self.types))
        for host in self.cluster.hosts:
            numbers = np.arange(1, len(host.slowdown) + 1)
            most = float((numbers / np.array(host.slowdown)).max())
            kinds = [self.cluster.type_of(name) for name in host.devices]
            for k, name in enumerate(self.types):
                lost[k] += max(0.0, kinds.count(name) - most)
        return lost

    @property
    def length(self) -> int:
        """Number of layers."""
        return len(self.rows)

    def _seconds(self, layer: Layer, type_name: str) -> tuple[float, float, float, float]:
        """Forward, gradient on its way, whole backward, what remains of it; each at least."""
        forward, inputs, weights, whole = self.costs.seconds(layer, type_name)
        if not self.space.splits:
            return forward, whole, whole, 0.0
        if self.space.backward == "split":
            return forward, inputs, inputs + weights, weights
        gradient = min(whole, inputs)
        remains = min(whole - gradient, weights)
        return forward, gradient, min(whole, inputs + weights), remains

    @property
    def most_sharers(self) -> int:
        """Devices that share the optimizer's state of a parameter, at most."""
        return len(self.cluster.devices) if self.space.shards_state else 1

    def on_fastest(self, seconds: FloatArray) -> FloatArray:
        """Return seconds of each layer on the fastest type that may run it."""
        return np.asarray(np.where(self.may_run, seconds, np.inf).min(axis=0))

    @cached_property
    def position(self) -> dict[str, int]:
        """Number of each layer."""
        return {row.name: number for number, row in enumerate(self.rows)}

    def crossing_bytes(self, *, gradients: bool) -> FloatArray:
        """Return what every cut sends, from before the first layer to behind the last one.

        Args:
            gradients: what goes back, else what goes forward.
        """
        totals = np.zeros(self.length + 1)
        for tensor in self.graph.boundaries:
            if tensor.requires_grad or not gradients:
                last = max((self.position[user] for user in tensor.users), default=-1)
                totals[self.position[tensor.producer] + 1 : last + 1] += moved_bytes(tensor)
        return totals

    @cached_property
    def holders(self) -> dict[tuple[int, ...], list[str]]:
        """Parameters by the layers that hold them."""
        held: defaultdict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(self.rows):
            for name in dict.fromkeys(row.parameters):
                held[name].append(number)
        sets: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, numbers in held.items():
            sets[tuple(numbers)].append(name)
        return sets


@dataclass(frozen=True)
class ProvedTiedPair:
    """Parameters that the same two layers hold.

    Attributes:
        first_alone, last_alone: intervals that hold one of the layers.
        bytes: of the gradients.
    """

    first_alone: BoolArray
    last_alone: BoolArray
    bytes: float

    @property
    def shared_bytes(self) -> FloatArray:
        """What an interval reduces together with another stage."""
        return np.where(self.first_alone | self.last_alone, self.bytes, 0.0)


def before_last(sums: FloatArray) -> FloatArray:
    """Return sums over the layers of intervals before their last one.

    Args:
        sums: over intervals; the last axis is their end.
    """
    return np.concatenate([np.zeros_like(sums[..., :1]), sums[..., :-1]], axis=-1)


class ProvedIntervals:
    """Figures of all intervals of layers: row i, column j is of the layers i to j - 1.

    Args:
        layers: of the problem.

    Raises:
        PipeplanError: if there are too many.
    """

    def __init__(self, layers: ProvedLayers) -> None:
        length = layers.length
        if length > MOST_LAYERS:
            raise PipeplanError(
                f"certificate: {length} layers are too many to check (at most {MOST_LAYERS})"
            )
        if len(layers.holders) * length**2 > MOST_TIED:
            raise PipeplanError("certificate: parameters are shared in too many ways to check")
        self.layers = layers
        self.count = length + 1
        begin, end = np.arange(self.count)[:, None], np.arange(self.count)[None, :]
        self._begin, self._end = begin, end
        self.is_stage = end > begin

    def sums(self, per_layer: FloatArray | IntArray) -> FloatArray:
        """Return sums of a figure over each interval; 0 where there is none."""
        prefix = np.concatenate([[0.0], np.cumsum(per_layer, dtype=float)])
        return np.where(self.is_stage, np.maximum(prefix[None, :] - prefix[:, None], 0.0), 0.0)

    @cached_property
    def tied_pair(self) -> ProvedTiedPair | None:
        """The two layers that hold most parameters together; None if no two alone hold any.

        None as well where all that hold a parameter do not reduce its gradient at once.
        """
        if self.layers.tied_in_turn:
            return None
        reduced = self.layers.costs.least_reduced_bytes
        bytes_ = {row.name: reduced(row) for row in self.layers.graph.parameters if row.trainable}
        pairs = [
            (float(sum(bytes_.get(name, 0) for name in names)), numbers)
            for numbers, names in self.layers.holders.items()
            if len(numbers) == 2
        ]
        most, numbers = max(pairs, default=(0.0, ()))
        if not most:
            return None
        first, last = (self._held((number,))[0] for number in numbers)
        return ProvedTiedPair(first & ~last, last & ~first, most)

    def _held(self, numbers: tuple[int, ...]) -> tuple[BoolArray, BoolArray]:
        """Whether an interval contains some of these layers, and whether it contains all."""
        inside = sum((self._begin <= n) & (n < self._end) for n in numbers)
        count = np.asarray(inside, dtype=np.int64)
        return count > 0, count == len(numbers)

    @cached_property
    def _parameter_bytes(self) -> tuple[FloatArray, ...]:
        """Reduced by a stage alone, with others, optimizer traffic, static."""
        own, shared, traffic, static = (np.zeros(self.is_stage.shape) for _ in range(4))
        costs, sharers = self.layers.costs, self.layers.most_sharers
        layers_divide = self.layers.space.shards_parameters
        parameters = {row.name: row for row in self.layers.graph.parameters}
        for numbers, names in self.layers.holders.items():
            some, every = self._held(numbers)
            rows = [parameters[name] for name in names]
            trained = [row for row in rows if row.trainable]
            gradient = float(sum(map(costs.least_reduced_bytes, trained)))
            # What replicas divide is reduced by every backward, which no bound counts.
            divided = layers_divide and len(numbers) == 1
            own += np.where(every, 0.0 if divided else gradient, 0.0)
            if not self.layers.tied_in_turn:
                shared += np.where(some & ~every, gradient, 0.0)
            elif self.layers.space.has_pipelines:
                own += np.where(some & ~every, gradient, 0.0)
            moved = float(sum(map(costs.stepped_bytes, trained)))
            moved /= sharers
            traffic += np.where(some, moved, 0.0)
            held = (costs.static_bytes(row, sharers, in_parts=divided) for row in rows)
            static += np.where(some, float(sum(held)), 0.0)
        return own, shared, traffic, static

    @property
    def own_gradient_bytes(self) -> FloatArray:
        """Bytes that the replicas of a stage reduce alone, at least."""
        return self._parameter_bytes[0]

    @property
    def shared_gradient_bytes(self) -> FloatArray:
        """Bytes that a stage reduces together with other stages, at least."""
        return self._parameter_bytes[1]

    @property
    def optimizer_bytes(self) -> FloatArray:
        """What the optimizer step reads and writes."""
        return self._parameter_bytes[2]

    @property
    def static_bytes(self) -> FloatArray:
        """Weights, gradients and optimizer state of a stage."""
        return self._parameter_bytes[3]

    @cached_property
    def least_bytes(self) -> FloatArray:
        """Memory with one microbatch in flight, at least, whatever is recomputed."""
        return self.static_bytes + self.sums(self.kept_bytes)

    @cached_property
    def fits_type(self) -> list[BoolArray]:
        """Whether a type may run an interval and has memory for a microbatch of it, by type."""
        layers, rows = self.layers, []
        for k, name in enumerate(layers.types):
            foreign = self.sums((~layers.may_run[k]).astype(float))
            enough = self.least_bytes <= layers.costs.capacity_bytes(name)
            rows.append(enough & (foreign == 0) & self.is_stage)
        return rows

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """What each layer keeps at least: its stash or, run again, the tensors it starts from.

        Nothing where stashes may go to the host.
        """
        if self.layers.space.offload:
            return np.zeros(self.layers.length)
        stash = np.array([float(row.stash_bytes) for row in self.layers.rows])
        if not self.layers.space.recompute:
            return stash
        starts = np.zeros(self.layers.length)
        for tensor in self.layers.graph.boundaries:
            alone = tensor.saved_by is None and len(set(tensor.users)) == 1
            if alone or tensor.saved_by in tensor.users:
                layer = tensor.users[0] if tensor.saved_by is None else tensor.saved_by
                starts[self.layers.position[layer]] += tensor.bytes
        return np.asarray(np.minimum(stash, starts))
