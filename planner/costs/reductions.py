"""All-reduces of gradients: those of a partition, and the time they take after the backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from planner.cluster.cluster import Cluster
from planner.costs.collectives import (
    CollectiveLoad,
    GradientBucket,
    ReducedBytes,
    all_reduce_s,
    collective_load,
    fastest_all_reduce_s,
    fastest_ring_half_s,
    gradient_buckets,
    ring_half_load,
    ring_half_s,
)
from planner.costs.gradients import gradient_bytes
from planner.costs.roofline import OperationTimes
from planner.model.graph_record import Parameter
from planner.plan.problem import Problem

if TYPE_CHECKING:
    from planner.costs.placed_pipeline import StageSpec

TimesByDevice = Mapping[str, Sequence[OperationTimes]]
"""The seconds of each layer of a stage, in the order of the graph, by device."""


@dataclass(frozen=True)
class GradientReduction:
    """A reduction of gradients, after or during the last backward of ``stages`` on ``devices``.

    It is an all-reduce; or, where its devices share the optimizer's state of these parameters, a
    reduce-scatter, and an all-gather of parameters after the optimizer's step, of fewer bytes where
    gradients are float32 and parameters are not.

    Attributes:
        stages: one, or those that hold tied parameters.
        devices: that hold them.
        among: all devices that take part, of all groups, in the cluster's order.
        bytes: of the gradients.
        seconds: of the all-reduce or the reduce-scatter.
        bucket: number of the bucket among those of the stage; 0 of gradients reduced at once.
        ahead: by device, the seconds of the layers before those of the bucket, whose gradients a
            backward makes after the bucket's; empty of gradients that wait for its end.
        gathered_bytes: of the parameters that an all-gather hands out if this is a reduce-scatter;
            0: it is an all-reduce.
        gather_s: seconds of that all-gather.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    among: tuple[str, ...]
    bytes: int
    seconds: float
    bucket: int = 0
    ahead: Mapping[str, OperationTimes] = field(default_factory=dict, compare=False)
    gathered_bytes: int = 0
    gather_s: float = 0.0

    @property
    def gathers(self) -> bool:
        """Whether it is a reduce-scatter, and an all-gather follows the optimizer's step."""
        return self.gathered_bytes > 0

    def load(self, cluster: Cluster) -> CollectiveLoad:
        """Return what the all-reduce or the reduce-scatter asks of a cluster's links."""
        asked = ring_half_load if self.gathers else collective_load
        return asked(cluster, self.among, self.bytes)

    def gather_load(self, cluster: Cluster) -> CollectiveLoad:
        """Return what the all-gather asks of a cluster's links; nothing without one."""
        if not self.gathers:
            return CollectiveLoad()
        return ring_half_load(cluster, self.among, self.gathered_bytes)

    def ahead_s(self, kind: str, device: str) -> float:
        """Return how long before the end of a last backward (B or W) the gradients are there."""
        return self.ahead[device].seconds(kind) if self.ahead else 0.0


_Reducers = tuple[tuple[int, ...], tuple[str, ...]]
"""The stages and the devices of a reduction; its buckets have the same."""


def _reducers(reduction: GradientReduction) -> _Reducers:
    return reduction.stages, reduction.devices


class CollectiveSeconds(NamedTuple):
    """Seconds of a reduction, and of the all-gather that follows the optimizer's step, if any."""

    reduction_s: float
    gather_s: float


