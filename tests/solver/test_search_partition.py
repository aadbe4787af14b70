"""What search_partition promises of its figures."""

import math

import pytest
from builders import boundary, cluster, graph, layer, link
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import orders_for, problems
from tiny_problems import tiny_problem

from planner import Job, Problem, search_partition
from planner.costs.placement import place
from planner.search.schedule.heuristic import quick_schedules
from planner.simulation.simulator import simulate


def test_even_partitions_of_equal_bound_are_a_start_like_any_other() -> None:
    the_graph = graph([layer("a", 0, 0), layer("b", 0, 0)], [boundary("a", "b", bytes_=0)])
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    problem = Problem(the_graph, machines, Job(microbatches=2, optimizer="sgd"))
    assert search_partition(problem, time_limit_s=5).objective_s == 0.0


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(8))
def test_a_bound_is_never_above_what_was_found(seed: int) -> None:
    problem = tiny_problem(seed, layers=4, devices=3, microbatches=2, types=2, tied=True)
    found = search_partition(problem, time_limit_s=0.2, deterministic=True)
    assert 0 < found.lower_bound_s <= found.objective_s < math.inf


@given(problems(), st.data())
def test_no_schedule_of_the_stages_is_faster_than_their_objective(
    problem: Problem, data: st.DataObject
) -> None:
    """Published, list and random schedules, with split backwards where the job allows these."""
    found = search_partition(problem, time_limit_s=0.2, deterministic=True)
    assume(found.stages)
    if found.status == "optimal":
        assert found.gap < 1e-3
    pipeline = place(problem, found.stages)
    backwards = ("whole", "split", "any") if problem.job.splits else ("whole",)
    times_s = [
        schedule.iteration_time_s
        for backward in backwards
        for schedule in quick_schedules(pipeline, backward=backward)
    ]
    drawn = data.draw(orders_for(pipeline, split_backwards=problem.job.splits))
    times_s.append(simulate(pipeline, drawn).iteration_time_s)
    assert min(times_s) >= found.objective_s * (1 - 1e-9)
