"""Packings of a cluster in tensor-parallel groups of several sizes, a short list to search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.cluster.group_packing import alike_nodes, packed_in_turn
from planner.cluster.tensor_groups import TensorGroup
from planner.costs.stage_table import StageTable
from planner.errors import PipeplanError
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.variants.problems import restricted_to, with_job

MOST_PACKINGS = 3
"""Packings of several sizes that a search looks at, besides those of one size."""


def mixed_packings(problem: Problem, degrees: Sequence[int]) -> list[TensorParallel]:
    """Return packings in groups of several sizes that may be faster than those of one size.

    All nodes that are alike have groups of one size: each their own best by an estimate, or all
    but one kind of node that.

    Args:
        problem: of single devices.
        degrees: numbers of devices that groups may have, from 1.

    Returns:
        At most :data:`MOST_PACKINGS`; none for runtimes of others.
    """
    if problem.job.runtime not in (None, "pipeplan"):
        return []
    found: dict[tuple[TensorGroup, ...], TensorParallel] = {}
    for groups in _by_nodes(problem, degrees):
        if len({len(group.devices) for group in groups}) < 2:
            continue
        parallel = TensorParallel(sequence=problem.job.sequence_parallel, groups=groups)
        try:
            grouped_problem(problem, parallel)
        except PipeplanError:
            continue  # Such as devices that slow each other: no plan has such groups.
        found.setdefault(parallel.groups, parallel)
        if len(found) == MOST_PACKINGS:
            break
    return list(found.values())


def _by_nodes(problem: Problem, degrees: Sequence[int]) -> Iterator[tuple[TensorGroup, ...]]:
    """Yield packings by kinds of nodes: the best of each, and the second best of one of them."""
    kinds = alike_nodes(problem.cluster)
    if len(kinds) < 2:
        return
    ranked = [_ranked(problem, names, degrees) for names in kinds]
    best = [sizes[:1] for sizes in ranked]
    yield _packed(problem, kinds, best)
    for number, sizes in enumerate(ranked):
        if len(sizes) > 1:
            yield _packed(problem, kinds, [*best[:number], sizes[1:2], *best[number + 1 :]])


def _packed(
    problem: Problem, kinds: Sequence[Sequence[str]], sizes: Sequence[Sequence[int]]
) -> tuple[TensorGroup, ...]:
    """Return the groups of all kinds of nodes, by the sizes of each."""
    rows = zip(kinds, sizes, strict=True)
    groups = [row for names, own in rows for row in packed_in_turn(problem.cluster, own, names)]
    number = problem.cluster.numbers
    return tuple(sorted(groups, key=lambda group: number[group.devices[0]]))


def _ranked(problem: Problem, names: Sequence[str], degrees: Sequence[int]) -> list[int]:
    """Return the sizes that groups of some devices may have, the quickest by estimate first."""
    found = []
    for degree in degrees:
        groups = packed_in_turn(problem.cluster, [degree], names)
        if not groups:
            continue
        try:
            alone = with_job(restricted_to(problem, names), tensor_parallel=degree)
            parallel = TensorParallel(sequence=problem.job.sequence_parallel, groups=groups)
            on_groups = alone if degree == 1 else grouped_problem(alone, parallel)
        except PipeplanError:
            continue  # Such as a layer that these devices cannot run.
        found.append((_estimate(on_groups), degree))
    return [degree for _, degree in sorted(found)]


def _estimate(problem: Problem) -> tuple[float, float]:
    """Return how much memory is missing, and the seconds of the best even layout in 1F1B.

    All devices are in equal pipelines of equal stages: with r pipelines of p stages and m
    microbatches a device runs m/r microbatches of 1/p of the model, and waits for p - 1 more.
    """
    table = StageTable(problem)
    whole = [table.figures(name, 0, len(table.layers)) for name in table.types]
    devices, microbatches = len(problem.cluster.devices), problem.job.microbatches
    model_s = max(row.F_s + row.B_s for row in whole)
    kinds = (problem.cluster.device_types[name] for name in table.types)
    capacity_bytes = min(kind.capacity_bytes for kind in kinds)
    static, stash = max(row.static_bytes for row in whole), max(row.stash_bytes for row in whole)
    least = math.inf, math.inf
    for stages in range(1, min(devices, len(table.layers)) + 1):
        if devices % stages:
            continue
        each = -(-microbatches * stages // devices)
        held = (static + min(stages, each) * stash) / stages
        time_s = (each + stages - 1) * model_s / stages
        least = min(least, (max(0.0, held / capacity_bytes - 1), time_s))
    return least
