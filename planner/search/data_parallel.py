"""The search for a fast plan of two equal pipelines or more, as decentralized strategies need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.costs.placed_pipeline import StageSpec
from planner.errors import InfeasibleError
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.unsupported import require_decided, require_without
from planner.search.result import Result
from planner.search.solve import solve
from planner.sync.pipeline_replicas import ONE_OF_SYNCHRONOUS
from planner.variants.problems import with_job


def solve_data_parallel(
    problem: Problem, *, warm_starts: Sequence[Plan | Sequence[StageSpec]] = (), **limits: Any
) -> Result:
    """Find a fast plan of two equal pipelines or more, and bound how far it can be from the best.

    Times compared are those of pipelines in step, as the simulator of plans predicts. The bound is
    on plans of equal pipelines, a single one included.

    Args:
        problem: the model, cluster and job; the plan's job has ``equal_pipelines``.
        warm_starts: as in :func:`planner.search.solve.solve`.
        limits: ``time_limit_s``, ``gap_limit``, ``seed``, ``workers``, ``deterministic`` and
            ``progress`` of that function.

    Raises:
        InfeasibleError: if no plan of pipelines was found; it says what is in the way.
        PipeplanError: if a setting is out of range.
    """
    require_without(
        problem.job,
        "a plan of data-parallel pipelines",
        instead="plan with equal_pipelines = true and a synchronous strategy",
    )
    require_decided(problem.job, "a plan of data-parallel pipelines")
    require_possible(problem)
    several = replace(with_job(problem, equal_pipelines=True), least_pipelines=2)
    try:
        return solve(several, warm_starts=warm_starts, **limits)
    except InfeasibleError as error:
        raise InfeasibleError(
            "sync: no plan of several pipelines was found, and pipelines that train side by side "
            f"need one; {'; '.join(error.problems)}; use {ONE_OF_SYNCHRONOUS}, which run any plan, "
            "or make a pipeline smaller"
        ) from None


def require_possible(problem: Problem) -> None:
    """Refuse what no search can mend.

    Raises:
        InfeasibleError: naming the field that is in the way.
    """
    job, devices = problem.job, len(problem.cluster.devices)
    remedy = f"or use {ONE_OF_SYNCHRONOUS}, which run any plan"
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
    most = min(devices, job.microbatches)
    if not any(job.microbatches % count == 0 for count in range(2, most + 1)):
        raise InfeasibleError(
            f"job.microbatches: {job.microbatches} cannot be divided among 2 to {devices} "
            "pipelines, which run as many each; make it a multiple of 2 in the job file, "
            f"{remedy}"
        )
