"""Weights that replicas divide: what is put together around each layer of a stage, and when.

A device keeps 1/r of the weights and gradients of every layer, as of the optimizer's state. Before
a layer's forward the r replicas gather its weights, and again before its backward; after that they
reduce and scatter its gradients (Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023,
"PyTorch FSDP"). Nothing hides these collectives: they are part of the operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from planner.cluster.collective_algorithms import ring_half
from planner.cluster.routing import Messages
from planner.costs.roofline import OperationTimes
from planner.plan.problem import Problem

GATHERS: Mapping[str, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Collectives of a layer in each operation: gathers of weights, and of B and W the reduction."""


def divided_bytes(problem: Problem, layers: Sequence[str], among: int) -> dict[str, int]:
    """Return the bytes of weights that are put together around each of some layers.

    Args:
        problem: whose job says whether replicas divide weights at all.
        layers: of a stage.
        among: replicas of the stage; one has all weights.

    Returns:
        Bytes by layer, of those that have such weights.
    """
    if among < 2 or not problem.job.shards_parameters:
        return {}
    rows = {name: sum(p.bytes for p in problem.graph.own_parameters[name]) for name in layers}
    return {name: bytes_ for name, bytes_ in rows.items() if bytes_}


def collective_seconds(
    problem: Problem, divided: Sequence[Mapping[str, int]], among: Sequence[Sequence[str]]
) -> list[dict[str, float]]:
    """Return the seconds of one collective of each layer, while other stages have theirs.

    Stages put layers together most of the time where that takes long, so that the rings of all of
    them share links; those of the same devices run one after the other.

    Args:
        problem: whose cluster has the links.
        divided: of each stage, of :func:`divided_bytes`.
        among: of each stage, the devices that put its layers together.

    Returns:
        Of each stage, seconds by layer; infinite where two of the devices have no path.
    """
    number = problem.cluster.numbers.__getitem__
    rings = [tuple(sorted(names, key=number)) for names in among]
    used = list(dict.fromkeys(ring for ring, row in zip(rings, divided, strict=True) if row))
    edges = [tuple(ring_half(ring, 0).edges) for ring in used]
    messages = dict(zip(used, problem.cluster.each_at_once(edges), strict=True))
    return [
        {name: _seconds(ring, bytes_, messages[ring]) for name, bytes_ in row.items()}
        for ring, row in zip(rings, divided, strict=True)
    ]


def _seconds(ring: Sequence[str], bytes_: int, messages: Messages | None) -> float:
    if messages is None:
        return math.inf
    steps, step_bytes, _ = ring_half(ring, bytes_)
    return steps * max(latency_s + step_bytes / (width * 1e9) for latency_s, width in messages)


def with_collectives(times: OperationTimes, seconds: float) -> OperationTimes:
    """Return the times of a layer whose weights are put together around it.

    Args:
        times: of the layer alone.
        seconds: of each collective.
    """
    forward_s, input_s, weight_s, whole_s = (GATHERS[kind] * seconds for kind in "FIWB")
    return times + OperationTimes(forward_s, input_s, weight_s, whole_s)
