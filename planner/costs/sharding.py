"""Weights that replicas divide: what is put together around each layer of a stage, and when.

A device keeps 1/r of the weights and gradients of every layer, as of the optimizer's state. Before
a layer's forward the r replicas gather its weights, and again before its backward; after that they
reduce and scatter its gradients (Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023,
"PyTorch FSDP"). Nothing hides these collectives: they are part of the operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from planner.cluster.collective_algorithms import ring_half
from planner.cluster.routing import Messages
from planner.costs.gradients import gradient_bytes
from planner.costs.roofline import OperationTimes
from planner.plan.problem import Problem


class Collectives(NamedTuple):
    """Seconds, or bytes, of the two kinds of collectives of a layer.

    Attributes:
        gather: of weights, in a forward, a whole backward and an input gradient.
        reduction: of gradients, in a whole backward and a weight gradient.
    """

    gather: float = 0.0
    reduction: float = 0.0

    def in_operation(self, kind: str) -> float:
        """Return the sum of those in an operation of a kind."""
        return self.gather * (kind in "FBI") + self.reduction * (kind in "BW")


def divided_bytes(
    problem: Problem, layers: Sequence[str], among: int
) -> dict[str, tuple[int, int]]:
    """Return the bytes of weights that are put together around each of some layers.

    Args:
        problem: whose job says whether replicas divide weights at all.
        layers: of a stage.
        among: replicas of the stage; one has all weights.

    Returns:
        Bytes of weights and of gradients by layer, of those that have such weights.
    """
    if among < 2 or not problem.job.shards_parameters:
        return {}
    own, made = problem.graph.own_parameters, partial(gradient_bytes, problem.job)
    rows = {n: (sum(p.bytes for p in own[n]), sum(map(made, own[n]))) for n in layers}
    return {name: both for name, both in rows.items() if both[0]}


def collective_seconds(
    problem: Problem,
    divided: Sequence[Mapping[str, tuple[int, int]]],
    among: Sequence[Sequence[str]],
) -> list[dict[str, Collectives]]:
    """Return the seconds of the collectives of each layer, while other stages have theirs.

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
        {
            name: Collectives(*(_seconds(ring, bytes_, messages[ring]) for bytes_ in both))
            for name, both in row.items()
        }
        for ring, row in zip(rings, divided, strict=True)
    ]


def _seconds(ring: Sequence[str], bytes_: int, messages: Messages | None) -> float:
    if messages is None:
        return math.inf
    steps, step_bytes, _ = ring_half(ring, bytes_)
    return steps * max(latency_s + step_bytes / (width * 1e9) for latency_s, width in messages)


def with_collectives(times: OperationTimes, seconds: Collectives) -> OperationTimes:
    """Return the times of a layer whose weights are put together around it.

    Args:
        times: of the layer alone.
        seconds: of its collectives.
    """
    return times + OperationTimes(*map(seconds.in_operation, "FIWB"))
