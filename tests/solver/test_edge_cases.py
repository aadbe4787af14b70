"""Problems at the edge: nothing to do, nothing joined, devices that look alike, far figures."""

from itertools import pairwise

import pytest
from brute_force import all_partitions
from builders import boundary, cluster, device_type, graph, layer, link, parameter
from ortools.sat.python import cp_model

from planner import Job, Problem, solve
from planner.costs.placement import is_connected, place
from planner.errors import InfeasibleError, PipeplanError
from planner.plan.operations import owners
from planner.search.partition.bounds.partition import longest_plan_s
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.partition.chain import Chain
from planner.search.partition.cp_sat.model import PartitionModel
from planner.search.partition.symmetry import interchangeable_devices
from planner.search.schedule.classics import one_by_one
from planner.simulation.simulator import simulate


def model_minimum_s(problem: Problem, horizon_s: float) -> float:
    chain = Chain(problem)
    model = PartitionModel(chain, horizon_s, min(chain.length, len(problem.cluster.devices)))
    assert model.model.validate() == ""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 8
    assert solver.solve(model.model) == cp_model.OPTIMAL
    return solver.objective_value * model.tick_s


def least_bound_s(problem: Problem) -> float:
    placed = (place(problem, specs) for specs in all_partitions(problem))
    return min(schedule_bound_s(pipeline) for pipeline in placed if is_connected(pipeline))


def test_a_model_that_takes_no_time_is_planned() -> None:
    nothing = graph([layer("a", 0, 0), layer("b", 0, 0)], [boundary("a", "b", bytes_=0)])
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    result = solve(Problem(nothing, machines, Job(optimizer="sgd")), time_limit_s=1)
    assert result.iteration_time_s == 0


def test_replicas_that_reduce_nothing_need_no_link() -> None:
    alone = graph([layer("a")], [])
    problem = Problem(alone, cluster(["d0", "d1"], []), Job(microbatches=4))
    assert model_minimum_s(problem, 100.0) == pytest.approx(least_bound_s(problem))
    result = solve(problem, time_limit_s=5, deterministic=True)
    assert result.status == "optimal"
    assert len(result.plan.ranks) == 2


def test_parameters_tied_between_the_same_stages_wait_for_one_latency() -> None:
    rows = [layer("a", parameters=["p", "q"]), layer("b", parameters=["q"])]
    rows.append(layer("c", parameters=["p", "q"]))
    the_graph = graph(rows, None, [parameter("p", 1000), parameter("q", 1000)])
    machines = cluster(["d0", "d1"], [link("d0", "d1", latency_us=10**7)])
    job = Job(microbatches=2, replication=False, max_stages=2)
    problem = Problem(the_graph, machines, job)
    assert model_minimum_s(problem, 1000.0) <= least_bound_s(problem) * (1 + 1e-9)


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


# --- devices that look alike ----------------------------------------------------------------------


def test_leaves_of_one_switch_are_interchangeable() -> None:
    machines = cluster(["a", "b", "c"], [link(d, "hub") for d in "abc"], ["hub"])
    assert interchangeable_devices(machines) == [["a", "b", "c"]]


def test_leaves_of_different_switches_are_not() -> None:
    """All routes are alike, but only a and b reach each other without the link in the middle."""
    ends = [link("a", "s"), link("b", "s"), link("c", "t"), link("s", "t", 1)]
    machines = cluster(["a", "b", "c"], ends, ["s", "t"])
    widths = {machines.route("a", other).bandwidth_gb_per_s for other in "bc"}
    assert len(widths) == 1
    assert interchangeable_devices(machines) == [["a", "b"]]


def test_equal_devices_of_a_full_mesh_are_interchangeable() -> None:
    machines = cluster(["a", "b", "c"], [link("a", "b"), link("c", "b"), link("c", "a")])
    assert interchangeable_devices(machines) == [["a", "b", "c"]]


def test_devices_of_different_types_are_not() -> None:
    types = {"x": device_type(), "y": device_type(memory_gib=3.5)}
    machines = cluster(
        {"a": "x", "b": "y", "c": "x"}, [link(d, "hub") for d in "abc"], ["hub"], types
    )
    assert interchangeable_devices(machines) == [["a", "c"]]


# --- memory ---------------------------------------------------------------------------------------


def test_one_by_one_takes_no_longer_than_the_longest_plan() -> None:
    rows = [layer(f"l{i}", i + 1, parameters=[f"p{i}"]) for i in range(4)]
    the_graph = graph(rows, None, [parameter(f"p{i}", 10**8) for i in range(4)])
    machines = cluster(
        ["d0", "d1", "d2"], [link("d0", "d1", 0.5, latency_us=10**5), link("d1", "d2", 2)]
    )
    problem = Problem(the_graph, machines, Job(microbatches=3))
    longest_s = longest_plan_s(Chain(problem), 3)
    for specs in all_partitions(problem):
        pipeline = place(problem, specs)
        if is_connected(pipeline):
            pairs = [(s, m) for s in range(len(specs)) for m in range(3)]
            owner = {(s, m): specs[s].devices[m % len(specs[s].devices)] for s, m in pairs}
            orders = one_by_one(pipeline, owner)
            assert owners(orders) == owner
            assert simulate(pipeline, orders).iteration_time_s <= longest_s


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
