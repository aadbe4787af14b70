"""What layers and all intervals of them take at least: the figures that every argument reads."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import PipeplanError
from planner.model.graph_record import Layer, Parameter
from planner.plan.problem import Problem
from planner.space import Space
from planner.verification.layer_costs import ProblemCosts, moved_bytes

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FAR = 1e60
"""Seconds where something is impossible: above any bound, and no sum of such overflows."""
MARGIN = 1 + 1e-9
"""A time is refuted only if one that is longer by this factor is: rounding refutes nothing."""
MOST_LAYERS = 400
"""Layers of a chain of which all intervals are looked at."""
MOST_TIED = 2e8
"""Sets of layers that share parameters, times intervals, that are looked at."""


class Seconds(NamedTuple):
    """Least seconds of a microbatch; the first axis is the device type.

    Attributes:
        forward: with the wait for the loader.
        gradient: from a gradient that arrives to the one that is sent back.
        backward: all of the backward, whole or split.
        weight: of the backward, what follows the gradient that is sent back.
        again: a forward that runs again, without the wait.
    """

    forward: FloatArray
    gradient: FloatArray
    backward: FloatArray
    weight: FloatArray
    again: FloatArray


class ParameterFigures(NamedTuple):
    """What each interval of layers does with its parameters, at least.

    Attributes:
        own_bytes: of gradients that the replicas of a stage reduce alone.
        shared_bytes: of gradients that a stage reduces together with other stages.
        static_bytes: of weights, gradients and optimizer state.
        stepped_bytes: that the optimizer step moves.
    """

    own_bytes: FloatArray
    shared_bytes: FloatArray
    static_bytes: FloatArray
    stepped_bytes: FloatArray


class TiedPair(NamedTuple):
    """Parameters that the same two layers hold.

    Attributes:
        bytes: of the gradients.
        first_alone, last_alone: intervals that hold only that one of the layers.
    """

    bytes: float
    first_alone: BoolArray
    last_alone: BoolArray


class Figures:
    """Least figures of T types of devices, N layers, and intervals of them: [i, j] is layers i:j.

    Args:
        problem: the layer graph, the cluster and the job.
        space: freedoms of the plans that a bound is about.

    Attributes:
        graph, cluster, space: of the problem and the bound.
        costs: of single layers and parameters.
        layers: of the graph.
        microbatches: their number.
        tied_in_turn: whether stages that hold a parameter reduce its gradient after their replicas.
        types: names of the device types in use.
        counts: (T) devices of each.
        at_once: (T) devices that compute at full speed at once, at most: fewer than there are on
            hosts whose devices slow each other.
        capacity_bytes: (T) memory that a plan may use of a device.
        of_layer: (T, N) seconds.
        position: number of each layer by name.
        may_run: (T, N) whether a type may run a layer.
        sent_bytes, returned_bytes: (N + 1) activations and gradients that pass each cut.
    """

    def __init__(self, problem: Problem, space: Space) -> None:
        self.graph, self.cluster, self.space = problem.graph.record, problem.cluster, space
        self.costs = ProblemCosts(problem.cluster, problem.job)
        self.layers, self.microbatches = self.graph.layers, problem.job.microbatches
        self._rules = problem.runtime.behaviour
        self.tied_in_turn = problem.runtime.tied == "in_turn"
        kinds = [device.type for device in problem.cluster.devices]
        self.types = list(dict.fromkeys(kinds))
        self.counts = np.array([kinds.count(name) for name in self.types])
        self.at_once = self.counts - self._lost_to_others()
        self.capacity_bytes = np.array([self.costs.capacity_bytes(name) for name in self.types])
        seconds = [
            [self._seconds(row, name) for row in self.graph.on_types.get(name, self.graph).layers]
            for name in self.types
        ]
        self.of_layer = Seconds(*np.moveaxis(np.array(seconds), 2, 0))
        self.may_run = np.array([[row.may_run_on(n) for row in self.layers] for n in self.types])
        self.position = {row.name: number for number, row in enumerate(self.layers)}
        self.sent_bytes, self.returned_bytes = np.zeros((2, len(self.layers) + 1))
        for tensor in self.graph.boundaries:
            last = max((self.position[user] for user in tensor.users), default=-1)
            cuts = slice(self.position[tensor.producer] + 1, last + 1)
            self.sent_bytes[cuts] += moved_bytes(tensor)
            self.returned_bytes[cuts] += moved_bytes(tensor) * tensor.requires_grad

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
        """Return the figures of :class:`Seconds`."""
        forward, inputs, weights, whole = self.costs.seconds(layer, type_name)
        again = self.costs.seconds(layer, type_name, loading=False)[0]
        if not self.space.splits:
            return forward, whole, whole, 0.0, again
        if self.space.backward == "split":
            return forward, inputs, inputs + weights, weights, again
        gradient, backward = min(whole, inputs), min(whole, inputs + weights)
        return forward, gradient, backward, min(whole - gradient, weights), again

    def waits_s(self, received: FloatArray, sent: FloatArray) -> FloatArray:
        """Return what devices wait at least for a microbatch's messages before and behind a stage.

        An exchange has one message or two, with ``pairs`` four, and takes at least their mean. The
        seconds that come in are of activations and of gradients, by device and cut.
        """
        receives, sends = (way == "blocking" for way in (self._rules.receive, self._rules.send))
        many = receives and sends and self._rules.streams == "several"
        at_once = {"single": 1, "pairs": 4}.get(self._rules.exchange, 2) if many else 1
        # Gradients leave to where activations come from, and the other way round.
        return (receives * received + sends * np.flip(sent, axis=0)) / at_once

    def on_fastest(self, seconds: FloatArray) -> FloatArray:
        """Return seconds (T, N) of each layer on the fastest type that may run it."""
        return np.asarray(np.where(self.may_run, seconds, np.inf).min(axis=0))

    @property
    def most_sharers(self) -> int:
        """Devices that share the optimizer's state of a parameter, at most."""
        return len(self.cluster.devices) if self.space.shards_state else 1

    @cached_property
    def optimizer_bytes_per_s(self) -> FloatArray:
        """(T) bytes that an optimizer step moves in a second."""
        kinds = self.cluster.device_types
        return np.array([kinds[name].optimizer_gb_per_s * 1e9 for name in self.types])

    @cached_property
    def holders(self) -> dict[tuple[int, ...], list[Parameter]]:
        """Parameters by the layers that hold them."""
        held, rows = defaultdict(list), {row.name: row for row in self.graph.parameters}
        for number, layer in enumerate(self.layers):
            for name in dict.fromkeys(layer.parameters):
                held[name].append(number)
        sets = defaultdict(list)
        for name, numbers in held.items():
            sets[tuple(numbers)].append(rows[name])
        return sets

    # --- intervals of layers ----------------------------------------------------------------------

    def require_few_layers(self) -> None:
        """Refuse a chain with too many intervals.

        Raises:
            PipeplanError: if it has.
        """
        count = len(self.layers)
        if count > MOST_LAYERS:
            raise PipeplanError(
                f"certificate: {count} layers are too many to check (at most {MOST_LAYERS})"
            )
        if len(self.holders) * count**2 > MOST_TIED:
            raise PipeplanError("certificate: parameters are shared in too many ways to check")

    @cached_property
    def _ends(self) -> tuple[IntArray, IntArray]:
        return np.arange(len(self.layers) + 1)[:, None], np.arange(len(self.layers) + 1)

    @cached_property
    def is_stage(self) -> BoolArray:
        """Whether an interval has layers."""
        return np.asarray(self._ends[0] < self._ends[1])

    def sums(self, per_layer: FloatArray) -> FloatArray:
        """Return sums over each interval of figures whose last axis are the layers."""
        prefix = np.insert(np.cumsum(per_layer, axis=-1), 0, 0.0, axis=-1)
        between = prefix[..., None, :] - prefix[..., :, None]
        return np.where(self.is_stage, np.maximum(between, 0.0), 0.0)

    @cached_property
    def of_interval(self) -> Seconds:
        """(T, N + 1, N + 1) seconds."""
        return Seconds(*map(self.sums, self.of_layer))

    def _held(self, numbers: tuple[int, ...]) -> tuple[BoolArray, BoolArray]:
        """Return whether an interval contains some of these layers, and whether all."""
        begin, end = self._ends
        inside = [(begin <= n) & (n < end) for n in numbers]
        return np.any(inside, axis=0), np.all(inside, axis=0)

    @cached_property
    def parameters(self) -> ParameterFigures:
        """What intervals reduce, hold and step of their parameters."""
        found = ParameterFigures(*np.zeros((4, *self.is_stage.shape)))
        costs, sharers = self.costs, self.most_sharers
        for numbers, rows in self.holders.items():
            some, every = self._held(numbers)
            trained = [row for row in rows if row.trainable]
            gradient = float(sum(map(costs.least_reduced_bytes, trained)))
            # What replicas divide is reduced by every backward, which no bound counts.
            divided = self.space.shards_parameters and len(numbers) == 1
            found.own_bytes[:] += every * (0.0 if divided else gradient)
            if not self.tied_in_turn:
                found.shared_bytes[:] += (some & ~every) * gradient
            elif self.space.has_pipelines:
                found.own_bytes[:] += (some & ~every) * gradient
            held = (costs.static_bytes(row, sharers, in_parts=divided) for row in rows)
            found.static_bytes[:] += some * float(sum(held))
            stepped = float(sum(map(costs.stepped_bytes, trained)))
            found.stepped_bytes[:] += some * (stepped / sharers)
        return found

    @cached_property
    def step_s(self) -> FloatArray:
        """(T, N + 1, N + 1) seconds of the optimizer step."""
        return np.asarray(self.parameters.stepped_bytes / self.optimizer_bytes_per_s[:, None, None])

    @cached_property
    def tied_pair(self) -> TiedPair | None:
        """The two layers that hold most parameters together; None if no two alone hold any.

        None as well where all that hold a parameter do not reduce its gradient at once.
        """
        reduced = self.costs.least_reduced_bytes
        pairs = [
            (float(sum(reduced(row) for row in rows if row.trainable)), numbers)
            for numbers, rows in self.holders.items()
            if len(numbers) == 2
        ]
        most, numbers = max(pairs, default=(0.0, ()))
        if self.tied_in_turn or not most:
            return None
        first, last = (self._held((number,))[0] for number in numbers)
        return TiedPair(most, first & ~last, last & ~first)

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """(N) What a layer keeps of a microbatch: its stash or, run again, what it starts from.

        Nothing if all of it may be offloaded.
        """
        stash = np.array([float(row.stash_bytes) for row in self.layers])
        if self.space.offload or not self.space.recompute:
            return stash * (not self.space.offload)
        starts = np.zeros(len(stash))
        for tensor in self.graph.boundaries:
            alone = tensor.saved_by is None and len(set(tensor.users)) == 1
            if alone or tensor.saved_by in tensor.users:
                layer = tensor.users[0] if tensor.saved_by is None else tensor.saved_by
                starts[self.position[layer]] += tensor.bytes
        return np.asarray(np.minimum(stash, starts))

    @cached_property
    def fits(self) -> BoolArray:
        """(T, N + 1, N + 1) whether a type may run an interval and holds a microbatch of it."""
        least = self.parameters.static_bytes + self.sums(self.kept_bytes)
        foreign = self.sums((~self.may_run).astype(float))
        enough = least <= self.capacity_bytes[:, None, None]
        return np.asarray(enough & (foreign == 0) & self.is_stage)
