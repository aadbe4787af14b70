"""PE, SPP's execution scheduler (Luo et al., INFOCOM 2022): lists of blocks, run as they can.

A microbatch passes 4N-3 blocks in a row: forward on the N stages and the N-1 channels between them,
the last stage's forward and backward as one, and backward over the channels and stages. PE lets
the microbatches enter one a round and go on by one block a round; that gives every stage and
channel a list of blocks. The lists are run event by event, each block as soon as the one before it
on its stage or channel and the one before it of its microbatch have ended. A stage's all-reduce
starts after its last backward.

The lists are our reconstruction. They fit the published bound exactly: M + 4N - 4 rounds, none
longer than the largest per-microbatch time C of a stage or channel, then an all-reduce, so
T_PE <= (1 + (4N-4)/M) * M * C + max A_n. It holds for these blocks whatever their times. It holds
for a simulated plan if every stage has one device (a replica runs whole microbatches here, in
SPP it runs its share of each), no two channels share a link, links are full duplex, no parameter is
tied between stages, and but for the optimizer step, which SPP does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation, Orders
from planner.schedules.assignment import Assignment
from planner.schedules.placements import require_one_stage_a_device

Floats = NDArray[np.float64]
MAX_MICROBATCHES = 1024
"""Beyond this many, each further microbatch is counted as the slowest block's time."""


def spp_execution(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return PE's lists for every device; a replica runs the microbatches that it owns.

    The rounds order all operations consistently, so these orders never deadlock.

    Raises:
        DoesNotApplyError: if a device holds several stages, which SPP does not consider.
    """
    require_one_stage_a_device(pipeline)
    count = len(pipeline.stages)
    lists = [execution_order(count, stage, pipeline.microbatches) for stage in range(count)]
    return {
        device: [row for row in lists[stage] if owner[stage, row.microbatch] == device]
        for device, (stage,) in pipeline.stages_on.items()
    }


def execution_order(stages: int, stage: int, microbatches: int) -> list[Operation]:
    """Return PE's list of a stage: 4 forwards for each later stage, then one of each in turn.

    Stage n starts microbatch m in round m + 2n forward and in round m + 4N-4 - 2n backward.
    """
    ahead = 4 * (stages - 1 - stage)
    order = []
    for round_ in range(microbatches + ahead):
        forward = Operation(stage, "F", round_)
        backward = Operation(stage, "B", round_ - ahead)
        both = (backward, forward) if ahead else (forward, backward)
        order += [operation for operation in both if 0 <= operation.microbatch < microbatches]
    return order


@dataclass(frozen=True)
class Blocks:
    """Seconds of one microbatch on N stages and N-1 channels, and of the all-reduces.

    Attributes:
        forward_s, backward_s: by stage, (N,).
        send_s, send_back_s: by channel, (N-1,): activations to the next stage, gradients back.
        all_reduce_s: by stage, (N,).
    """

    forward_s: Floats
    backward_s: Floats
    send_s: Floats
    send_back_s: Floats
    all_reduce_s: Floats

    @property
    def stages(self) -> int:
        """N."""
        return len(self.forward_s)

    @property
    def slowest_s(self) -> float:
        """C: the largest time of a microbatch on one stage or channel, forward and backward."""
        stages_s = float((self.forward_s + self.backward_s).max())
        return max(stages_s, float((self.send_s + self.send_back_s).max(initial=0.0)))


def blocks_of(pipeline: PlacedPipeline) -> Blocks:
    """Return the blocks of a placed pipeline; replicas share the work of each microbatch evenly.

    A stage with r replicas takes 1/r of its slowest replica's time, a channel its slowest way's
    time over the number of pairs (SPP, section III; the channel's share is our reconstruction).
    """
    stages = range(len(pipeline.stages))

    def stage_s(kind: str) -> Floats:
        return np.array(
            [
                max(times.seconds(kind) for times in stage.times.values()) / len(stage.times)
                for stage in pipeline.stages
            ]
        )

    def channel_s(*, forward: bool) -> Floats:
        ways = (pipeline.transfers_s(stage, forward=forward) for stage in stages[:-1])
        return np.array([way.max() / min(way.shape) for way in ways], dtype=np.float64)

    reduced_s = np.zeros(len(stages))
    for sync in pipeline.synchronisations:
        if len(sync.stages) == 1:
            reduced_s[sync.stages[0]] += sync.seconds + sync.gather_s
    back_s = channel_s(forward=False)
    return Blocks(stage_s("F"), stage_s("B"), channel_s(forward=True), back_s, reduced_s)


def makespan_s(blocks: Blocks, microbatches: int) -> float:
    """Return T_PE: when the last all-reduce has ended."""
    counted = min(microbatches, MAX_MICROBATCHES)
    ends_s = _last_backwards_s(blocks, counted) + blocks.all_reduce_s
    return float(ends_s.max()) + (microbatches - counted) * blocks.slowest_s


def bound_s(blocks: Blocks, microbatches: int) -> float:
    """Return SPP's bound on T_PE: (1 + (4N-4)/M) * M * C + max A_n (as we state it)."""
    rounds = microbatches + 4 * blocks.stages - 4
    return rounds * blocks.slowest_s + float(blocks.all_reduce_s.max())


def _last_backwards_s(blocks: Blocks, microbatches: int) -> Floats:
    """Return when each stage ends its last backward.

    In a round all backward blocks go before the forward blocks of the same stage or channel, which
    frees memory; blocks of one round that lie on different resources are computed at once.
    """
    seconds = _in_a_row(blocks)
    last = len(seconds) - 1
    middle = last // 2  # The last stage's forward and backward.
    resource = np.minimum(np.arange(last + 1), last - np.arange(last + 1))
    ends, free = np.zeros(last + 1), np.zeros(middle + 1)
    for round_ in range(microbatches + last):
        ready = np.concatenate([[0.0], ends[:-1]])
        low, high = max(0, round_ - microbatches + 1), min(round_, last)
        for first, end in ((max(low, middle + 1), high + 1), (low, min(high, middle) + 1)):
            if first < end:
                here = slice(first, end)
                ends[here] = np.maximum(free[resource[here]], ready[here]) + seconds[here]
                free[resource[here]] = ends[here]
    return ends[middle:][::2][::-1]


def _in_a_row(blocks: Blocks) -> Floats:
    """Return the 4N-3 blocks of a microbatch in the order it passes them."""
    row = np.empty(4 * blocks.stages - 3)
    middle = 2 * blocks.stages - 2
    row[: middle + 1 : 2] = blocks.forward_s
    row[1:middle:2] = blocks.send_s
    row[middle::2] = blocks.backward_s[::-1]
    row[middle + 1 :: 2] = blocks.send_back_s[::-1]
    row[middle] = blocks.forward_s[-1] + blocks.backward_s[-1]
    return row
