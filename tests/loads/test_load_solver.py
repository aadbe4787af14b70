"""The solvers find what trying every placement finds, and prove it."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loads.load_instances import chain, load_instances
from loads.load_oracle import best_load

from benchmarks.placement.solver import solve
from benchmarks.placement.solver.evaluator import assignment_problems, objective
from benchmarks.placement.solver.instance import DeviceClass, LoadInstance, LoadNode
from benchmarks.placement.solver.result import LoadResult
from planner.search.budget import Clock, Settings


def solved(instance: LoadInstance, *, contiguous: bool, limit_s: float = 60) -> LoadResult:
    settings = Settings(workers=1, deterministic=True)
    clock = Clock(limit_s, deterministic=True)
    return solve.solve_loads(instance, contiguous=contiguous, settings=settings, clock=clock)


def check(instance: LoadInstance, *, contiguous: bool) -> None:
    result = solved(instance, contiguous=contiguous)
    expected = best_load(instance, contiguous=contiguous)
    if expected is None:
        assert (result.status, result.assignment, result.lower_bound) == ("infeasible", None, inf)
        return
    assert result.status == "optimal"
    assert result.assignment is not None
    assert not list(assignment_problems(instance, result.assignment, contiguous=contiguous))
    assert result.objective == objective(instance, result.assignment)
    assert result.objective == pytest.approx(expected, rel=1e-9)
    assert result.lower_bound == result.objective


@pytest.fixture
def no_ideals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave contiguous placements to CP-SAT, as where there are too many ideals."""
    monkeypatch.setattr(solve, "MOST_IDEALS", 0)


@given(load_instances())
def test_contiguous_placements_are_as_good_as_any(instance: LoadInstance) -> None:
    check(instance, contiguous=True)


@given(load_instances())
def test_free_placements_are_as_good_as_any(instance: LoadInstance) -> None:
    check(instance, contiguous=False)


@pytest.mark.usefixtures("no_ideals")
def test_contiguous_placements_by_cp_sat_are_as_good_as_any() -> None:
    @given(load_instances())
    def every(instance: LoadInstance) -> None:
        check(instance, contiguous=True)

    every()


@given(load_instances(), st.sampled_from([True, False]))
def test_a_bound_without_time_is_below_every_placement(
    instance: LoadInstance, contiguous: bool
) -> None:
    result = solved(instance, contiguous=contiguous, limit_s=0)
    expected = best_load(instance, contiguous=contiguous)
    assert result.lower_bound <= (inf if expected is None else expected * (1 + 1e-12))
    if result.objective is not None:
        assert expected is not None
        assert result.objective >= expected * (1 - 1e-12)


def test_progress_is_told_in_order_and_ends_at_the_result() -> None:
    result = solved(chain([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]), contiguous=False)
    times = [step.seconds for step in result.history]
    assert times == sorted(times)
    bounds = [step.lower_bound for step in result.history]
    assert bounds == sorted(bounds)
    assert (result.history[-1].objective, bounds[-1]) == (result.objective, result.lower_bound)


def test_one_seed_gives_one_placement() -> None:
    instance = chain([float(index % 5 + 1) for index in range(14)], accelerators=3, cpus=1)
    results = [solved(instance, contiguous=False) for _ in range(2)]
    assert results[0] == results[1]


def test_devices_beyond_the_nodes_change_nothing() -> None:
    few = solved(chain([1.0, 2.0, 3.0], accelerators=3, cpus=1), contiguous=True)
    many = solved(chain([1.0, 2.0, 3.0], accelerators=50_000, cpus=900), contiguous=True)
    assert few.objective == many.objective


def test_the_second_class_keeps_its_numbers_behind_unused_devices() -> None:
    instance = chain([1.0, 1.0], accelerators=7, cpus=1)
    nodes = tuple(replace(node, allowed=(False, True)) for node in instance.nodes)
    result = solved(replace(instance, nodes=nodes), contiguous=True)
    assert result.assignment == (7, 7)


def test_times_of_very_different_sizes_stay_exact() -> None:
    instance = chain([1e-300, 1e-300, 1e-300], transfer_time=0.0)
    assert solved(instance, contiguous=True).objective == pytest.approx(2e-300)
    mixed = chain([1e12, 1.0, 1e12, 1e-12], transfer_time=0.0)
    assert solved(mixed, contiguous=True).objective == pytest.approx(1e12 + 1e-12)


def test_no_time_at_all_is_no_load() -> None:
    result = solved(chain([0.0, 0.0], transfer_time=0.0), contiguous=False)
    assert (result.objective, result.status) == (0.0, "optimal")


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_graph_of_thousands_of_nodes_gets_a_placement(
    monkeypatch: pytest.MonkeyPatch, contiguous: bool
) -> None:
    monkeypatch.setattr(solve, "MOST_MODEL_CELLS", 0)
    instance = chain([1.0 + index % 3 for index in range(6000)], accelerators=4)
    result = solved(instance, contiguous=contiguous)
    assert result.objective is not None
    assert result.lower_bound <= result.objective < 1.01 * result.lower_bound


def test_a_chain_of_a_thousand_nodes_is_proved() -> None:
    result = solved(chain([1.0 + index % 3 for index in range(1000)]), contiguous=True)
    assert result.status == "optimal"
    assert result.objective == 1000.0 + 0.5


@pytest.mark.extensive
def test_more_ideals_than_can_be_listed_still_give_a_bounded_placement() -> None:
    """Ten chains of five have 6**10 ideals."""
    nodes = tuple(
        LoadNode(index, (1.0 + index % 4, 20.0), (True, True), transfer_time=0.25)
        for index in range(50)
    )
    edges = tuple((index, index + 1) for index in range(49) if index % 5 != 4)
    classes = (DeviceClass("accelerator", 5, None, True), DeviceClass("cpu", 1, None, False))
    instance = LoadInstance("chains", classes, nodes, edges)
    result = solved(instance, contiguous=True, limit_s=3)
    assert result.objective is not None
    assert result.assignment is not None
    assert not list(assignment_problems(instance, result.assignment, contiguous=True))
    assert 0.9 * result.objective < result.lower_bound <= result.objective


def leaf(time: float, memory_bytes: float, is_allowed: bool = True) -> LoadInstance:
    """A node and what follows it alone, on two accelerators that hold 4 bytes, and a CPU."""
    return LoadInstance(
        name="leaf",
        classes=(DeviceClass("accelerator", 2, 4.0, True), DeviceClass("cpu", 1, None, False)),
        nodes=(
            LoadNode(0, (1.0, 10.0), (True, True), 3.0),
            LoadNode(1, (time, time), (is_allowed, True), memory_bytes),
        ),
        edges=((0, 1),),
    )


@pytest.mark.parametrize(
    ("instance", "value"),
    [
        (leaf(0.0, 1.0), 1.0),
        (leaf(0.0, 2.0), 10.0),
        (leaf(0.0, 1.0, is_allowed=False), 10.0),
        (leaf(2e-6, 2.0), 1.0),
    ],
)
def test_a_leaf_without_time_goes_with_its_neighbour_as_the_authors_have_it(
    instance: LoadInstance, value: float
) -> None:
    """The values are those of the authors' program, throughput-dp/dp.cpp, on the same graphs."""
    assert solved(instance, contiguous=True).objective == value
    assert solved(instance, contiguous=False).objective == 1.0