@dataclass(frozen=True)
class ReductionTails:
    """The time from the last backward of a stage to the end of its device's collectives.

    The optimizer's step between reductions and all-gathers is not in it.

    Attributes:
        cluster: whose devices reduce.
        reductions: all of an iteration, in the order in which a device starts them.
        overlap: whether gradients are reduced in buckets while the last backwards still run.
        fastest: whether each all-reduce has the best order of its devices, not the cluster's.
    """

    cluster: Cluster
    reductions: Sequence[GradientReduction]
    overlap: bool
    fastest: bool = False

    @cached_property
    def _seconds(self) -> Mapping[GradientReduction, CollectiveSeconds]:
        if not self.fastest:
            return {row: CollectiveSeconds(row.seconds, row.gather_s) for row in self.reductions}
        keys = {row: (row.devices, row.bytes, row.gathered_bytes) for row in self.reductions}
        seconds = {key: self._of_bytes(*key) for key in set(keys.values())}
        return {row: seconds[key] for row, key in keys.items()}

    def _of_bytes(self, devices: Sequence[str], bytes_: int, gathered: int) -> CollectiveSeconds:
        collective_s = _fastest_s if self.fastest else _listed_s
        return collective_s(self.cluster, devices, bytes_, gathered)

    @cached_property
    def _at_once_s(self) -> Mapping[_Reducers, float]:
        """The least seconds of reducing all buckets of the same stages at once.

        It is no less than that of any bucket, also where the devices here are only some of those
        that reduce.
        """
        found = {}
        for reducers in dict.fromkeys(map(_reducers, self.reductions)):
            buckets = [sync for sync in self.reductions if _reducers(sync) == reducers]
            seconds = [self._seconds[bucket] for bucket in buckets]
            if len(buckets) > 1:
                total = sum(bucket.bytes for bucket in buckets)
                gathered = sum(bucket.gathered_bytes for bucket in buckets)
                seconds.append(self._of_bytes(buckets[0].devices, total, gathered))
            found[reducers] = sum(map(max, zip(*seconds, strict=True)))
        return found

    @cached_property
    def _of_stage(self) -> Mapping[tuple[int, str], Sequence[GradientReduction]]:
        """The reductions of each stage in which each device takes part."""
        found: dict[tuple[int, str], list[GradientReduction]] = {}
        for sync in self.reductions:
            for stage in sync.stages:
                for device in sync.devices:
                    found.setdefault((stage, device), []).append(sync)
        return found

    def tail_s(self, stage: int, device: str) -> float:
        """Return the least time of a stage's collectives behind its last backward on a device.

        A device reduces one after the other. Bucket number i and all after it, tied parameters
        last, begin no earlier than this device has the gradients of bucket i, ``ahead`` of the end
        of its last backward at most: from then on they take the sum of their times. That holds for
        every i. Whether the last backward is whole (B) or the weight gradient of a split one (W)
        is not known; the longer time ahead holds for both. Where reductions may overlap, a plan may
        also reduce everything at once after the last backward: many buckets may take longer by
        their latencies than they gain. All-gathers follow the optimizer's step: nothing hides them.

        Args:
            stage: number of the stage.
            device: one of its replicas.
        """
        seconds = self._seconds
        own = self._of_stage.get((stage, device), ())
        left_s = sum(seconds[sync].reduction_s for sync in own)
        gather_s = sum(seconds[sync].gather_s for sync in own)
        if not self.overlap:
            return left_s + gather_s
        tail_s = 0.0
        for sync in own:
            ahead_s = max(sync.ahead_s(kind, device) for kind in "BW")
            tail_s = max(tail_s, left_s - ahead_s)
            left_s -= seconds[sync].reduction_s
        once = sum(self._at_once_s[key] for key in dict.fromkeys(map(_reducers, own)))
        return min(tail_s + gather_s, once)


def _listed_s(
    cluster: Cluster, devices: Sequence[str], bytes_: int, gathered_bytes: int
) -> CollectiveSeconds:
    if not gathered_bytes:
        return CollectiveSeconds(all_reduce_s(cluster, devices, bytes_), 0.0)
    return CollectiveSeconds(*(ring_half_s(cluster, devices, b) for b in (bytes_, gathered_bytes)))


def _fastest_s(
    cluster: Cluster, devices: Sequence[str], bytes_: int, gathered_bytes: int
) -> CollectiveSeconds:
    if not gathered_bytes:
        return CollectiveSeconds(fastest_all_reduce_s(cluster, devices, bytes_), 0.0)
    both = (fastest_ring_half_s(cluster, devices, b) for b in (bytes_, gathered_bytes))
    return CollectiveSeconds(*both)


def gradient_reductions(
    problem: Problem,
    stages: Sequence[StageSpec],
    parameters: Sequence[Sequence[Parameter]],
    times: Sequence[TimesByDevice],
    bucket_bytes: float | None,
    groups: Sequence[Mapping[str, str]],
) -> tuple[GradientReduction, ...]:
    """Return the all-reduces of an iteration: each stage's, then those of tied parameters.

    Tied gradients that are reduced in turn (``tied`` of the runtime) are among those of each stage
    that holds them, and afterwards reduced among these stages replica by replica, whole even where
    replicas share the optimizer's state (Megatron-LM, ``finalize_model_grads.py``).

    Args:
        problem: whose job sets the precision and whose cluster has the links.
        stages: in pipeline order.
        parameters: held by each stage.
        times: of the layers of each stage.
        bucket_bytes: the size of buckets reduced while the last backwards still run; None: all
            gradients of a stage are reduced at once, after its last backward.
        groups: if the stages are on one of several equal groups of devices: of each group, its
            device for each of the stages'; gradients are reduced among all groups.
    """
    graph, tied = problem.graph, _tied_parameters(parameters)
    sizes = {p.name: _reduced_bytes(problem, p) for held in parameters for p in held}
    held_by = [stage.devices for stage in stages]
    in_turn = {holders for holders in tied.values() if reduces_in_turn(problem, held_by, holders)}
    apart = {name for name, holders in tied.items() if holders not in in_turn}
    # Of what replicas divide, each backward scatters its sum.
    apart |= problem.divided_parameters
    own = [[p for p in held if p.trainable and p.name not in apart] for held in parameters]
    wanted: dict[tuple[int, ...], list[ReducedBytes]]
    wanted = {(index,): [sizes[p.name] for p in held] for index, held in enumerate(own)}
    for name, holders in tied.items():
        wanted[holders] = [*wanted.get(holders, ()), sizes[name]]
    rows: list[GradientReduction] = []
    # What a file lists first decides nothing: stages in order, then what several of them hold.
    for group in sorted(wanted, key=lambda stages: (len(stages) > 1, stages)):
        size, index = ReducedBytes.sum(wanted[group]), group[0]
        if group in in_turn:
            rows += _among_stages(problem, group, [held_by[stage] for stage in group], size.bytes)
            continue
        members = {device for stage in group for device in stages[stage].devices}
        devices = _in_order(problem, members)
        everywhere = [names[d] for names in groups for d in devices] or devices
        if len(everywhere) < 2 or not size.bytes:
            continue
        whole = _reduction(problem.cluster, group, devices, _in_order(problem, everywhere), size)
        if bucket_bytes is None or len(group) > 1:
            rows.append(whole)
        else:
            layers = [graph.layers[name] for name in graph.in_order(stages[index].layers)]
            mine = {p.name: sizes[p.name] for p in own[index]}
            buckets = gradient_buckets(layers, mine, bucket_bytes)
            rows += _bucket_reductions(problem.cluster, whole, buckets, times[index])
    return tuple(rows)


