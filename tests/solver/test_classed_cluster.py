"""The bound over classes of devices against every partition of small problems, really scheduled."""

import math

import pytest
from brute_force import all_partitions
from builders import boundary, cluster, device_type, graph, layer, link
from hypothesis import given
from hypothesis import strategies as st
from tiny_problems import seeds, tiny_problem

from benchmarks.plans.oracle import optimum_below
from planner import Cluster, Job, Problem
from planner.costs.placement import is_connected, place
from planner.search.partition.bounds.partition import work_bound_s
from planner.search.partition.chain import Chain
from planner.search.partition.intervals import coarse_cuts
from planner.search.partition.relaxations import relaxed_intervals, tied_stages
from planner.search.partition.relaxations.class_relaxation import ClassRelaxation
from planner.search.partition.relaxations.type_relaxation import TypeRelaxation
from planner.search.schedule.heuristic import best_heuristic_schedule

ROUNDING = 1 + 1e-9


def least_time_s(problem: Problem) -> float:
    """Of a quick schedule of any partition."""
    placed = (place(problem, specs) for specs in all_partitions(problem))
    found = (best_heuristic_schedule(pipeline) for pipeline in placed if is_connected(pipeline))
    return min((s.iteration_time_s for s in found if s is not None), default=math.inf)


def class_relaxation(problem: Problem) -> ClassRelaxation:
    return ClassRelaxation(Chain(problem), problem.cluster.link_table)


def bound_s(problem: Problem, guess_s: float = 1e3) -> float:
    return class_relaxation(problem).bound_s(work_bound_s(Chain(problem)), guess_s, 1e3)


@pytest.mark.extensive
@given(st.data())
def test_no_plan_of_any_small_problem_beats_the_bound(data: st.DataObject) -> None:
    problem = tiny_problem(
        data.draw(st.integers(0, 999)),
        layers=data.draw(st.integers(2, 4)),
        devices=data.draw(st.integers(2, 4)),
        microbatches=data.draw(st.integers(1, 6)),
        types=data.draw(st.integers(1, 3)),
        replication=data.draw(st.booleans()),
        backward=data.draw(st.sampled_from(["whole", "any", "split"])),
        overlap=data.draw(st.booleans()),
        largest_mib=data.draw(st.sampled_from([8, 60])),
        tied=data.draw(st.booleans()),
        topology=data.draw(st.sampled_from(["mesh", "chain", "switches"])),
        cut_mib=data.draw(st.sampled_from([1.0, 7.5, 30.0, 100.0])),
        link_scale=data.draw(st.sampled_from([0.2, 1.0, 5.0])),
    )
    best_s = least_time_s(problem)
    if math.isfinite(best_s):
        assert bound_s(problem, 0.7 * best_s) <= best_s * ROUNDING


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_bounds_of_coarsened_chains_hold(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaxed_intervals, "coarse_cuts", lambda chain: coarse_cuts(chain, 3))
    problem = tiny_problem(seed, layers=6, devices=3, microbatches=4, tied=True)
    best_s = least_time_s(problem)
    relaxed = TypeRelaxation(Chain(problem), problem.cluster.link_table)
    assert 0 < relaxed.bound_s(2 * best_s) <= best_s * ROUNDING


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("topology", ["mesh", "switches"])
def test_partitions_of_the_relaxation_are_partitions(seed: int, topology: str) -> None:
    problem = tiny_problem(seed, layers=5, devices=4, microbatches=4, types=2, topology=topology)
    relaxation = class_relaxation(problem)
    partition = relaxation.partition(1.2 * bound_s(problem))
    assert partition is not None
    assert [stage.begin for stage in partition] == [0, *(s.end for s in partition[:-1])]
    assert partition[-1].end == 5
    devices = [device for stage in partition for device in stage.devices]
    assert len(set(devices)) == len(devices)
    assert is_connected(place(problem, Chain(problem).specs(partition)))


def test_nothing_keeps_a_limit_below_the_bound() -> None:
    problem = tiny_problem(3, layers=4, devices=3, microbatches=4)
    assert class_relaxation(problem).partition(0.9 * bound_s(problem)) is None


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_on_replicas_that_begin_one_after_the_other_beats_the_bound(seed: int) -> None:
    """Exhaustive optimum, of split backwards and overlapped reductions too."""
    problem = tiny_problem(
        seed,
        layers=3,
        devices=3,
        microbatches=1 + seed % 4,
        types=1 + seed % 2,
        backward=("whole", "any", "split")[seed % 3],
        overlap=seed % 2 == 0,
        link_scale=5.0,
    )
    optimum_s = optimum_below(problem, least_time_s(problem) * ROUNDING).time_s
    assert bound_s(problem, 0.7 * optimum_s) <= optimum_s * ROUNDING + 2e-7


