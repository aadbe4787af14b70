"""A bound on all that a partition's devices can do: work, transfers and memory."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.costs.placement import PlacedPipeline
from planner.partition.bounds.in_flight import in_flight_bound_s
from planner.partition.bounds.schedule import schedule_bound_s
from planner.partition.chain import Chain, Partition
from planner.partition.memory.recompute_variants import RecomputeVariants


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
        """No schedule of these stages is faster; infinity if it is proved that none fits.

        Args:
            partition: stages on devices, nothing recomputed.
            pipeline: the same stages placed.
        """
        if self._variants.fits_never(partition, pipeline):
            return math.inf
        light = with_least_stash(self._chain, partition, pipeline)
        return max(schedule_bound_s(pipeline), in_flight_bound_s(light))


def with_least_stash(
    chain: Chain, partition: Partition, pipeline: PlacedPipeline
) -> PlacedPipeline:
    """A pipeline whose every bound holds whatever the stages recompute: least times and stashes.

    Args:
        chain: the layers.
        partition: stages on devices.
        pipeline: the same stages placed, nothing recomputed.
    """
    if not chain.problem.job.recompute:
        return pipeline
    kept, received = chain.stashes.kept_bytes, chain.stashes.received_bytes
    stages = tuple(
        replace(
            placed,
            stash_bytes=int(kept[stage.begin : stage.end].sum() + received[stage.begin]),
        )
        for stage, placed in zip(partition, pipeline.stages, strict=True)
    )
    return replace(pipeline, stages=stages)
