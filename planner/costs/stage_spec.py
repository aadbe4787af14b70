"""Stages as a solver chooses them: layers, devices, and what they keep in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.plan.plan import Stage
from planner.plan.problem import Problem


@dataclass(frozen=True)
class StageSpec:
    """A stage as chosen by a solver: its layers and devices, what it recomputes and offloads."""

    layers: tuple[str, ...]
    devices: tuple[str, ...]
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


def specs_of(stages: Iterable[Stage]) -> list[StageSpec]:
    """Return the stages of a plan as a solver chooses them."""
    return [StageSpec(row.layers, row.devices, row.recompute, row.offload) for row in stages]


def has_equal_groups(problem: Problem, stages: Sequence[StageSpec]) -> bool:
    """Return whether each stage has groups of one size, and so have stages that share a parameter.

    Only tensor-parallel groups of one size have the same shares of parameters to reduce.
    """
    graph, cluster = problem.graph, problem.cluster
    if not graph.record.on_types:
        return True
    sizes: dict[str, set[int]] = {}
    for stage in stages:
        found = {cluster.device_type(device).members for device in stage.devices}
        if len(found) > 1:
            return False
        for layer in stage.layers:
            for name in graph.layers[layer].parameters:
                sizes.setdefault(name, set()).update(found)
    return all(len(found) == 1 for found in sizes.values())
