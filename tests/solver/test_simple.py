"""Simple plans: hardly slower than the fastest, on simpler stages and in published orders."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from brute_force import all_partitions
from builders import boundary, cluster, graph, layer, link, pipeline, star
from tiny_problems import tiny_problem, two_stages_or_one

from planner import Job, PipeplanError, Problem, Result, solve, verify
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import is_connected, place
from planner.schedules.assignment import assignments
from planner.schedules.whole import one_forward_one_backward
from planner.search.choices import complexity_of
from planner.search.incumbent import Found
from planner.search.result import Complexity
from planner.simulation.simulator import simulate


def solved(problem: Problem, *, simple: bool = True, within: float = 0.01) -> Result:
    return solve(
        problem,
        time_limit_s=2,
        deterministic=True,
        prefer="simple" if simple else "fast",
        prefer_within=within,
    )


# --- known by hand --------------------------------------------------------------------------------


def test_a_stage_less_is_worth_what_the_tolerance_says() -> None:
    """1.99 s on two devices, 2.01 s on one, which is 1.005 % more."""
    problem = two_stages_or_one()
    fastest, strict, loose = (
        solved(problem, simple=False),
        solved(problem),
        solved(problem, within=0.02),
    )
    assert len(fastest.plan.stages) == len(strict.plan.stages) == 2
    assert strict.iteration_time_s == fastest.iteration_time_s == pytest.approx(1.99)
    assert strict.status == "optimal"
    assert strict.simplicity is not None
    assert strict.simplicity.fastest_s == fastest.iteration_time_s
    assert "within 1.00% of the fastest is simpler" in strict.summary()
    assert len(loose.plan.stages) == 1
    assert loose.iteration_time_s == pytest.approx(2.01)
    # What is proved is about all plans: the search is done, the plan not the fastest.
    assert loose.status == "feasible"
    assert loose.ended == "proved"
    assert loose.lower_bound_s == fastest.lower_bound_s
    assert "1 stage instead of 2" in loose.summary()
    assert "1.01% longer than the fastest" in loose.summary()
    assert "the simplest within 2.00% of the fastest" in loose.plan.provenance.solver
    assert not verify(loose.plan)


def test_a_stage_ends_where_a_block_does() -> None:
    """With whole backwards 2 stages take F + B of the first and 8 (F + B) of the second.

    The small layer with the second stage: 3 * 1.99 s + 8 * 3 * 2.02 s = 54.45 s; with the first:
    3 * 2.01 s + 8 * 3 * 2 s = 54.03 s.
    """
    forward_s = {"h.0.a": 0.99, "h.0.b": 1.0, "h.1.a": 0.02, "h.1.b": 2.0}
    layers = [layer(name, time_s, 2 * time_s) for name, time_s in forward_s.items()]
    ties = [boundary(u, v, bytes_=0) for u, v in pairwise(forward_s)]
    job = Job(optimizer="sgd", microbatches=8, min_stages=2, replication=False, backward="whole")
    problem = Problem(graph(layers, ties), star(2), job)
    fastest, simple = solved(problem, simple=False), solved(problem)
    assert fastest.iteration_time_s == pytest.approx(54.03)
    assert simple.iteration_time_s == pytest.approx(54.45)
    assert simple.plan.stages[0].layers == ("h.0.a", "h.0.b")
    assert simple.simplicity is not None
    assert simple.simplicity.fastest_complexity == Complexity(0, 2, 0, 1, 0)
    assert simple.simplicity.complexity == Complexity(0, 2, 0, 0, 0)
    assert "0 divided blocks instead of 1; takes 0.78% longer" in simple.summary()
    assert simple.lower_bound_s == fastest.lower_bound_s


def test_replicas_are_made_even_and_the_orders_published() -> None:
    """Four devices on two nodes: any plan is chosen within 1000 %, so the simplest one there is.

    A stage of one device is that; with two stages it is a pipeline of single devices.
    """
    problem = nodes(min_stages=2)
    result = solved(problem, within=1)
    assert result.simplicity is not None
    assert result.simplicity.complexity == Complexity(0, 2, 0, 0, 0)


# --- complexity -----------------------------------------------------------------------------------


def nodes(**job: int) -> Problem:
    names = ["n0/a", "n0/b", "n1/a", "n1/b"]
    the_cluster = cluster(names, [link(name, "hub") for name in names], ["hub"])
    layers = [layer("h.0.a"), layer("h.0.b"), layer("h.1.a"), layer("head")]
    return Problem(graph(layers), the_cluster, Job(optimizer="sgd", microbatches=4, **job))


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([("h.0.a h.0.b h.1.a head", "n0/a n0/b n1/a n1/b")], Complexity(0, 1, 0, 0, 0)),
        ([("h.0.a h.0.b h.1.a", "n0/a n1/a"), ("head", "n0/b n1/b")], Complexity(0, 2, 0, 0, 0)),
        ([("h.0.a h.0.b h.1.a", "n0/a n0/b"), ("head", "n1/a")], Complexity(0, 2, 1, 0, 0)),
        # Three devices: two on one node and one on the other, with two or one microbatch each.
        ([("h.0.a", "n0/a n0/b n1/a"), ("h.0.b h.1.a head", "n1/b")], Complexity(1, 2, 2, 1, 0)),
    ],
)
def test_complexity_is_as_counted_by_hand(
    stages: list[tuple[str, str]], expected: Complexity
) -> None:
    problem = nodes()
    placed = pipeline(
        problem.graph,
        problem.cluster,
        [(layers.split(), devices.split()) for layers, devices in stages],
        microbatches=4,
    )
    schedule = published_schedules(placed)[0]
    assert complexity_of(schedule) == expected


# --- against every partition ----------------------------------------------------------------------


def published_schedules(placed: PlacedPipeline) -> list[Found]:
    """1F1B with microbatches dealt out in turn and by speed, where it fits."""
    found = []
    for assignment in assignments(placed):
        orders = one_forward_one_backward(placed, assignment)
        timeline = simulate(placed, orders)
        if not timeline.overflow_bytes:
            found.append(Found.of(timeline, "1F1B"))
    return found


def every_simple_schedule(problem: Problem, longest_s: float) -> Iterator[Complexity]:
    """The complexity of every partition in 1F1B that is fast enough."""
    for specs in all_partitions(problem):
        placed = place(problem, specs)
        if is_connected(placed):
            for schedule in published_schedules(placed):
                if schedule.seconds <= longest_s:
                    yield complexity_of(schedule)


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_within_the_tolerance_is_simpler(seed: int) -> None:
    problem = tiny_problem(seed, layers=3, devices=3, microbatches=4, topology="switches")
    result = solved(problem, within=0.05)
    found = result.simplicity
    assert found is not None
    longest_s = 1.05 * found.fastest_s
    assert found.fastest_s <= result.iteration_time_s <= longest_s
    assert result.lower_bound_s <= found.fastest_s
    simple = every_simple_schedule(problem, longest_s)
    assert found.complexity <= min(simple, default=found.complexity)
    assert result.plan == solved(problem, within=0.05).plan
    assert not verify(result.plan)


def test_wrong_choices_are_refused() -> None:
    problem = two_stages_or_one()
    with pytest.raises(PipeplanError, match="prefer: 'nice' is not one of fast, simple"):
        solve(problem, prefer="nice")  # type: ignore[arg-type]
    with pytest.raises(PipeplanError, match="prefer_within: -1 is not a share"):
        solved(problem, within=-1)
    with pytest.raises(PipeplanError, match="two choices"):
        solve(problem, prefer="simple", robust=True)
