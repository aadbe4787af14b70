"""All-gathers of parameters, after the optimizer steps of devices that share the state."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from planner.costs.placed_pipeline import PlacedPipeline
from planner.simulation.network import Flow, Network
from planner.simulation.progress import ComputeLoad
from planner.simulation.timeline import SynchronisationEvent


def gathered(
    pipeline: PlacedPipeline, stepped_s: Mapping[str, float], flow_of: Callable[[int], Flow]
) -> tuple[SynchronisationEvent, ...]:
    """Replay the all-gathers of an iteration, which share links among themselves.

    One is ready when all its devices have done their optimizer steps; a device takes part in one
    at a time, in the order in which they become ready, of those ready together in that of their
    reductions.

    Args:
        pipeline: whose reductions are reduce-scatters, or none of whose are.
        stepped_s: when each device has done its optimizer step.
        flow_of: the all-gather of a reduction, by its number, before it sets off.
    """
    syncs = pipeline.synchronisations
    ready = [
        (max(stepped_s[device] for device in sync.devices), number)
        for number, sync in enumerate(syncs)
        if sync.gathers
    ]
    heapq.heapify(ready)
    heard: list[tuple[float, int]] = []

    def announce(number: object, moment_s: float) -> None:
        assert isinstance(number, int)
        heapq.heappush(heard, (moment_s, number))

    network = Network(pipeline.problem.cluster, announce, ComputeLoad(pipeline.problem.cluster))
    found: list[SynchronisationEvent] = []
    while ready or heard:
        now = min(row[0][0] for row in (ready, heard) if row)
        while heard and heard[0][0] == now:
            number = heapq.heappop(heard)[1]
            flow = network.hear(number, now)
            if flow is not None:
                span = flow.start_s, now
                found.append(
                    SynchronisationEvent(syncs[number], *span, number, True, flow.slowed_by)
                )
        while ready and ready[0][0] == now:
            number = heapq.heappop(ready)[1]
            network.request(flow_of(number), now)
        network.settle(now)
    return tuple(sorted(found, key=lambda event: event.number))
