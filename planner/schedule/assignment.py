"""Which replica of a stage runs which microbatch."""

import heapq

from planner.costs.placement import PlacedPipeline

Assignment = dict[tuple[int, int], str]


def balanced_assignment(pipeline: PlacedPipeline) -> Assignment:
    """Give each microbatch to the replica that would finish it first.

    Replicas of different speed take different numbers of microbatches; for one stage alone this
    greedy rule minimises the slowest replica's load.
    """
    owner: Assignment = {}
    for index, stage in enumerate(pipeline.stages):
        times = [stage.times[device] for device in stage.spec.devices]
        each = [time.forward_s + time.backward_s for time in times]
        heap = [(seconds, position, seconds) for position, seconds in enumerate(each)]
        heapq.heapify(heap)
        for microbatch in range(pipeline.microbatches):
            finish, position, seconds = heapq.heappop(heap)
            owner[index, microbatch] = stage.spec.devices[position]
            heapq.heappush(heap, (finish + seconds, position, seconds))
    return owner


def microbatches_by_replica(owner: Assignment) -> dict[tuple[int, str], tuple[int, ...]]:
    """The microbatches each replica runs, in order; replicas that run none are left out."""
    rows: dict[tuple[int, str], list[int]] = {}
    for (stage, microbatch), device in sorted(owner.items()):
        rows.setdefault((stage, device), []).append(microbatch)
    return {replica: tuple(row) for replica, row in rows.items()}
