"""What layers take at least, alone and in every interval of them; the checker's own arithmetic."""

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
        graph, cluster, space: of the problem and the bound.
        costs: of single layers.
        rows: the layers.
        position: number of each layer.
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
        sent_bytes, returned_bytes: activations and gradients that pass each cut, from before the
            first layer to behind the last one.
    """

    def __init__(self, problem: Problem, space: Space) -> None:
        self.graph, self.cluster, self.space = problem.graph.record, problem.cluster, space
        self.costs = ProblemCosts(problem.cluster, problem.job)
        self.rows, self.microbatches = self.graph.layers, problem.job.microbatches
        self.position = {row.name: number for number, row in enumerate(self.rows)}
        self.tied_in_turn = problem.runtime.tied == "in_turn"
        kinds = [device.type for device in problem.cluster.devices]
        self.types = list(dict.fromkeys(kinds))
        self.counts = np.array([kinds.count(name) for name in self.types])
        self.at_once = self.counts - self._lost_to_others()
        graphs = [self.graph.on_types.get(name, self.graph) for name in self.types]
        seconds = [
            [self._seconds(row, name) for row in graph.layers]
            for name, graph in zip(self.types, graphs, strict=True)
        ]
        self.forward_s, self.gradient_s, self.backward_s, self.weight_s, self.again_s = np.moveaxis(
            np.array(seconds), 2, 0
        )
        self.may_run = np.array([[row.may_run_on(n) for row in self.rows] for n in self.types])
        self.sent_bytes = self._crossing_bytes(gradients=False)
        self.returned_bytes = self._crossing_bytes(gradients=True)

    def _lost_to_others(self) -> FloatArray:
        """By type, the devices less what they do at once: k of them do the work of k / slowdown."""
        lost = np.zeros(len(self.types))
        for host in self.cluster.hosts:
            numbers = np.arange(1, len(host.slowdown) + 1)
            most = float((numbers / np.array(host.slowdown)).max())
            kinds = [self.cluster.type_of(name) for name in host.devices]
            lost += [max(0.0, kinds.count(name) - most) for name in self.types]
        return lost

    def _seconds(self, layer: Layer, type_name: str) -> tuple[float, ...]:
        """Forward, gradient on its way, whole backward, what remains, forward again; at least."""
        forward, inputs, weights, whole = self.costs.seconds(layer, type_name)
        again = self.costs.seconds(layer, type_name, loading=False)[
            0
        ]  # Running again waits for no batch.
        if not self.space.splits:
            return forward, whole, whole, 0.0, again
        if self.space.backward == "split":
            return forward, inputs, inputs + weights, weights, again
        gradient = min(whole, inputs)
        remains = min(whole - gradient, weights)
        return forward, gradient, min(whole, inputs + weights), remains, again

    def _crossing_bytes(self, *, gradients: bool) -> FloatArray:
        totals = np.zeros(len(self.rows) + 1)
        for tensor in self.graph.boundaries:
            if tensor.requires_grad or not gradients:
                last = max((self.position[user] for user in tensor.users), default=-1)
                totals[self.position[tensor.producer] + 1 : last + 1] += moved_bytes(tensor)
        return totals

    @property
    def most_sharers(self) -> int:
        """Devices that share the optimizer's state of a parameter, at most."""
        return len(self.cluster.devices) if self.space.shards_state else 1

    @cached_property
    def optimizer_bytes_per_s(self) -> FloatArray:
        """What an optimizer step moves a second, by type."""
        kinds = self.cluster.device_types
        return np.array([kinds[name].optimizer_gb_per_s * 1e9 for name in self.types])

    def on_fastest(self, seconds: FloatArray) -> FloatArray:
        """Return seconds of each layer on the fastest type that may run it."""
        return np.asarray(np.where(self.may_run, seconds, np.inf).min(axis=0))

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

    Attributes:
        layers: the same.
        count: of cuts, one more than layers.
        is_stage: whether an interval has layers.
        forward_s, gradient_s, backward_s, weight_s: by type and interval.
        own_gradient_bytes: that the replicas of a stage reduce alone, at least.
        shared_gradient_bytes: that a stage reduces together with other stages, at least.
        static_bytes: weights, gradients and optimizer state of a stage.
        step_s: the optimizer step, by type and interval.
        kept_bytes: what each layer keeps of a microbatch, at least.
        fits: whether a type may run an interval and has memory for a microbatch of it.

    Raises:
        PipeplanError: if there are too many.
    """

    def __init__(self, layers: ProvedLayers) -> None:
        length = len(layers.rows)
        if length > MOST_LAYERS:
            raise PipeplanError(
                f"certificate: {length} layers are too many to check (at most {MOST_LAYERS})"
            )
        if len(layers.holders) * length**2 > MOST_TIED:
            raise PipeplanError("certificate: parameters are shared in too many ways to check")
        self.layers, self.count = layers, length + 1
        self._begin, self._end = np.arange(self.count)[:, None], np.arange(self.count)
        self.is_stage = self._end > self._begin
        self.forward_s, self.gradient_s, self.backward_s, self.weight_s = map(
            self.sums, (layers.forward_s, layers.gradient_s, layers.backward_s, layers.weight_s)
        )
        self._add_parameters()
        self.kept_bytes = self._kept_bytes()
        capacity = np.array([layers.costs.capacity_bytes(name) for name in layers.types])
        enough = self.static_bytes + self.sums(self.kept_bytes) <= capacity[:, None, None]
        foreign = self.sums((~layers.may_run).astype(float))
        self.fits = enough & (foreign == 0) & self.is_stage

    def sums(self, per_layer: FloatArray) -> FloatArray:
        """Return sums of figures over each interval; 0 where there is none.

        Args:
            per_layer: the last axis are the layers.
        """
        prefix = np.zeros((*per_layer.shape[:-1], self.count))
        np.cumsum(per_layer, axis=-1, out=prefix[..., 1:])
        between = prefix[..., None, :] - prefix[..., :, None]
        return np.where(self.is_stage, np.maximum(between, 0.0), 0.0)

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
        inside = [(self._begin <= n) & (n < self._end) for n in numbers]
        return np.any(inside, axis=0), np.all(inside, axis=0)

    def _add_parameters(self) -> None:
        """Add up what intervals reduce, step and hold of their parameters."""
        own, shared, traffic, static = (np.zeros(self.is_stage.shape) for _ in range(4))
        layers, costs, sharers = self.layers, self.layers.costs, self.layers.most_sharers
        parameters = {row.name: row for row in layers.graph.parameters}
        for numbers, names in layers.holders.items():
            some, every = self._held(numbers)
            rows = [parameters[name] for name in names]
            trained = [row for row in rows if row.trainable]
            gradient = float(sum(map(costs.least_reduced_bytes, trained)))
            # What replicas divide is reduced by every backward, which no bound counts.
            divided = layers.space.shards_parameters and len(numbers) == 1
            own += every * (0.0 if divided else gradient)
            if not layers.tied_in_turn:
                shared += (some & ~every) * gradient
            elif layers.space.has_pipelines:
                own += (some & ~every) * gradient
            traffic += some * (float(sum(map(costs.stepped_bytes, trained))) / sharers)
            held = (costs.static_bytes(row, sharers, in_parts=divided) for row in rows)
            static += some * float(sum(held))
        self.own_gradient_bytes, self.shared_gradient_bytes = own, shared
        self.static_bytes = static
        self.step_s = traffic / layers.optimizer_bytes_per_s[:, None, None]

    def _kept_bytes(self) -> FloatArray:
        """A layer's stash or, run again, the tensors it starts from; nothing if all may offload."""
        if self.layers.space.offload:
            return np.zeros(len(self.layers.rows))
        stash = np.array([float(row.stash_bytes) for row in self.layers.rows])
        if not self.layers.space.recompute:
            return stash
        starts = np.zeros(len(stash))
        for tensor in self.layers.graph.boundaries:
            alone = tensor.saved_by is None and len(set(tensor.users)) == 1
            if alone or tensor.saved_by in tensor.users:
                layer = tensor.users[0] if tensor.saved_by is None else tensor.saved_by
                starts[self.layers.position[layer]] += tensor.bytes
        return np.asarray(np.minimum(stash, starts))
