"""Many microbatches: warm-up, a repeating core and cool-down, from a schedule of a few of them.

After the idea of Tessel (Lin et al. 2024): a schedule of a few microbatches is searched well; of
its middle a core of some microbatches is repeated as often as it takes, one period apart. All
operations of a microbatch are moved by the same time, so none comes before what it waits for, and
the orders by these times are replayed. Whether they fit memory is looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.heuristic import Schedule
from planner.simulator import Timeline, simulate

CORES = (1, 2, 4, 8)
"""Microbatches in a core, that are tried."""
PLACES = (0.25, 0.35, 0.45, 0.55)
"""Where in the short schedule it begins, as a share of its microbatches."""
FEW = 32
"""Microbatches of the short schedule, and up to seven more: every core fits into the rest."""


def shortened(pipeline: PlacedPipeline) -> PlacedPipeline | None:
    """The same stages for few microbatches; None if there are not many, or if stages have replicas.

    Replicas take turns in patterns of their own.
    """
    if any(len(stage.spec.devices) > 1 for stage in pipeline.stages):
        return None
    few = FEW + (pipeline.microbatches - FEW) % max(CORES)
    return replace(pipeline, microbatches=few) if pipeline.microbatches > 2 * few else None


def stretched(pipeline: PlacedPipeline, short: Schedule) -> Iterator[Schedule]:
    """Schedules of all microbatches, over a few cores.

    Args:
        pipeline: stages without replicas.
        short: a schedule of the same stages for fewer microbatches.
    """
    few, count = short.timeline.pipeline.microbatches, pipeline.microbatches
    starts = _starts(short.timeline)
    for core in CORES:
        for place in PLACES:
            begin = int(place * few)
            if begin + core >= few or (count - few) % core:
                continue
            orders = _orders(pipeline, starts, begin, core, count - few)
            yield Schedule(orders, simulate(pipeline, orders), f"{short.method}, stretched")


def _starts(timeline: Timeline) -> dict[Operation, tuple[float, int]]:
    """When each operation starts, and its place in the order."""
    events = sorted(timeline.operations, key=lambda event: (event.start_s, event.end_s))
    return {event.operation: (event.start_s, number) for number, event in enumerate(events)}


def _orders(
    pipeline: PlacedPipeline,
    starts: dict[Operation, tuple[float, int]],
    begin: int,
    core: int,
    more: int,
) -> dict[str, list[Operation]]:
    """The core's microbatches again and again, those behind it as much later."""
    first = Operation(0, "F", begin)
    period_s = starts[first._replace(microbatch=begin + core)][0] - starts[first][0]
    orders: dict[str, list[Operation]] = {}
    for device, stages in pipeline.stages_on.items():
        rows: list[tuple[float, int, Operation]] = []
        for operation, (start_s, number) in starts.items():
            if operation.stage not in stages:
                continue
            microbatch = operation.microbatch
            copies = more // core
            if microbatch < begin:
                rows.append((start_s, number, operation))
            elif microbatch < begin + core:
                rows += [
                    (
                        start_s + copy * period_s,
                        number,
                        operation._replace(microbatch=microbatch + copy * core),
                    )
                    for copy in range(copies + 1)
                ]
            else:
                moved = operation._replace(microbatch=microbatch + more)
                rows.append((start_s + copies * period_s, number, moved))
        orders[device] = [operation for _, _, operation in sorted(rows)]
    return orders
