"""Whether a plan overlaps its reductions: what is faster, and what job and bound allow."""

from itertools import pairwise

import pytest
from builders import boundary, graph, layer, parameter, star

from planner import Job, Problem, solve
from planner.plan.plan import Plan, Sync
from planner.prediction import refresh, with_strategy
from planner.verification import verify

NAMES = ("a", "b", "c")
MEGA = 10**6


def problem(latency_us: float, **job: object) -> Problem:
    """Backwards of 2 s a layer; 12 MB of gradients each, of which a bucket holds two."""
    rows = [layer(name, parameters=[f"w{name}"]) for name in NAMES]
    cuts = [boundary(u, v, bytes_=0) for u, v in pairwise(NAMES)]
    parameters = [parameter(f"w{name}", elements=3 * MEGA) for name in NAMES]
    machines = star(2, 0.01, latency_us=latency_us)
    fields = {"microbatches": 12, "optimizer": "sgd", "backward": "whole", "max_stages": 1, **job}
    return Problem(graph(rows, cuts, parameters), machines, Job.model_validate(fields))


def planned(latency_us: float, **job: object) -> Plan:
    return solve(problem(latency_us, **job), time_limit_s=0.5, deterministic=True).plan


@pytest.mark.parametrize(
    ("latency_us", "overlaps", "after_s"), [(0, True, 1.6), (1_000_000, False, 4 + 3.6)]
)
def test_a_plan_overlaps_where_that_is_faster(
    latency_us: float, overlaps: bool, after_s: float
) -> None:
    """24 MB take 2.4 s and may begin 2 s before the end, 12 MB take 1.2 s.

    With 1 s on each of two links every reduction takes 4 s more.
    """
    plan = planned(latency_us)
    assert len(plan.stages[0].devices) == 2
    assert plan.overlaps == overlaps
    steps_s = 6 * 9 + 3 * 36 * MEGA / 1000e9
    assert plan.predicted.iteration_time_s == pytest.approx(steps_s + after_s, rel=1e-5)
    other = with_strategy(plan, Sync(options={"overlap": not overlaps}))
    assert other.predicted.iteration_time_s > plan.predicted.iteration_time_s
    assert verify(other) == verify(plan) == []


def test_a_job_without_overlap_makes_plans_that_say_so() -> None:
    plan = planned(0, overlap_reduction=False)
    assert plan.sync.options == {"overlap": False}
    edited = refresh(plan.model_copy(update={"sync": Sync(options={"overlap": True})}))
    (told,) = verify(edited)
    assert told.startswith("sync: reductions overlap with backwards, but job.overlap_reduction is")


def test_a_bound_without_overlap_does_not_cover_a_plan_with_it() -> None:
    narrow = planned(0, overlap_reduction=False)
    assert narrow.predicted.lower_bound_s > 0
    wider = narrow.job.model_copy(update={"overlap_reduction": True})
    found = refresh(narrow.model_copy(update={"job": wider, "sync": Sync()}))
    assert found.predicted.iteration_time_s < narrow.predicted.iteration_time_s
    assert found.predicted.lower_bound_s == 0
