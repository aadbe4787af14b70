"""Problems at the edge: nothing to do, nothing joined, far figures."""

from itertools import combinations, pairwise

import pytest
from builders import boundary, cluster, device_type, graph, layer, link, parameter, star
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from planner import Job, Problem, solve, verify
from planner.errors import InfeasibleError, PipeplanError
from planner.plan.plan import Plan


def test_a_model_that_takes_no_time_is_planned() -> None:
    nothing = graph([layer("a", 0, 0), layer("b", 0, 0)], [boundary("a", "b", bytes_=0)])
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    result = solve(Problem(nothing, machines, Job(optimizer="sgd")), time_limit_s=1)
    assert result.iteration_time_s == 0


def test_several_stages_a_device_may_take_no_time() -> None:
    nothing = graph([layer(name, 0.0, 0.0) for name in "abcd"])
    problem = Problem(nothing, star(2), Job(microbatches=4, max_stages_per_device=2))
    assert solve(problem, time_limit_s=0.5, deterministic=True).iteration_time_s >= 0


def test_a_search_without_time_has_a_plan() -> None:
    problem = Problem(graph([layer(name) for name in "abcd"]), star(3), Job(microbatches=4))
    result = solve(problem, time_limit_s=1e-3, deterministic=True)
    assert 0 < result.lower_bound_s <= result.iteration_time_s * (1 + 1e-9)


def test_replicas_that_reduce_nothing_need_no_link() -> None:
    alone = graph([layer("a")], [])
    problem = Problem(alone, cluster(["d0", "d1"], []), Job(microbatches=4))
    result = solve(problem, time_limit_s=5, deterministic=True)
    assert result.status == "optimal"
    assert len(result.plan.ranks) == 2


@pytest.mark.parametrize("gb_per_s", [1e-4, 1e-2])
@pytest.mark.parametrize("deterministic", [True, False])
def test_weights_far_too_large_for_the_links_are_no_trouble(
    gb_per_s: float, deterministic: bool
) -> None:
    """The time of an all-reduce, in ticks of so short an iteration, leaves 64 bits."""
    rows = [layer(name, 1e-6, 1e-6, parameters=["p"] * (name == "a")) for name in "abc"]
    cuts = [boundary(u, v, bytes_=10**6) for u, v in pairwise("abc")]
    the_graph = graph(rows, cuts, [parameter("p", 10**8)])
    machines = cluster(["d0", "d1"], [link("d0", "d1", gb_per_s)])
    problem = Problem(the_graph, machines, Job(microbatches=2))
    result = solve(problem, time_limit_s=60, deterministic=deterministic)
    assert result.status == "optimal"


@pytest.mark.parametrize("replication", [False, True])
def test_a_chain_of_devices_is_planned_where_local_search_meets_unlinked_ones(
    replication: bool,
) -> None:
    names = [f"d{i}" for i in range(5)]
    machines = cluster(names, [link(u, v, 50) for u, v in pairwise(names)])
    rows = [layer(f"l{i}", 1 + i % 3, 2, parameters=[f"p{i}"]) for i in range(9)]
    the_graph = graph(rows, None, [parameter(f"p{i}", 10**6) for i in range(9)])
    job = Job(microbatches=8, replication=replication)
    result = solve(Problem(the_graph, machines, job), time_limit_s=1, deterministic=True)
    assert len(result.plan.ranks) > 1


# --- memory ---------------------------------------------------------------------------------------


def test_what_does_not_fit_is_said_to_be_proved() -> None:
    rows = [layer(name, parameters=[f"p{name}"]) for name in "abc"]
    the_graph = graph(rows, None, [parameter(f"p{name}", 10**8) for name in "abc"])
    small = {"unit": device_type(memory_gib=3.5)}
    machines = cluster(["d0", "d1"], [link("d0", "d1")], types=small)
    with pytest.raises(InfeasibleError, match="no plan fits: layer 'b' alone needs"):
        solve(Problem(the_graph, machines, Job()), time_limit_s=5, deterministic=True)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("time_limit_s", 0),
        ("time_limit_s", float("nan")),
        ("gap_limit", -1),
        ("gap_limit", float("nan")),
        ("workers", 0),
        ("seed", -1),
        ("seed", 2**40),
    ],
)
def test_a_setting_out_of_range_is_named(setting: str, value: float) -> None:
    problem = Problem(graph([layer("a")], []), cluster(["d0"], []), Job())
    with pytest.raises(PipeplanError, match=f"{setting}: "):
        solve(problem, **{setting: value})


# --- early plans ----------------------------------------------------------------------------------


def test_a_good_plan_is_found_before_the_bounds_take_their_time() -> None:
    names = [f"d{i}" for i in range(9)]
    machines = cluster(names, [link(u, v, 50) for u, v in combinations(names, 2)])
    rows = [layer(f"l{i}", 1 + i % 3, 2) for i in range(12)]
    problem = Problem(graph(rows), machines, Job(microbatches=32, replication=False))
    result = solve(problem, time_limit_s=2, deterministic=True)
    unproved_s = [row.iteration_time_s for row in result.history if row.lower_bound_s == 0]
    assert unproved_s[-1] <= 1.1 * result.iteration_time_s


# --- idle replicas -------------------------------------------------------------------------------


def idle(plan: Plan) -> list[tuple[int, str]]:
    runs = {(row.stage, name) for name, rows in plan.parsed_orders().items() for row in rows}
    held = ((k, name) for k, stage in enumerate(plan.stages) for name in stage.devices)
    return [row for row in held if row not in runs]


@given(problems(min_devices=2), st.sampled_from([1e-3, 0.1]))
def test_however_short_a_search_every_replica_runs_a_microbatch(
    problem: Problem, limit_s: float
) -> None:
    try:
        result = solve(problem, time_limit_s=limit_s, deterministic=True)
    except InfeasibleError:
        return
    assert idle(result.plan) == []
    assert verify(result.plan) == []
    assert result.lower_bound_s <= result.iteration_time_s * (1 + 1e-9)