def _reduced_bytes(problem: Problem, parameter: Parameter) -> ReducedBytes:
    """Return the bytes of a parameter that devices reduce, and gather if they share its state."""
    gathered = parameter.bytes if problem.job.shards_state else 0
    return ReducedBytes(gradient_bytes(problem.job, parameter), gathered)


def _reduction(
    cluster: Cluster,
    stages: tuple[int, ...],
    devices: tuple[str, ...],
    among: tuple[str, ...],
    size: ReducedBytes,
) -> GradientReduction:
    """Return the reduction of parameters of some size, at once."""
    reduction_s, gather_s = _listed_s(cluster, among, *size)
    return GradientReduction(
        stages, devices, among, size.bytes, reduction_s, 0, {}, size.gathered, gather_s
    )


def reduces_in_turn(
    problem: Problem, devices: Sequence[Sequence[str]], holders: Sequence[int]
) -> bool:
    """Return whether a tied gradient is reduced among replicas, and then among stages.

    Args:
        problem: whose runtime has the rule.
        devices: of each stage.
        holders: the stages that hold the parameter; one that has no replicas of another's is
            reduced among all at once.
    """
    counts = {len(devices[stage]) for stage in holders}
    return problem.runtime.tied == "in_turn" and len(holders) > 1 and len(counts) == 1


def _among_stages(
    problem: Problem, stages: tuple[int, ...], devices: Sequence[Sequence[str]], bytes_: int
) -> Iterator[GradientReduction]:
    """Yield the all-reduce of tied gradients among stages for each of their replicas."""
    for replica in zip(*devices, strict=True):
        among = _in_order(problem, set(replica))
        if len(among) > 1 and bytes_:
            seconds = all_reduce_s(problem.cluster, among, bytes_)
            yield GradientReduction(stages, among, among, bytes_, seconds)


def _in_order(problem: Problem, devices: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(devices, key=problem.cluster.numbers.__getitem__))


def _bucket_reductions(
    cluster: Cluster,
    whole: GradientReduction,
    buckets: Sequence[GradientBucket],
    times: TimesByDevice,
) -> Iterator[GradientReduction]:
    """Yield the reductions of a stage's buckets, in the order in which they are filled.

    Args:
        cluster: of the devices.
        whole: the reduction of all of them.
        buckets: of the stage.
        times: of its layers.
    """
    nothing = OperationTimes(0.0, 0.0, 0.0, 0.0)
    by_row = {id(rows): rows for rows in times.values()}
    before = {row: list(accumulate(rows, initial=nothing)) for row, rows in by_row.items()}
    of_size = {
        size: _reduction(cluster, whole.stages, whole.devices, whole.among, size)
        for size in {bucket.size for bucket in buckets}
    }
    for number, bucket in enumerate(buckets):
        ahead = {device: before[id(times[device])][bucket.first_layer] for device in whole.devices}
        yield replace(of_size[bucket.size], bucket=number, ahead=ahead)


def _tied_parameters(parameters: Sequence[Sequence[Parameter]]) -> dict[str, tuple[int, ...]]:
    """Return trainable parameters held by several stages, with these stages."""
    holders: dict[str, list[int]] = {}
    for index, held in enumerate(parameters):
        for parameter in held:
            if parameter.trainable:
                holders.setdefault(parameter.name, []).append(index)
    return {name: tuple(held) for name, held in holders.items() if len(held) > 1}
