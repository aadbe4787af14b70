"""The pipelines of a plan: replica i of every stage, where these run by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.simulator import owners
from planner.sync.strategies import TOGETHER

IN_STEP = f"one of {', '.join(TOGETHER)}"
"""The strategies that run any plan, as a message offers them."""
PLAN_ANEW = (
    "plan with `pipeplan plan … --sync semi_decentralized`, which makes pipelines whose "
    "microbatches stay together"
)


@dataclass(frozen=True)
class Lane:
    """A pipeline of a plan that needs no other to train by itself.

    Attributes:
        index: of the pipeline, from 0.
        devices: by place; devices at one place of different pipelines hold the same stages.
        microbatches: of an iteration of the plan that it runs, ascending.
    """

    index: int
    devices: tuple[str, ...]
    microbatches: tuple[int, ...]


def lanes_of(plan: Plan, *, otherwise: str = f"use {IN_STEP}") -> tuple[Lane, ...]:
    """The pipelines of a plan.

    Args:
        plan: whose replicas may form them.
        otherwise: what else a plan without them could be used for, as the message offers it; empty
            where nothing is to be offered.

    Raises:
        PipeplanError: if the replicas do not form pipelines that hold the same stages and keep
            their microbatches to themselves; it names what is in the way.
    """
    owner = owners(plan.parsed_orders())
    groups: dict[tuple[str, ...], list[int]] = {}
    for microbatch in range(plan.microbatches):
        way = tuple(owner[stage.index, microbatch] for stage in plan.stages)
        groups.setdefault(way, []).append(microbatch)
    remedy = PLAN_ANEW + (f", or {otherwise}" if otherwise else "")
    problems = list(_problems(plan, groups, remedy))
    if problems:
        raise PipeplanError(problems)
    ranked = sorted(groups.items(), key=lambda item: min(map(plan.ranks.index, item[0])))
    return tuple(
        Lane(index, tuple(dict.fromkeys(way)), tuple(microbatches))
        for index, (way, microbatches) in enumerate(ranked)
    )


def pipeline_count(plan: Plan) -> int | None:
    """How many there are if the plan has pipelines; None if it cannot, by its stages alone."""
    counts = {len(stage.devices) for stage in plan.stages}
    return counts.pop() if len(counts) == 1 else None


def node_of(device: str) -> str:
    """The node in a device's name: ``n0`` of ``n0/gpu3``; a name without one is its own node."""
    return device.rpartition("/")[0] or device


def pipelines_per_node(lanes: Sequence[Lane]) -> int:
    """How many begin on one node."""
    first = node_of(lanes[0].devices[0])
    return sum(node_of(lane.devices[0]) == first for lane in lanes)


def _problems(plan: Plan, groups: dict[tuple[str, ...], list[int]], remedy: str) -> Iterator[str]:
    counts = {len(stage.devices) for stage in plan.stages}
    if len(counts) > 1:
        rows = ", ".join(f"{stage.index}: {len(stage.devices)}" for stage in plan.stages)
        yield f"stages: they have different numbers of replicas ({rows}); {remedy}"
        return
    ways = list(groups)
    for a, way in enumerate(ways):
        for other in ways[a + 1 :]:
            shared = sorted(set(way) & set(other))
            if shared:
                pair = f"{groups[way][0]} and {groups[other][0]}"
                yield (
                    f"orders: microbatches {pair} part or meet at {shared[0]!r}, so the replicas "
                    f"are no pipelines of their own; {remedy}"
                )
                return
    if len(ways) < next(iter(counts)):
        yield f"orders: a replica has no microbatch; {remedy}"
        return
    shares = sorted({len(microbatches) for microbatches in groups.values()})
    if len(shares) > 1:
        yield (
            f"orders: pipelines run different numbers of microbatches ({shares[0]} to "
            f"{shares[-1]}), but each needs as many: faster ones take more shares of the data by "
            f"themselves; {remedy}"
        )
        return
    shapes = {_shape(way) for way in ways}
    if len(shapes) > 1:
        yield f"stages: pipelines put different stages together on a device; {remedy}"


def _shape(way: tuple[str, ...]) -> tuple[int, ...]:
    """Which stages share a device, in a form that does not name it."""
    places = list(dict.fromkeys(way))
    return tuple(places.index(device) for device in way)
