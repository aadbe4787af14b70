"""SPP: order the devices, partition along the order, schedule, for every number of stages.

Luo, Yi, Long, Fan, Wu, Yang and Lin, "Efficient Pipeline Planning for Expedited Distributed DNN
Training", INFOCOM 2022.

RDO orders the devices by recursive minimum cuts; PRM finds, for every number of stages, the
partition, mapping and replication along that order with the least bottleneck

    W(l, stages, r, i) = min over l', r' of max(W(l', stages - 1, r', i - r),
                                                M * channel time at the cut,
                                                M * stage time / r + all-reduce);

PE schedules it; the number of stages with the smallest makespan wins.

Our reconstruction: PRM runs from the last stage to the first (the recursion is symmetric), so that
1F1B's stashes can be kept within memory; devices at both ends of the order may stay unused; a
channel between r and r' replicas is min(r, r') times as wide as its slowest pair.
"""

from __future__ import annotations

import math

from planner.costs.placement import place
from planner.partition.chain import Chain, FloatArray, Partition
from planner.partition.device_orders import MAX_DEVICES_FOR_MINIMUM_CUT, minimum_cut_order
from planner.partition.min_max import MinMaxTable
from planner.partition.planners.planner import Planner, nothing_fits
from planner.partition.planners.stage_costs import (
    Block,
    RowCosts,
    device_blocks,
    in_file_order,
    most_stages,
)
from planner.schedule.classics.spp import blocks_of, makespan_s


def plan(chain: Chain) -> Partition:
    """The partition whose execution by PE is shortest, over all numbers of stages.

    Raises:
        InfeasibleError: if no number of stages fits.
    """
    blocks = recursive_device_order(chain)
    costs = StageReplicationCosts(chain, blocks)
    table = MinMaxTable(costs)
    best: Partition | None = None
    best_s = math.inf
    for count in range(1, min(most_stages(chain), costs.layers, len(blocks)) + 1):
        table.add_stage()
        spans = table.spans(count)
        # PE takes at least as long as the bottleneck; most numbers of stages need no PE.
        if spans is None or table.bottleneck_s(count) >= best_s:
            continue
        found = in_file_order(chain, costs.stages(spans))
        pipeline = place(chain.problem, chain.specs(found))
        time_s = makespan_s(blocks_of(pipeline), pipeline.microbatches)
        if time_s < best_s:
            best, best_s = found, time_s
    if best is None:
        raise nothing_fits("spp", "its partitions along the recursive minimum cuts")
    return best


def recursive_device_order(chain: Chain) -> tuple[Block, ...]:
    """RDO over the devices; over blocks of neighbours where there are too many for it."""
    blocks = device_blocks(chain)
    first_of = {block[0]: block for block in blocks}
    if not 2 < len(blocks) <= MAX_DEVICES_FOR_MINIMUM_CUT:
        return blocks
    return tuple(
        first_of[name] for name in minimum_cut_order(chain.problem.cluster, list(first_of))
    )


class StageReplicationCosts(RowCosts):
    """PRM's costs of a whole iteration."""

    def stage_s(self, first: int, replicas: int, after: int) -> FloatArray:
        """M microbatches shared evenly by the replicas, then the all-reduce."""
        return self.fitting_work_s(first, replicas, after) + self.reduce_s(first, replicas)


SPP = Planner("spp", "Luo et al., INFOCOM 2022", plan)
