"""One order for all pipelines of a plan, where a tool knows no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.artifacts.operations import Operation
from planner.artifacts.plan import Plan
from planner.costs.placement import PlacedPipeline, place_plan
from planner.export.recomputation import against, overfull
from planner.simulator import Orders, simulate
from planner.sync.lanes import Lane

MOST_TRIED = 16
"""Pipelines whose order is tried for all."""


@dataclass(frozen=True)
class OneOrder:
    """The order that all pipelines run.

    Attributes:
        orders: by device of every pipeline, microbatches numbered from 0 in each.
        told: the order as a message names it.
        notes: its predicted cost, if it is not that of every pipeline.
        overfull: devices that need more memory than they have with it.
    """

    orders: Orders
    told: str
    notes: tuple[str, ...]
    overfull: tuple[str, ...]


def one_order(plan: Plan, lanes: Sequence[Lane]) -> OneOrder:
    """The order of the pipeline that is fastest if all run its order.

    Args:
        plan: whose pipelines these are.
        lanes: with as many microbatches each.
    """
    numbered = [_numbered(plan, lane) for lane in lanes]
    first = numbered[0]
    if all(orders == first for orders in numbered):
        return OneOrder(_on_all(first, lanes), "the plan's order", (), ())
    return min(_tried(plan, lanes, numbered), key=lambda found: found[0])[1]


def _tried(
    plan: Plan, lanes: Sequence[Lane], numbered: Sequence[list[list[Operation]]]
) -> Iterator[tuple[tuple[bool, float], OneOrder]]:
    pipeline = place_plan(plan)
    for lane, orders in list(zip(lanes, numbered, strict=True))[:MOST_TRIED]:
        timeline = simulate(pipeline, _on_plan(pipeline, orders, lanes))
        seconds = timeline.iteration_time_s
        told = f"the order of pipeline {lane.index} in all pipelines"
        note = f"{told}: {against(seconds, plan.predicted.iteration_time_s)}"
        full = tuple(overfull(timeline))
        yield (bool(full), seconds), OneOrder(_on_all(orders, lanes), told, (note,), full)


def _numbered(plan: Plan, lane: Lane) -> list[list[Operation]]:
    """The orders of a pipeline's devices, its microbatches numbered from 0."""
    number = {microbatch: index for index, microbatch in enumerate(lane.microbatches)}
    orders = plan.parsed_orders()
    return [[Operation(s, k, number[m]) for s, k, m in orders[place]] for place in lane.devices]


def _on_all(orders: list[list[Operation]], lanes: Sequence[Lane]) -> Orders:
    return {
        device: order for lane in lanes for device, order in zip(lane.devices, orders, strict=True)
    }


def _on_plan(
    pipeline: PlacedPipeline, orders: list[list[Operation]], lanes: Sequence[Lane]
) -> Orders:
    """The same with the plan's own microbatches."""
    found = {
        device: [Operation(s, k, lane.microbatches[m]) for s, k, m in order]
        for lane in lanes
        for device, order in zip(lane.devices, orders, strict=True)
    }
    return {device: found[device] for device in pipeline.devices}
