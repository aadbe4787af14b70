"""All-reduces of gradients: those of given stages, and the time they take after the backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.costs.collectives import all_reduce_s, ring_half_s
from planner.plan.problem import Problem


class Collectives(NamedTuple):
    """Seconds of the two kinds of collectives around a layer whose weights replicas divide.

    A device keeps 1/r of the weights and gradients of every layer, as of the optimizer's state.
    Before a layer's forward the r replicas gather its weights, and again before its backward; after
    that they reduce and scatter its gradients (Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao
    et al. 2023, "PyTorch FSDP"). Nothing hides these collectives: they are part of the operation.

    Attributes:
        gather: of weights, in a forward, a whole backward and an input gradient.
        reduction: of gradients, in a whole backward and a weight gradient.
    """

    gather: float = 0.0
    reduction: float = 0.0

    def in_operation(self, kind: str) -> float:
        """Return the sum of those in an operation of a kind."""
        return self.gather * (kind in "FBI") + self.reduction * (kind in "BW")


class CollectiveLoad(NamedTuple):
    """What a collective asks of links.

    Attributes:
        latency_s: of its seconds, those that are no bytes' on the edge that is slowest in that.
        gb_per_s: that every edge carries then.
        gather_latency_s: the same of the all-gather that follows a reduce-scatter.
        links: numbers of the directed links that its edges cross, each as often as they do.
    """

    latency_s: float
    gb_per_s: float
    gather_latency_s: float
    links: tuple[int, ...]


@dataclass(frozen=True)
class GradientReduction:
    """A reduction of gradients, after or during the last backward of ``stages`` on ``devices``.

    It is an all-reduce; or, where its devices share the optimizer's state of these parameters, a
    reduce-scatter, and an all-gather of parameters after the optimizer's step, of fewer bytes where
    gradients are float32 and parameters are not.

    Attributes:
        stages: one, or those that hold tied parameters.
        devices: that hold them, in the cluster's order.
        bytes: of the gradients.
        seconds: of the all-reduce or the reduce-scatter.
        load: what it asks of links.
        bucket: number of the bucket among those of the stage; 0 of gradients reduced at once.
        ahead: by stage and device, how long before the end of a last whole backward and of a last
            weight gradient it has made these gradients.
        gathered_bytes: of the parameters that an all-gather hands out if this is a reduce-scatter;
            0: it is an all-reduce.
        gather_s: seconds of that all-gather.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    bytes: int
    seconds: float
    load: CollectiveLoad
    bucket: int = 0
    ahead: Mapping[tuple[int, str], tuple[float, float]] = field(
        default_factory=dict, compare=False
    )
    gathered_bytes: int = 0
    gather_s: float = 0.0

    @property
    def gathers(self) -> bool:
        """Whether it is a reduce-scatter, and an all-gather follows the optimizer's step."""
        return self.gathered_bytes > 0

    def ahead_s(self, kind: str, stage: int, device: str) -> float:
        """Return how long before the end of a last backward (B or W) a replica has made it."""
        return self.ahead[stage, device]["BW".index(kind)]


_Reducers = tuple[tuple[int, ...], tuple[str, ...]]
"""The stages and the devices of a reduction; its buckets have the same."""


def _reducers(reduction: GradientReduction) -> _Reducers:
    return reduction.stages, reduction.devices


@dataclass(frozen=True)
class ReductionTails:
    """The time from the last backward of a stage to the end of its device's collectives.

    The optimizer's step between reductions and all-gathers is not in it.

    Attributes:
        cluster: whose devices reduce.
        reductions: all of an iteration, in the order in which a device starts them.
        overlap: whether gradients are reduced in buckets while the last backwards still run.
    """

    cluster: Cluster
    reductions: Sequence[GradientReduction]
    overlap: bool

    @cached_property
    def _at_once_s(self) -> Mapping[_Reducers, float]:
        """The least seconds of reducing all buckets of the same stages at once.

        It is no less than that of any bucket, also where the devices here are only some of those
        that reduce.
        """
        found = {}
        for reducers in dict.fromkeys(map(_reducers, self.reductions)):
            buckets = [sync for sync in self.reductions if _reducers(sync) == reducers]
            seconds = [(bucket.seconds, bucket.gather_s) for bucket in buckets]
            if len(buckets) > 1:
                gathered = sum(bucket.gathered_bytes for bucket in buckets)
                all_s = ring_half_s if gathered else all_reduce_s
                whole_s = all_s(self.cluster, reducers[1], sum(bucket.bytes for bucket in buckets))
                seconds.append((whole_s, ring_half_s(self.cluster, reducers[1], gathered)))
            found[reducers] = sum(map(max, zip(*seconds, strict=True)))
        return found

    @cached_property
    def _of_stage(self) -> Mapping[tuple[int, str], Sequence[GradientReduction]]:
        """The reductions of each stage in which each device takes part."""
        found: dict[tuple[int, str], list[GradientReduction]] = {}
        for sync in self.reductions:
            for stage, device in product(sync.stages, sync.devices):
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
        own = self._of_stage.get((stage, device), ())
        left_s = sum(sync.seconds for sync in own)
        gather_s = sum(sync.gather_s for sync in own)
        if not self.overlap:
            return left_s + gather_s
        tail_s = 0.0
        for sync in own:
            tail_s = max(tail_s, left_s - max(sync.ahead[stage, device]))
            left_s -= sync.seconds
        once = sum(self._at_once_s[key] for key in dict.fromkeys(map(_reducers, own)))
        return min(tail_s + gather_s, once)


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
