"""The size of microbatches as part of the search, where the job leaves it open."""

import pytest
from transformers_by_hand import machines, problem, transformer

from planner import Job, PipeplanError, Plan, Problem, Result, compare, solve, verify
from planner.model.figures import MeasuredTimes
from planner.search.microbatches import of_each_size, resized
from planner.search.variants import variants_of
from planner.verification.proof import prove

SIZES = (1, 2, 8)


def open_problem(**job: object) -> Problem:
    """Four blocks on three devices; 16 samples an iteration."""
    told = problem(transformer(4), machines(3), microbatches=8)
    two = resized(told, 2)
    settings = {**two.job.model_dump(), "microbatch_sizes": SIZES, **job}
    return Problem(two.graph, two.cluster, Job.model_validate(settings))


def searched(told: Problem) -> Result:
    return solve(told, deterministic=True, time_limit_s=2, seed=1)


def test_the_chosen_size_is_the_best_of_separate_searches() -> None:
    told = open_problem()
    found = searched(told)
    alone = [searched(row) for row in of_each_size(told)]
    best_s = min(row.iteration_time_s for row in alone)
    assert found.iteration_time_s == pytest.approx(best_s, rel=0.01)
    assert found.lower_bound_s <= best_s
    # A bound of one size alone may be above another size's plan.
    assert found.lower_bound_s <= found.plan.predicted.lower_bound_s


def test_the_plan_is_one_of_its_size_with_a_certificate() -> None:
    found = searched(open_problem())
    plan, samples = found.plan, found.plan.job.samples_per_microbatch
    assert plan.job.microbatch_sizes == ()
    assert plan.model.graph.samples_per_microbatch == samples
    assert samples * plan.microbatches == 16
    again = Plan.parse(plan.model_dump(mode="json"), "plan")
    assert not verify(again)
    assert not prove(again).problems
    assert f"microbatches of {samples} sample" in found.summary()


def test_measured_times_are_in_proportion() -> None:
    times = MeasuredTimes(forward_s=1.0, input_gradient_s=2.0, weight_gradient_s=0.5)
    told = problem(transformer(1, measured={"unit": times.model_dump()}), machines(2))
    (layer,) = [row for row in resized(told, 3).graph.record.layers if row.name == "h.0"]
    assert layer.measured["unit"] == MeasuredTimes(
        forward_s=3.0, input_gradient_s=6.0, weight_gradient_s=1.5
    )


def test_sizes_are_searched_with_each_size_of_groups() -> None:
    fields = {"microbatches": 8, "tensor_parallel": "any", "microbatch_sizes": (1, 2)}
    variants = variants_of(problem(transformer(4, degrees=(2,)), machines(2, 2), **fields))
    assert [row.samples for row in variants] == [1, 1, 2, 2]
    assert [row.words for row in variants[2:]] == [
        "2 samples a microbatch, single devices",
        "2 samples a microbatch, groups of 2",
    ]


@pytest.mark.parametrize("size", [0, 3])
def test_wrong_sizes_are_refused(size: int) -> None:
    with pytest.raises(PipeplanError, match="microbatch_sizes"):
        Job(microbatches=8, microbatch_sizes=(size,))


def test_commands_that_need_one_size_say_so() -> None:
    with pytest.raises(PipeplanError, match=r"microbatch_sizes = .*: compare does not choose one"):
        compare(open_problem(), time_limit_s=0.1)
