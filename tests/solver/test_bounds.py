"""No schedule of a partition beats its bound, and none of any partition the bound on all."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from strategies import orders_for, partitions, problems

from planner.artifacts.problem import Problem
from planner.costs.placement import place
from planner.partition.bounds import schedule_bound_s
from planner.partition.chain import Chain
from planner.partition.relaxation import work_bound_s
from planner.simulator import simulate

ROUNDING = 1 + 1e-9


@given(st.data())
def test_no_random_schedule_beats_the_bounds(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems())
    pipeline = place(problem, data.draw(partitions(problem, recompute=False)))
    orders = data.draw(orders_for(pipeline, split_backwards=False))
    time_s = simulate(pipeline, orders).iteration_time_s
    bound_s = schedule_bound_s(pipeline)
    assert bound_s <= time_s * ROUNDING
    assert 0 <= work_bound_s(Chain(problem)) <= time_s * ROUNDING


@given(st.data())
def test_recomputing_only_raises_the_bound(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems())
    specs = data.draw(partitions(problem))
    plain = [replace(spec, recompute=()) for spec in specs]
    raised = schedule_bound_s(place(problem, specs))
    assert raised * ROUNDING >= schedule_bound_s(place(problem, plain))
