"""The pipeline replicas of a plan: replica i of every stage, if these train independently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cluster.cluster import node_of
from planner.errors import PipeplanError
from planner.plan.operations import owners
from planner.plan.plan import Plan
from planner.sync.strategies import SYNCHRONOUS

ONE_OF_SYNCHRONOUS = f"one of {', '.join(SYNCHRONOUS)}"
"""The strategies that run any plan, as text for messages."""
PLAN_AGAIN = (
    "plan with `pipeplan plan … --sync semi_decentralized`, which makes pipelines whose "
    "microbatches stay together"
)


@dataclass(frozen=True)
class PipelineReplica:
    """A pipeline of a plan that can train without the others.

    Attributes:
        index: number of the pipeline, from 0.
        devices: device of each pipeline rank; equal pipeline ranks of different pipelines hold the
            same stages.
        microbatches: microbatches of an iteration of the plan that it runs, ascending.
    """

    index: int
    devices: tuple[str, ...]
    microbatches: tuple[int, ...]


def pipeline_replicas_of(
    plan: Plan, *, otherwise: str = f"use {ONE_OF_SYNCHRONOUS}"
) -> tuple[PipelineReplica, ...]:
    """Return the pipeline replicas of a plan.

    Args:
        plan: the plan whose replicas may form them.
        otherwise: another use of a plan without them, offered in the message; may be empty.

    Raises:
        PipeplanError: if the replicas do not form pipelines that hold the same stages and keep
            their microbatches to themselves; it gives the reasons.
    """
    owner = owners(plan.parsed_orders())
    groups: dict[tuple[str, ...], list[int]] = {}
    for microbatch in range(plan.microbatches):
        path = tuple(owner[stage.index, microbatch] for stage in plan.stages)
        groups.setdefault(path, []).append(microbatch)
    remedy = PLAN_AGAIN + (f", or {otherwise}" if otherwise else "")
    problems = list(_problems(plan, groups, remedy))
    if problems:
        raise PipeplanError(problems)
    ranked = sorted(groups.items(), key=lambda item: min(map(plan.ranks.index, item[0])))
    return tuple(
        PipelineReplica(index, tuple(dict.fromkeys(path)), tuple(microbatches))
        for index, (path, microbatches) in enumerate(ranked)
    )


def pipeline_count(plan: Plan) -> int | None:
    """Return the number of pipelines if the plan has any; None if its stages do not allow them."""
    counts = {len(stage.devices) for stage in plan.stages}
    return counts.pop() if len(counts) == 1 else None


def pipelines_per_node(replicas: Sequence[PipelineReplica]) -> int:
    """Return how many pipelines begin on the first one's node."""
    first = node_of(replicas[0].devices[0])
    return sum(node_of(replica.devices[0]) == first for replica in replicas)


def _problems(plan: Plan, groups: dict[tuple[str, ...], list[int]], remedy: str) -> Iterator[str]:
    counts = {len(stage.devices) for stage in plan.stages}
    if len(counts) > 1:
        rows = ", ".join(f"{stage.index}: {len(stage.devices)}" for stage in plan.stages)
        yield f"stages: they have different numbers of replicas ({rows}); {remedy}"
        return
    paths = list(groups)
    for a, path in enumerate(paths):
        for other in paths[a + 1 :]:
            shared = sorted(set(path) & set(other))
            if shared:
                pair = f"{groups[path][0]} and {groups[other][0]}"
                yield (
                    f"orders: microbatches {pair} separate or meet at {shared[0]!r}, so the "
                    f"replicas are not independent pipelines; {remedy}"
                )
                return
    if len(paths) < next(iter(counts)):
        yield f"orders: a replica has no microbatch; {remedy}"
        return
    shares = sorted({len(microbatches) for microbatches in groups.values()})
    if len(shares) > 1:
        yield (
            f"orders: pipelines run different numbers of microbatches ({shares[0]} to "
            f"{shares[-1]}), but all need the same number, since faster ones take more work units; "
            f"{remedy}"
        )
        return
    shapes = {_shape(path) for path in paths}
    if len(shapes) > 1:
        yield f"stages: pipelines put different stages together on a device; {remedy}"


def _shape(path: tuple[str, ...]) -> tuple[int, ...]:
    """Return which stages share a device, in a form without device names."""
    ranks = list(dict.fromkeys(path))
    return tuple(ranks.index(device) for device in path)
