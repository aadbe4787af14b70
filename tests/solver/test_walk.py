"""The walk over whole plans: all that it finds is a plan of the job, with the time that it says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems, runtimes

from planner.assembly import plan_by_hand
from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.plan.membership import outside
from planner.plan.problem import Problem
from planner.search.walk.freedoms import freedoms_of
from planner.search.walk.plans import timeline_of
from planner.search.walk.search import Clock, WalkResult, WalkSearch
from planner.search.walk.starts import needs_of, starts
from planner.search.walk.walker import Walker
from planner.verification.verify import verify

FREEDOMS = (
    {},
    {"backward": "whole", "recompute": False},
    {"backward": "split", "replication": False},
    {"max_stages_per_device": 2},
    {"max_stages_per_device": 2, "placement": "loop", "replication": False, "backward": "whole"},
    {"max_stages_per_device": 2, "placement": "loop_or_v", "equal_pipelines": True},
    {"equal_pipelines": True, "min_stages": 2},
    {"order": "1f1b", "backward": "whole", "equal_pipelines": True},
    {"order": "1f1b", "backward": "whole", "replication": False, "max_stages": 2},
)


def walked(problem: Problem, tasks: int = 2500, threads: int = 1) -> tuple[WalkResult, StageTable]:
    table = StageTable(problem)
    clock = Clock(limit_s=None, limit_tasks=tasks)
    return WalkSearch(problem, table, clock, threads=threads).run(), table


@given(st.data())
def test_finds_plans_of_the_job(data: st.DataObject) -> None:
    problem = data.draw(problems())
    freedoms = data.draw(st.sampled_from(FREEDOMS))
    runtime = data.draw(runtimes())
    problem = replace(
        problem,
        job=problem.job.model_copy(update=freedoms),
        runtime=runtime.model_copy(update={"links": "fair", "gradients": "always"}),
    )
    result, table = walked(problem)
    times = [found.seconds for found in result.found]
    assert times == sorted(times)
    for found in result.found:
        timeline = timeline_of(found.layout, table)
        assert timeline.iteration_time_s == pytest.approx(found.seconds, rel=1e-9)
        assert not timeline.overflow_bytes
        pipeline = timeline.pipeline
        stages = [stage.spec for stage in pipeline.stages]
        layers = tuple(problem.graph.layers)
        assert not list(outside(problem.job.space, stages, timeline.orders, layers))
    for found in result.found[:1]:
        timeline = timeline_of(found.layout, table)
        assert verify(plan_by_hand(timeline.pipeline, timeline.orders)) == []


@given(st.data())
def test_annealed_orders_are_no_slower_and_take_what_they_say(data: st.DataObject) -> None:
    problem = data.draw(problems())
    table, network = StageTable(problem), NetworkTable.of(problem.cluster)
    freedoms = freedoms_of(problem)
    walker = Walker(problem, table, network, freedoms, seed=1)
    needs = needs_of(walker.memory, table, freedoms)
    found = (walker.start(start) for start in starts(network, freedoms, needs))
    candidate = next((row for row in found if row is not None), None)
    if candidate is None:
        return
    before_s, _ = walker.layout(candidate)
    after_s = walker.polish(0.003, 30)
    timeline = timeline_of(walker.polished_layout(), table)
    assert after_s <= before_s
    assert timeline.iteration_time_s == pytest.approx(after_s, rel=1e-9)
    assert not timeline.overflow_bytes
