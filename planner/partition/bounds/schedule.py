"""Lower bounds on the iteration time that hold for every schedule of a partition."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from planner.costs.placement import PlacedPipeline
from planner.costs.roofline import OperationTimes
from planner.costs.ways import Ways


def schedule_bound_s(pipeline: PlacedPipeline, *, split: bool = False) -> float:
    """No schedule of these stages on these devices is faster.

    For each stage: the earliest its first forward can start, plus the work of its most loaded
    replica under the best split of the microbatches, plus the way its last gradient still has to
    go to some earlier stage and that stage's reduction and optimizer step. For each channel
    between two single devices likewise. Where devices hold several stages: their own work, and the
    way of a single microbatch.

    The CP-SAT model of planner.partition minimises the same expression, for whole backwards.

    Args:
        pipeline: the stages.
        split: whether input and weight gradients may run apart.
    """
    ways, count = Ways(pipeline, split), pipeline.microbatches
    if any(len(stages) > 1 for stages in pipeline.stages_on.values()):
        return _shared_device_bound_s(ways)
    bound = 0.0
    for index in range(len(pipeline.stages)):
        through_s = balanced_load_s(ways, index, count) + ways.home[index]
        all_s = balanced_load_s(ways, index, count, weights=True) + ways.tail[index]
        bound = max(bound, ways.head[index] + max(through_s, all_s))
    for index in range(len(pipeline.stages) - 1):
        bound = max(bound, _channel_bound(ways, index))
    return bound


def _shared_device_bound_s(ways: Ways) -> float:
    """Several stages a device: its own work, and the way of a single microbatch."""
    pipeline = ways.pipeline
    path = sum(ways.forward) + sum(ways.gradient)
    singles = [d for s in pipeline.stages if len(s.spec.devices) == 1 for d in s.spec.devices]
    loads = [
        pipeline.optimizer_s[device]
        + sum(
            pipeline.microbatches * _each_s(ways, pipeline.stages[stage].times[device], True)
            for stage in pipeline.stages_on[device]
            if len(pipeline.stages[stage].spec.devices) == 1
        )
        for device in singles
    ]
    return max([path, *loads])


def balanced_load_s(ways: Ways, index: int, count: int, *, weights: bool = False) -> float:
    """The most loaded replica's work under the best split of the microbatches.

    Args:
        ways: of the pipeline.
        index: of the stage.
        count: of the microbatches.
        weights: count weight gradients that run apart as well.
    """
    times = ways.pipeline.stages[index].times.values()
    return fastest_split(Counter(_each_s(ways, each, weights) for each in times), count)


def _each_s(ways: Ways, times: OperationTimes, weights: bool) -> float:
    """Of a microbatch on a replica."""
    each_s = times.forward_s + ways.gradient_s(times)
    return each_s + ways.besides_s(times) if weights else each_s


def fastest_split(replicas: Mapping[float, int], count: int) -> float:
    """Least possible maximum of ``n_i * seconds_i`` over whole ``n_i`` that sum to ``count``.

    Args:
        replicas: how many take so many seconds for one of the ``count`` things.
        count: of the things, at least 1.
    """
    if min(replicas) <= 0:
        return 0.0
    return min(_least_multiple_s(seconds, replicas, count) for seconds in replicas)


def _least_multiple_s(seconds: float, replicas: Mapping[float, int], count: int) -> float:
    """The least whole multiple of some seconds within which the replicas take all things."""
    low, high = 1, count
    while low < high:
        middle = (low + high) // 2
        limit = middle * seconds * (1 + 1e-12)
        if sum(number * math.floor(limit / each) for each, number in replicas.items()) >= count:
            high = middle
        else:
            low = middle + 1
    return high * seconds


def _channel_bound(ways: Ways, index: int) -> float:
    """A channel between two single devices carries every microbatch, one after the other."""
    pipeline = ways.pipeline
    first, second = pipeline.stages[index], pipeline.stages[index + 1]
    if len(first.spec.devices) > 1 or len(second.spec.devices) > 1:
        return 0.0
    if not _is_exclusive(pipeline, index):
        return 0.0
    send, back, count = ways.send, ways.send_back, pipeline.microbatches
    head = sum(ways.forward[: index + 1]) + sum(send[:index])
    there = sum(ways.forward[index + 1 :]) + sum(send[index + 1 :])
    again = sum(ways.gradient[index + 1 :]) + sum(back[index + 1 :])
    last = back[index] + ways.gradient[index] + ways.home[index]
    forwards = head + count * send[index] + there + again + last
    first_back = head + send[index] + there + again
    backwards = first_back + count * back[index] + last - back[index]
    return max(forwards, backwards)


def _is_exclusive(pipeline: PlacedPipeline, index: int) -> bool:
    """Whether transfers of this channel wait for each other: shared links carry them at once."""
    (u,), (v,) = (pipeline.stages[i].spec.devices for i in (index, index + 1))
    return bool(pipeline.forward_transfer(index, u, v).links) and bool(
        pipeline.backward_transfer(index + 1, v, u).links
    )
