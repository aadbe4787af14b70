"""The layer graph as a chain: layers in executable order, with prefix sums for every interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.costs.gradients import gradient_bytes, least_reduced_bytes
from planner.costs.optimizer import most_holders, static_bytes, step_traffic_bytes
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import has_equal_groups
from planner.costs.roofline import OperationTimes, layer_times, loaded_times
from planner.model.graph_record import Parameter
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.search.partition.stash import StashModel

FloatArray = NDArray[np.float64]


def even_load_prices(seconds: FloatArray, counts: FloatArray) -> FloatArray:
    """Return price of a second on each device type, all devices together costing 1.

    By weak duality any such prices give a valid bound: each layer is paid at least its cheapest
    price. The dual values of the even-load linear program give the best one; they are made
    feasible here, so that the solver's tolerances cannot spoil the bound.

    Args:
        seconds: of each layer, by type: types x layers.
        counts: devices of each type.
    """
    if len(counts) == 1:
        return 1 / counts
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    scale = float(seconds.max()) or 1.0
    load = solver.NumVar(0, solver.infinity(), "load")
    shares = [[solver.NumVar(0, 1, "") for _ in row] for row in seconds]
    for layer in zip(*shares, strict=True):
        solver.Add(sum(layer) == 1)
    rows = []
    for row, times, count in zip(shares, seconds, counts, strict=True):
        work = sum(share * (t / scale) for share, t in zip(row, times, strict=True))
        rows.append(solver.Add(work <= load * count))
    solver.Minimize(load)
    solver.Solve()
    prices = np.array([max(0.0, -row.dual_value()) for row in rows])
    total = float((prices * counts).sum())
    return prices / total if total > 0 else 1 / (counts * len(counts))


IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class StageChoice:
    """A stage of the chain: layers ``begin`` to ``end`` (exclusive) on a set of devices.

    ``recompute`` are the positions of the layers that run again in the backward.
    """

    begin: int
    end: int
    devices: tuple[str, ...]
    recompute: tuple[int, ...] = ()


Partition = tuple[StageChoice, ...]


def without_recompute(partition: Partition) -> Partition:
    """Return the same stages on the same devices, nothing recomputed."""
    return tuple(replace(stage, recompute=()) for stage in partition)


@dataclass(frozen=True)
class Chain:
    """A problem's layers in a row. Position p is the cut before layer p, from 0 to ``length``.

    Attributes:
        problem: the layers, the cluster and the job.
        graph_of_type: whose bytes count; None: the problem's, which has the least of all types.
    """

    problem: Problem
    graph_of_type: LayerGraph | None = None

    @property
    def graph(self) -> LayerGraph:
        """The layer graph, with the bytes that count."""
        return self.problem.graph if self.graph_of_type is None else self.graph_of_type

    def on(self, device_type: str) -> Chain:
        """Return the chain with the bytes that devices of a type have, usually itself."""
        graph = self.problem.graph.on(device_type)
        if graph is self.problem.graph:
            return self
        if id(graph) not in self._on_types:
            self._on_types[id(graph)] = replace(self, graph_of_type=graph)
        return self._on_types[id(graph)]

    @cached_property
    def _on_types(self) -> dict[int, Chain]:
        """Chains with bytes of their own, as they are asked for."""
        return {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Layer names."""
        return tuple(self.graph.layers)

    @property
    def length(self) -> int:
        """Number of layers."""
        return len(self.names)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Positions at which stages may begin and end: both ends, and those that the job allows."""
        allowed = self.problem.job.cuts
        if allowed is None:
            return tuple(range(self.length + 1))
        inside = (p for p, name in enumerate(self.names) if p and name in set(allowed))
        return (0, *inside, self.length)

    @cached_property
    def may_cut(self) -> NDArray[np.bool_]:
        """Whether stages may begin and end at each position, 0 to length."""
        return np.isin(np.arange(self.length + 1), self.cuts)

    @property
    def stage_limit(self) -> int:
        """The most stages that the layers and the job allow, with any number of them a device."""
        most = len(self.cuts) - 1
        return min(self.problem.job.max_stages or most, most)

    @property
    def max_stages(self) -> int:
        """The most stages with one stage a device."""
        return min(self.stage_limit, len(self.problem.cluster.devices))

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Device types of the cluster, in order of first use."""
        return tuple(dict.fromkeys(d.type for d in self.problem.cluster.devices))

    @cached_property
    def layer_times(self) -> dict[str, tuple[OperationTimes, ...]]:
        """Times of each layer by device type."""
        problem = self.problem
        kinds, precision = problem.cluster.device_types, problem.job.precision
        return {
            name: tuple(
                layer_times(layer, name, kinds[name], precision)
                for layer in problem.graph.on(name).record.layers
            )
            for name in self.types
        }

    def forward_s(self, device_type: str) -> FloatArray:
        """Return forward seconds of each layer."""
        return np.array([times.forward_s for times in self.layer_times[device_type]])

    def again_s(self, device_type: str) -> FloatArray:
        """Return seconds that recomputing each layer adds to its backward.

        This is the forward without the wait for the loader: what was loaded is still there.
        """
        problem = self.problem
        kind, precision = problem.cluster.device_types[device_type], problem.job.precision
        layers = problem.graph.on(device_type).record.layers
        times = [loaded_times(layer, device_type, kind, precision) for layer in layers]
        return np.array([row.forward_s for row in times])

    def backward_s(self, device_type: str) -> FloatArray:
        """Return the least backward seconds of each layer, whole or, if allowed, split."""
        if not self.splits:
            return np.array([times.backward_s for times in self.layer_times[device_type]])
        return np.array(
            [
                min(times.backward_s, times.input_gradient_s + times.weight_gradient_s)
                for times in self.layer_times[device_type]
            ]
        )

    def last_backward_s(self, device_type: str) -> FloatArray:
        """Return the most seconds of each layer in the last operation that adds to its gradients.

        This is a whole backward or the weight gradient of a split one.
        """
        return np.array(
            [max(t.backward_s, t.weight_gradient_s) for t in self.layer_times[device_type]]
        )

    def gradient_s(self, device_type: str) -> FloatArray:
        """Return the least seconds of each layer from its gradient to the one it sends back.

        This is the whole backward or, if backwards may be split, the input gradient alone.
        """
        if not self.splits:
            return self.backward_s(device_type)
        return np.array(
            [
                min(times.backward_s, times.input_gradient_s)
                for times in self.layer_times[device_type]
            ]
        )

    def weight_s(self, device_type: str) -> FloatArray:
        """Return the least seconds of each layer's backward after the gradient it sends back."""
        if not self.splits:
            return np.zeros(self.length)
        return np.array(
            [
                min(times.backward_s - min(times.backward_s, times.input_gradient_s), w)
                for times in self.layer_times[device_type]
                for w in (times.weight_gradient_s,)
            ]
        )

    @cached_property
    def least_path_s(self) -> FloatArray:
        """Seconds of a microbatch's way forward and back through each layer, on its fastest type.

        Without weight gradients that run apart; read-only.
        """
        ways = [self.forward_s(name) + self.gradient_s(name) for name in self.types]
        return _read_only(np.min(ways, axis=0))

    @property
    def splits(self) -> bool:
        """Whether the job allows a backward to run as input and weight gradient."""
        return self.problem.job.splits

    @cached_property
    def work_s(self) -> FloatArray:
        """Forward and backward seconds of each layer, (types, layers); read-only."""
        return _read_only(np.array([self.forward_s(t) + self.backward_s(t) for t in self.types]))

    @cached_property
    def model_s(self) -> dict[str, float]:
        """Forward and backward seconds of all layers by device type."""
        return dict(zip(self.types, self.work_s.sum(axis=1).tolist(), strict=True))

    @cached_property
    def least_work_s(self) -> FloatArray:
        """Forward and backward seconds of each layer on its fastest type; read-only."""
        return _read_only(self.work_s.min(axis=0))

    @cached_property
    def least_forward_s(self) -> FloatArray:
        """Forward seconds of each layer on its fastest type; read-only."""
        return _read_only(np.min([self.forward_s(t) for t in self.types], axis=0))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The type of each device of the cluster, by its number in ``types``."""
        return tuple(self.types.index(device.type) for device in self.problem.cluster.devices)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many devices the cluster has of each type."""
        return tuple(self.kinds.count(k) for k in range(len(self.types)))

    @cached_property
    def load_prices(self) -> FloatArray:
        """Price of a second on each device type: see :mod:`planner.search.partition.chain`."""
        return even_load_prices(self.work_s, np.array(self.counts, dtype=float))

    @cached_property
    def capacities(self) -> FloatArray:
        """How many devices' worth of computation each type does at a time, at most.

        Fewer than there are devices, where those of a host slow each other.
        """
        cluster = self.problem.cluster
        found = np.zeros(len(self.types))
        for device in cluster.devices:
            found[self.types.index(device.type)] += device.name not in cluster.host_of
        for host in dict.fromkeys(cluster.host_of.values()):
            for name, count in Counter(map(cluster.type_of, host.devices)).items():
                found[self.types.index(name)] += min(count, host.capacity)
        return found

    @cached_property
    def work_prices(self) -> FloatArray:
        """Price of a second of computation on each device type, all that is done costing 1."""
        return even_load_prices(self.work_s, self.capacities)

    @cached_property
    def cut_bytes(self) -> IntArray:
        """Activation bytes that cross each position, 0 to length, in the mean over lengths."""
        return self._crossing(gradients=False)

    @cached_property
    def cut_gradient_bytes(self) -> IntArray:
        """Gradient bytes that cross each position backwards."""
        return self._crossing(gradients=True)

    def _crossing(self, *, gradients: bool) -> IntArray:
        position = {name: index for index, name in enumerate(self.names)}
        totals = np.zeros(self.length + 1, dtype=np.int64)
        for tensor in self.graph.record.boundaries:
            if gradients and not tensor.requires_grad:
                continue
            last = max(position[user] for user in tensor.users)
            totals[position[tensor.producer] + 1 : last + 1] += tensor.message_bytes
        return totals

    @cached_property
    def static_bytes(self) -> IntArray:
        """Weights, gradients and optimizer state of each layer; a tied parameter at its first.

        Of what devices share out, the least that one may hold of it. Sums over an interval are
        therefore never more than the interval's real need.
        """
        holders = most_holders(self.problem)
        seen: set[str] = set()
        rows = []
        for name in self.names:
            new = [p for p in self.graph.parameters_of([name]) if p.name not in seen]
            seen.update(parameter.name for parameter in new)
            rows.append(static_bytes(self.problem, new, holders))
        return np.array(rows, dtype=np.int64)

    @cached_property
    def shared_bytes(self) -> FloatArray | None:
        """What of each layer a stage's replicas share out; None if they share out nothing.

        It is the optimizer's state, or weights and gradients as well. Tied parameters are left out:
        which stages share their state depends on the partition.
        """
        job, own = self.problem.job, self.graph.own_parameters
        if not job.shards_state:
            return None

        def shared(row: Parameter) -> int:
            whole = row.bytes + gradient_bytes(job, row) if job.shards_parameters else 0
            return whole + row.elements * job.optimizer_bytes_per_element

        return np.array([sum(map(shared, own[name])) for name in self.names], dtype=float)

    @cached_property
    def gradient_bytes(self) -> IntArray:
        """Bytes each layer adds to its own stage's all-reduce at least, whatever the stages.

        Tied parameters are left out: which stages reduce them depends on the partition. So are
        those that replicas divide, whose gradients every backward reduces.
        """
        own, divided = self.graph.own_parameters, self.problem.divided_parameters
        mine = [[p for p in own[name] if p.name not in divided] for name in self.names]
        rows = [sum(least_reduced_bytes(self.problem.job, p) for p in row) for row in mine]
        return np.array(rows, dtype=np.int64)

    @property
    def reduces_tied_in_turn(self) -> bool:
        """Whether tied gradients are reduced among replicas first, as the others of a stage."""
        return self.problem.runtime.tied == "in_turn"

    def reduced_tied_bytes(
        self, held: FloatArray | IntArray, layers: Sequence[int], bytes_: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return the tied gradients that stages reduce within, and together with other stages.

        Where they are reduced in turn, what stages do among themselves is left out, and what
        replicas do if stages might have different numbers of them.

        Args:
            held: by stage, how many of the layers it has.
            layers: all that hold the parameters.
            bytes_: of their gradients.
        """
        every = np.where(held == len(layers), bytes_, 0.0)
        some = np.where((held > 0) & (held < len(layers)), bytes_, 0.0)
        none = np.zeros_like(some)
        if not self.reduces_tied_in_turn:
            return every, some
        return (every + some if self.problem.job.has_pipelines else every), none

    @cached_property
    def tied_parameters(self) -> dict[tuple[int, ...], int]:
        """Bytes that several layers reduce together at least, by the positions of these layers."""
        position = {name: index for index, name in enumerate(self.names)}
        holders: dict[str, list[int]] = {}
        for layer in self.graph.record.layers:
            for name in layer.parameters:
                holders.setdefault(name, []).append(position[layer.name])
        groups: dict[tuple[int, ...], int] = {}
        for name, held in holders.items():
            parameter = self.graph.parameters[name]
            if len(held) > 1 and parameter.trainable:
                bytes_ = least_reduced_bytes(self.problem.job, parameter)
                groups[tuple(held)] = groups.get(tuple(held), 0) + bytes_
        return groups

    @cached_property
    def optimizer_traffic_bytes(self) -> FloatArray:
        """What the optimizer step reads and writes for each layer; a tied parameter at its first.

        Weights are read and written, gradients read, the state read and written. Of parameters
        whose state devices share, it is the least part that one may have.
        """
        job, holders = self.problem.job, most_holders(self.problem)
        seen: set[str] = set()
        rows = []
        for name in self.names:
            held = self.graph.parameters_of([name])
            new = [p for p in held if p.trainable and p.name not in seen]
            seen.update(parameter.name for parameter in new)
            moved = sum(step_traffic_bytes(job, p) for p in new)
            rows.append(moved / holders)
        return np.array(rows, dtype=float)

    @cached_property
    def stash_bytes(self) -> IntArray:
        """Stash of each layer; sums over an interval are never more than a stage's."""
        return np.array([layer.stash_bytes for layer in self.graph.record.layers])

    @cached_property
    def peak_bytes(self) -> IntArray:
        """The most that each layer holds while it runs."""
        peaks = self.graph.peak_bytes
        return np.array([peaks[name] for name in self.names])

    @cached_property
    def stashes(self) -> StashModel:
        """What any stage keeps, depending on what it recomputes."""
        return StashModel(self.graph)

    @cached_property
    def _foreign(self) -> dict[str, IntArray]:
        """How many layers before each position may not run on a device type, by its name."""
        layers = self.graph.record.layers
        return {
            name: np.cumsum([0, *(not layer.may_run_on(name) for layer in layers)])
            for name in self.types
        }

    def foreign_layers(self, device_type: str) -> FloatArray:
        """Return 1 for each layer that may not run on a device type, else 0."""
        return np.diff(self._foreign[device_type]).astype(float)

    def keeps_rules(self, partition: Sequence[StageChoice]) -> bool:
        """Return whether cuts are allowed, and every layer may run on all devices of its stage.

        Tensor-parallel groups that hold the same parameters have to have one size.
        """
        cluster = self.problem.cluster
        if not all(self.may_cut[stage.end] for stage in partition):
            return False
        if not has_equal_groups(self.problem, self.specs(partition)):
            return False
        return all(
            self._foreign[name][stage.end] == self._foreign[name][stage.begin]
            for stage in partition
            for name in {cluster.type_of(device) for device in stage.devices}
        )

    @cached_property
    def least_bytes(self) -> IntArray:
        """What the layers before each position take at least with one microbatch in flight."""
        stash = self.stashes.kept_bytes if self.problem.job.recompute else self.stash_bytes
        return np.concatenate([[0], np.cumsum(self.static_bytes + stash)])

    def may_fit(self, partition: Sequence[StageChoice]) -> bool:
        """Return whether one microbatch fits each device, as far as sums over layers tell."""
        cluster = self.problem.cluster
        return all(
            least[stage.end] - least[stage.begin] <= cluster.device_type(device).capacity_bytes
            for stage in partition
            for device in stage.devices
            for least in (self.on(cluster.type_of(device)).least_bytes,)
        )

    def at_cuts(self, partition: Partition) -> Partition | None:
        """Return the partition with each cut at the nearest place that the job allows.

        Returns:
            None if a stage has no layers left.
        """
        if self.problem.job.cuts is None:
            return partition
        allowed = np.array(self.cuts)
        ends = [int(allowed[np.abs(allowed - stage.end).argmin()]) for stage in partition]
        begins = [0, *ends[:-1]]
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            return None
        return tuple(
            replace(stage, begin=begin, end=end)
            for stage, begin, end in zip(partition, begins, ends, strict=True)
        )

    def partition(self, stages: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Partition | None:
        """Return stages given by names of layers and devices, less the devices that are gone.

        Returns:
            None if they do not cut the chain in order, or a stage has no device left.
        """
        known = set(self.problem.cluster.device_names)
        choices, begin = [], 0
        for layers, devices in stages:
            end = begin + len(layers)
            held = tuple(device for device in devices if device in known)
            if not held or set(self.names[begin:end]) != set(layers):
                return None
            choices.append(StageChoice(begin, end, held))
            begin = end
        return tuple(choices) if begin == self.length else None

    def specs(self, partition: Sequence[StageChoice]) -> tuple[StageSpec, ...]:
        """Return the stages by layer names."""
        return tuple(
            StageSpec(
                self.names[stage.begin : stage.end],
                stage.devices,
                tuple(self.names[layer] for layer in stage.recompute),
            )
            for stage in partition
        )


def _read_only(values: FloatArray) -> FloatArray:
    """Return the same array, which is kept and handed out again and again."""
    values.setflags(write=False)
    return values
