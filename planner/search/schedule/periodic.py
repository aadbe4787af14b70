"""Periodic schedules of many microbatches, after the idea of Tessel (Lin et al. 2024).

A core of some microbatches from the middle of a schedule of a few is repeated as often as it takes,
one period apart, between warm-up and cool-down. All operations of a microbatch are moved by the
same time, so none comes before what it waits for, and the orders by these times are replayed.
Whether they fit memory is checked afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.plan.operations import Operation
from planner.search.schedule.heuristic import Schedule
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

CORES = (1, 2, 4, 8)
"""Numbers of microbatches in a core that are tried."""
PLACES = (0.25, 0.35, 0.45, 0.55)
"""Positions in the short schedule where the core begins, as shares of its microbatches."""
FEW = 32
"""Microbatches of the short schedule, and up to seven more: every core fits into the rest."""


def with_few_microbatches(pipeline: PlacedPipeline) -> PlacedPipeline | None:
    """Return the same stages for few microbatches; None if there are few or replicas.

    Replicas take turns in patterns of their own.
    """
    if any(len(stage.spec.devices) > 1 for stage in pipeline.stages):
        return None
    few = FEW + (pipeline.microbatches - FEW) % max(CORES)
    return replace(pipeline, microbatches=few) if pipeline.microbatches > 2 * few else None


def periodic_schedules(pipeline: PlacedPipeline, short: Schedule) -> Iterator[Schedule]:
    """Yield periodic schedules of all microbatches, for a few cores.

    Args:
        pipeline: stages without replicas.
        short: a schedule of the same stages for fewer microbatches.
    """
    few, count = short.timeline.pipeline.microbatches, pipeline.microbatches
    starts = _starts(short.timeline)
    for core in CORES:
        for share in PLACES:
            begin = int(share * few)
            if begin + core >= few or (count - few) % core:
                continue
            orders = _orders(pipeline, starts, begin, core, count - few)
            with suppress(DeadlockError):  # Possible where messages block.
                yield Schedule(orders, simulate(pipeline, orders), f"{short.method}, periodic")


def _starts(timeline: Timeline) -> dict[Operation, tuple[float, int]]:
    """Return when each operation starts, and its place in the order."""
    events = sorted(timeline.operations, key=lambda event: (event.start_s, event.end_s))
    return {event.operation: (event.start_s, number) for number, event in enumerate(events)}


def _orders(
    pipeline: PlacedPipeline,
    starts: dict[Operation, tuple[float, int]],
    begin: int,
    core: int,
    more: int,
) -> dict[str, list[Operation]]:
    """Repeat the core's microbatches, and move those after it by as much."""
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
