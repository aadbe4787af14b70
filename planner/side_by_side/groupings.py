"""How devices may be divided into pipelines, and what keeps them from it."""

from __future__ import annotations

from collections.abc import Iterator

from planner.artifacts.problem import Problem
from planner.errors import InfeasibleError
from planner.partition.chain import Chain
from planner.sync.lanes import IN_STEP
from planner.units import plural

Grouping = tuple[tuple[str, ...], ...]
"""The devices of each pipeline, by place."""


def require_possible(problem: Problem) -> None:
    """Refuse what no search can mend.

    Raises:
        InfeasibleError: naming the field that is in the way.
    """
    job, devices = problem.job, len(problem.cluster.devices)
    remedy = f"or use {IN_STEP}, which run any plan"
    if not job.replication:
        raise InfeasibleError(
            "job.replication: it is false, and pipelines that train side by side hold the same "
            f"stages; set replication = true in the job file, {remedy}"
        )
    if devices < 2:
        raise InfeasibleError(
            "cluster.devices: there is one, and pipelines that train side by side need one each at "
            f"least; add devices, {remedy}"
        )
    if not _numbers(problem):
        raise InfeasibleError(
            f"job.microbatches: {job.microbatches} cannot be divided among 2 to {devices} "
            "pipelines, which run as many each; make it a multiple of 2 in the job file, "
            f"{remedy}"
        )


def _numbers(problem: Problem) -> list[int]:
    """Of pipelines that a plan may have."""
    most = min(len(problem.cluster.devices), problem.job.microbatches)
    return [n for n in range(2, most + 1) if problem.job.microbatches % n == 0]


def groupings_of(problem: Problem) -> Iterator[Grouping]:
    """Devices divided into pipelines, by their types and by their speed, without repetition."""
    seen: set[Grouping] = set()
    for number in reversed(_numbers(problem)):
        for grouping in (_of_one_mix(problem, number), _of_one_speed(problem, number)):
            if grouping[0] and grouping not in seen:
                seen.add(grouping)
                yield grouping


def _of_one_mix(problem: Problem, number: int) -> Grouping:
    """Each pipeline has as many devices of every type, neighbours in the cluster's order."""
    groups: list[list[str]] = [[] for _ in range(number)]
    for names in _by_speed(problem):
        each = len(names) // number
        for index, group in enumerate(groups):
            group += names[index * each : (index + 1) * each]
    order = problem.cluster.numbers
    return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups)


def _of_one_speed(problem: Problem, number: int) -> Grouping:
    """At each place devices of about one speed; fewer are left over than by types.

    The last pipeline has the slowest.
    """
    names = [name for row in _by_speed(problem) for name in row]
    rows = [names[p * number : (p + 1) * number] for p in range(len(names) // number)]
    return tuple(tuple(row[index] for row in rows) for index in range(number))


def _by_speed(problem: Problem) -> list[list[str]]:
    """The devices of each type, the fastest type first."""
    chain, cluster = Chain(problem), problem.cluster
    total_s = chain.work_s.sum(axis=1)
    kinds = sorted(range(len(chain.types)), key=lambda kind: float(total_s[kind]))
    return [
        [name for name in cluster.device_names if cluster.type_of(name) == chain.types[kind]]
        for kind in kinds
    ]


def words_of(grouping: Grouping) -> str:
    """How many pipelines, and of what size."""
    return f"{plural(len(grouping), 'pipeline')} of up to {plural(len(grouping[0]), 'device')}"
