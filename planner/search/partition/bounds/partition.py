"""Bounds on a partition whatever it recomputes, and on every plan by the total work."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from planner.costs.optimizer import static_bytes
from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.roofline import OperationTimes
from planner.search.partition.bounds.schedule import balanced_span_s, schedule_bound_s
from planner.search.partition.chain import Chain, Partition
from planner.search.partition.memory.recompute_variants import RecomputeVariants


def in_flight_bound_s(pipeline: PlacedPipeline, *, split: bool = False) -> float:
    """Return a time that no schedule of these stages, with what they recompute, beats.

    Of k microbatches in flight at a stage at most, sorted by their start, number m + k starts a
    round trip after number m at the earliest: when it starts, k - 1 others at most are unfinished,
    so at least m + 1 have ended, and the (m+1)-th to end has taken a round trip since a start not
    before number m's. The last ones take their span, a round trip at least. Stages
    that share a device with others are left out, their limits would be loose.

    Args:
        pipeline: the stages.
        split: whether input and weight gradients may run apart.

    Returns:
        Seconds; infinity if some stage has no room for a microbatch.
    """
    ways, bound = PathBounds(pipeline, split), 0.0
    shares = any(len(stages) > 1 for stages in pipeline.stages_on.values())
    for index, stage in enumerate(pipeline.stages):
        if all(len(pipeline.stages_on[device]) == 1 for device in stage.spec.devices):
            tail_s = 0.0 if shares else ways.drain[index]
            bound = max(bound, ways.head[index] + _blocks_s(ways, index) + tail_s)
    return bound


def _blocks_s(ways: PathBounds, index: int) -> float:
    """Return the seconds from a stage's first forward to its last backward."""
    count = ways.pipeline.microbatches
    limit, round_trip_s = ways.most_in_flight[index], ways.round_trip[index]
    if limit == 0:
        return float("inf")
    before = -(-count // limit) - 1
    last = max(round_trip_s, balanced_span_s(ways, index, count - before * limit))
    return before * round_trip_s + last


class PartitionBound:
    """Bounds of one chain's partitions, whatever they recompute and however they are scheduled.

    Args:
        chain: the layers.
        variants: what is known of recomputing them.
    """

    def __init__(self, chain: Chain, variants: RecomputeVariants | None = None) -> None:
        self._chain = chain
        self._variants = variants or RecomputeVariants(chain)

    def bound_s(self, partition: Partition, pipeline: PlacedPipeline) -> float:
        """Return a time that no schedule beats; infinity if it is proved that none fits.

        Args:
            partition: stages on devices, nothing recomputed.
            pipeline: the same stages placed.
        """
        if self._variants.fits_never(partition, pipeline):
            return math.inf
        light, split = with_least_stash(self._chain, partition, pipeline), self._chain.splits
        return max(schedule_bound_s(pipeline, split=split), in_flight_bound_s(light, split=split))


def with_least_stash(
    chain: Chain, partition: Partition, pipeline: PlacedPipeline
) -> PlacedPipeline:
    """Return a pipeline with least times and stashes, whose bounds hold for any recomputation.

    Args:
        chain: the layers.
        partition: stages on devices.
        pipeline: the same stages placed, nothing recomputed.
    """
    if not chain.problem.job.recompute:
        return pipeline
    stages = []
    for stage, placed in zip(partition, pipeline.stages, strict=True):
        own = chain.on(chain.problem.cluster.type_of(stage.devices[0])).stashes
        least = own.kept_bytes[stage.begin : stage.end].sum() + own.received_bytes[stage.begin]
        stages.append(replace(placed, stash_bytes=int(least)))
    return replace(pipeline, stages=tuple(stages))


def work_bound_s(chain: Chain) -> float:
    """Return a time that no plan beats, with any number of stages a device and any schedule.

    The larger of: all layers' work, spread over the devices as evenly as fractions allow (of a host
    whose devices slow each other, over as many as it keeps at full speed), and one
    microbatch's way through all layers and back, each on its fastest type.
    """
    path = float(chain.least_path_s.sum())
    even = float((chain.work_prices[:, None] * chain.work_s).min(axis=0).sum())
    return max(path, chain.problem.job.microbatches * even)


def longest_plan_s(chain: Chain, max_stages: int) -> float:
    """Return the longest time of a plan that runs one microbatch after the other.

    Every layer on its slowest type, recomputed if it may be, every transfer at the largest cut
    over the slowest path, all gradients around all devices one by one.

    Args:
        chain: the layers.
        max_stages: the largest number of stages.
    """
    problem = chain.problem
    cluster, microbatches = problem.cluster, problem.job.microbatches
    links = cluster.link_table
    joined = np.isfinite(links.s_per_byte)
    latency_s = float(links.latency_s[joined].max())
    # Ring steps of all devices at once may share a link.
    slowest = float(links.s_per_byte[joined].max())
    width = 1 / slowest if slowest > 0 else np.inf
    count = len(cluster.devices)
    forwards = 2 if problem.job.recompute else 1
    seconds = [
        [
            forwards * times.forward_s + max(times.backward_s, _parts_s(chain, times))
            for times in chain.layer_times[name]
        ]
        for name in chain.types
    ]
    work = float(np.max(seconds, axis=0).sum())
    chains = [chain.on(name) for name in chain.types]
    crossing = max(float(own.cut_bytes.max() + own.cut_gradient_bytes.max()) for own in chains)
    transfers = (max_stages - 1) * (2 * latency_s + crossing / width)
    state = float(max(static_bytes(problem, own.graph.record.parameters) for own in chains))
    reductions = max_stages + len(chain.tied_parameters)
    reduce_s = 2 * count * (reductions * latency_s + count * state / width)
    memory_width = min(kind.optimizer_gb_per_s for kind in cluster.device_types.values())
    return microbatches * (work + transfers) + reduce_s + 2 * state / (memory_width * 1e9)


def _parts_s(chain: Chain, times: OperationTimes) -> float:
    """Return the seconds of a split backward; 0 where none is allowed."""
    return times.input_gradient_s + times.weight_gradient_s if chain.splits else 0.0
