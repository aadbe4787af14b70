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
channel between r and r' replicas is min(r, r') times as wide as its slowest pair. Beyond 16 devices
the makespan with few numbers of replicas is a limit for the bottlenecks of all of them.
"""

from __future__ import annotations

import math
from functools import partial

from planner.costs.placement import place
from planner.search.partition.baselines.baseline import Baseline, nothing_fits
from planner.search.partition.baselines.stage_costs import (
    Block,
    Choice,
    RowCosts,
    device_blocks,
    in_file_order,
    most_stages,
    refined,
)
from planner.search.partition.chain import Chain, FloatArray, Partition
from planner.search.partition.dynamic_programs.device_orders import (
    MAX_DEVICES_FOR_MINIMUM_CUT,
    minimum_cut_order,
)
from planner.search.partition.dynamic_programs.min_max import (
    MAX_REPLICA_CHOICES,
    MinMaxTable,
    Within,
)
from planner.search.schedule.classics.spp import blocks_of, makespan_s


def plan(chain: Chain) -> Partition:
    """Return the partition whose execution by PE is shortest, over all numbers of stages.

    Raises:
        InfeasibleError: if no number of stages fits.
    """
    blocks = recursive_device_order(chain)
    return _some(refined(len(blocks), partial(_shortest, chain, blocks)))


def quick_plan(chain: Chain) -> Partition:
    """Return the same with few numbers of replicas where there are many devices.

    Raises:
        InfeasibleError: if no number of stages fits.
    """
    choice = _shortest(chain, recursive_device_order(chain), MAX_REPLICA_CHOICES, math.inf)
    return _some(choice and choice[0])


def _some(partition: Partition | None) -> Partition:
    if partition is None:
        raise nothing_fits("spp", "its partitions along the recursive minimum cuts")
    return partition


def _shortest(
    chain: Chain, blocks: tuple[Block, ...], most_choices: int, limit_s: float
) -> Choice | None:
    """Return the partition with the least makespan below a limit, and the makespan."""
    costs = StageReplicationCosts(chain, blocks, most_choices)
    table = MinMaxTable(costs, Within(limit_s, costs.before_s))
    best: Choice | None = None
    for count in range(1, min(most_stages(chain), costs.layers, len(blocks)) + 1):
        table.add_stage()
        spans = table.spans(count)
        # PE takes at least as long as the bottleneck; most numbers of stages need no PE.
        if spans is None or table.bottleneck_s(count) >= limit_s:
            continue
        found = in_file_order(chain, costs.stages(spans))
        pipeline = place(chain.problem, chain.specs(found))
        time_s = makespan_s(blocks_of(pipeline), pipeline.microbatches)
        if time_s < limit_s:
            best, limit_s = (found, time_s), time_s
    return best


def recursive_device_order(chain: Chain) -> tuple[Block, ...]:
    """Return the devices ordered by RDO, in blocks of neighbours where there are too many."""
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
        """Return the time of M microbatches shared evenly by the replicas, then the all-reduce."""
        return self.fitting_work_s(first, replicas, after) + self.reduce_s(first, replicas)


SPP = Baseline("spp", "Luo et al., INFOCOM 2022", plan, quick_plan)