def test_replicas_begin_one_after_the_other() -> None:
    """A device hands on a microbatch a second, to two that have 12 s of work each.

    The second of these begins after 2 s. The way there and home takes 1.1 s.
    """
    rows = [
        layer("a", forward_s=1, backward_s=0.1, device_types=["first"]),
        layer("b", forward_s=2, backward_s=4, device_types=["last"]),
    ]
    types = {"first": device_type(), "last": device_type()}
    joined = cluster(
        {"d0": "first", "d1": "last", "d2": "last"},
        [link("d0", "d1"), link("d0", "d2")],
        types=types,
    )
    job = Job(microbatches=4, backward="whole")
    problem = Problem(graph(rows, [boundary("a", "b", bytes_=0)]), joined, job)
    assert bound_s(problem) == pytest.approx(14.0, rel=1e-3)
    assert least_time_s(problem) == pytest.approx(14.1)


def behind_ports(problem: Problem, gb_per_s: float, duplex: str) -> Problem:
    """The same devices on one switch, the last by a link of its own."""
    data = problem.cluster.model_dump(mode="json")
    names = problem.cluster.device_names
    data["switches"] = ["switch"]
    data["links"] = [
        {"between": [name, "switch"], "bandwidth_gb_per_s": 5.0, "latency_us": 0.0}
        for name in names[:-1]
    ]
    last = {"between": [names[-1], "switch"], "bandwidth_gb_per_s": gb_per_s, "latency_us": 0.0}
    data["links"].append({**last, "duplex": duplex})
    return Problem(problem.graph, Cluster.from_data(data), problem.job)


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_a_narrow_port_keeps_its_device_from_taking_its_share(seed: int) -> None:
    problem = tiny_problem(seed, layers=4, devices=3, microbatches=6, cut_mib=30.0)
    wide, narrow, half = (
        bound_s(behind_ports(problem, *port))
        for port in ((5.0, "full"), (0.05, "full"), (0.05, "half"))
    )
    assert wide < narrow <= half
    assert half <= least_time_s(behind_ports(problem, 0.05, "half")) * ROUNDING


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_tied_parameters_raise_the_bound(seed: int) -> None:
    problem = tiny_problem(seed, layers=4, devices=3, microbatches=6, tied=True, link_scale=0.05)
    assert bound_s(problem) <= least_time_s(problem) * ROUNDING


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_with_tied_parameters_beats_the_bound(seed: int) -> None:
    """Exhaustive optimum, on two nodes with a slow network."""
    problem = tied_over_nodes(seed, microbatches=1 + seed % 3)
    optimum_s = optimum_below(problem, least_time_s(problem) * ROUNDING).time_s
    assert bound_s(problem, 0.7 * optimum_s) <= optimum_s * ROUNDING + 2e-7


@pytest.mark.parametrize("seed", [2, 5])
def test_a_parameter_of_two_stages_is_reduced_over_both(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = tied_over_nodes(seed, microbatches=3)
    known = bound_s(problem)
    monkeypatch.setattr(tied_stages, "MOST_SUPPORTS", 0)
    assert known > bound_s(problem) * 1.01
    assert known <= least_time_s(problem) * ROUNDING


def tied_over_nodes(seed: int, microbatches: int) -> Problem:
    """Three layers, two of which share a parameter, on two nodes of two devices or one."""
    problem = tiny_problem(seed, layers=3, devices=3, microbatches=microbatches)
    record = problem.graph.record
    rows = [row.model_copy(update={"parameters": ("p0",)}) for row in record.layers[2:]]
    graph = type(problem.graph).from_record(
        record.model_copy(
            update={
                "layers": (*record.layers[:2], *rows),
                "parameters": tuple(p for p in record.parameters if p.name != "p2"),
            }
        )
    )
    data = problem.cluster.model_dump(mode="json")
    data["switches"] = ["node", "network"]
    ends = [("d0", "node", 5.0), ("d1", "node", 5.0), ("node", "network", 0.2)]
    data["links"] = [
        {"between": [u, v], "bandwidth_gb_per_s": width, "latency_us": 0.0}
        for u, v, width in (*ends, ("network", "d2", 0.2))
    ]
    return Problem(graph, Cluster.from_data(data), problem.job)


def test_a_cluster_of_many_unlike_devices_is_left_to_other_bounds() -> None:
    small = tiny_problem(0, layers=4, devices=3, microbatches=2, types=3)
    large = tiny_problem(0, layers=4, devices=14, microbatches=2, types=7)
    assert class_relaxation(small).is_tractable
    assert not class_relaxation(large).is_tractable


def test_a_chain_in_cells_is_left_to_other_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage inside of a cell may join two devices better than they are joined themselves."""
    monkeypatch.setattr("planner.search.partition.relaxations.class_relaxation.MAX_CUTS", 3)
    assert class_relaxation(tiny_problem(0, layers=3, devices=3, microbatches=2)).is_tractable
    assert not class_relaxation(tiny_problem(0, layers=4, devices=3, microbatches=2)).is_tractable
