"""The partition model's optimum is the least bound over all partitions, by brute force."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from brute_force import all_partitions
from builders import cluster, device_type, graph, layer, link, parameter
from hypothesis import assume, given
from hypothesis import strategies as st
from ortools.sat.python import cp_model
from strategies import orders_for, partitions, problems
from tiny_problems import seeds, tiny_problem

from planner import Cluster, Job, LayerGraph, Problem
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.search.budget import Clock, Settings
from planner.search.partition.bounds.partition import work_bound_s
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.partition.chain import Chain, StageChoice
from planner.search.partition.cp_sat.memory import in_flight_levels
from planner.search.partition.cp_sat.model import PartitionModel
from planner.search.partition.cp_sat.search import PartitionSearch
from planner.search.schedule.heuristic import best_heuristic_schedule
from planner.simulation.simulator import simulate


def solved(problem, horizon_s):
    chain = Chain(problem)
    count = min(chain.length, len(problem.cluster.devices))
    model = PartitionModel(chain, horizon_s, count)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 8  # Of several kinds: some alone take minutes.
    assert solver.solve(model.model) == cp_model.OPTIMAL
    return chain, model, solver


@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize(("types", "replication"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("backward", ["whole", "any"])
def test_optimum_is_the_least_bound_of_all_partitions(seed, types, replication, backward):
    problem = tiny_problem(
        seed,
        layers=5,
        devices=3,
        microbatches=5,
        types=types,
        replication=replication,
        backward=backward,
    )
    split = problem.job.splits
    bounds = [
        schedule_bound_s(place(problem, specs), split=split) for specs in all_partitions(problem)
    ]
    chain, model, solver = solved(problem, 2 * max(bounds))
    found_s = solver.objective_value * model.tick_s
    # The bound sharpens all-reduces only at some replica counts, all of them here.
    assert found_s <= min(bounds) * (1 + 1e-9)
    assert found_s >= min(bounds) * (1 - 1e-6) - 1.01 * model.tick_s
    chosen = place(problem, chain.specs(model.partition(solver)))
    assert schedule_bound_s(chosen, split=split) <= min(bounds) + 1.01 * model.tick_s


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backward", ["whole", "any"])
def test_of_an_overlapped_reduction_no_more_counts_than_must_follow(seed, backward):
    problem = tiny_problem(
        seed,
        layers=4,
        devices=3,
        microbatches=3,
        types=1 + seed % 2,
        backward=backward,
        overlap=True,
        largest_mib=90,
    )
    split = problem.job.splits
    bounds = [
        schedule_bound_s(place(problem, specs), split=split) for specs in all_partitions(problem)
    ]
    _, model, solver = solved(problem, 2 * max(bounds))
    assert solver.objective_value * model.tick_s <= min(bounds) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_work_bound_is_below_every_partitions_schedule(seed):
    problem = tiny_problem(seed, layers=4, devices=3, microbatches=4, types=2)
    bound = work_bound_s(Chain(problem))
    for specs in all_partitions(problem):
        pipeline = place(problem, specs)
        schedule = best_heuristic_schedule(pipeline)
        if schedule is not None:
            assert bound <= schedule.iteration_time_s * (1 + 1e-9)
            assert schedule_bound_s(pipeline) <= schedule.iteration_time_s * (1 + 1e-9)


def test_forbidden_partition_does_not_come_back():
    problem = tiny_problem(3, layers=4, devices=3, microbatches=4)
    _, model, solver = solved(problem, 10.0)
    seen = [model.partition(solver)]
    values = [solver.objective_value]
    for _ in range(5):
        model.forbid(seen[-1])
        assert solver.solve(model.model) == cp_model.OPTIMAL
        seen.append(model.partition(solver))
        values.append(solver.objective_value)
    assert len(set(seen)) == len(seen)
    assert values == sorted(values)


def test_users_can_add_constraints_to_the_model():
    problem = tiny_problem(4, layers=5, devices=3, microbatches=5)
    _, model, solver = solved(problem, 10.0)
    free = solver.objective_value
    for stage in model.decisions.stages:
        model.model.add(model.decisions.on[stage, 0] == 0)  # Device d0 is needed elsewhere.
    assert solver.solve(model.model) == cp_model.OPTIMAL
    assert all("d0" not in stage.devices for stage in model.partition(solver))
    assert solver.objective_value >= free


def fixed(model, specs):
    """The value of the model for these stages, and whether it allows them."""
    model.hint(specs)
    solver = cp_model.CpSolver()
    status = model.solve_hinted(solver, Clock(60, False))
    return status == cp_model.OPTIMAL, solver.objective_value * model.tick_s


def with_memory(problem, peak_bytes):
    """Devices whose types have as much memory as the fullest of them needs."""
    data = problem.cluster.model_dump(mode="json")
    for name, kind in data["device_types"].items():
        held = [peak_bytes.get(d.name, 0) for d in problem.cluster.devices if d.type == name]
        kind.update(memory_gib=(max(held) + 2) / 2**30, reserved_gib=0)
    return replace(problem, cluster=Cluster.from_data(data))


@given(st.data())
def test_every_plan_is_allowed_and_no_faster_than_the_model_says(data):
    """Any stages, replicas, recomputation and schedule, with no more memory than they need."""
    problem = data.draw(problems())
    specs = data.draw(partitions(problem))
    devices = [device for spec in specs for device in spec.devices]
    assume(len(set(devices)) == len(devices))
    pipeline = place(problem, specs)
    timeline = simulate(pipeline, data.draw(orders_for(pipeline, split_backwards=False)))
    # What takes no time holds no memory in a replay, and some in the model.
    assume(all(event.end_s > event.start_s for event in timeline.operations))
    short = with_memory(problem, timeline.peak_memory_bytes)
    horizon_s = max(2 * timeline.iteration_time_s, 1e-6)
    model = PartitionModel(Chain(short), horizon_s, len(specs), break_symmetry=False)
    assert allows_within(model, specs, timeline.iteration_time_s * (1 + 1e-9))


def allows_within(model, specs, limit_s):
    """Whether the model allows these stages with an objective of at most a limit.

    Asking for the least objective instead may take CP-SAT minutes with few workers.
    """
    model.model.add(model.objective <= math.floor(limit_s / model.tick_s))
    model.hint(specs)
    solver = cp_model.CpSolver()
    solver.parameters.stop_after_first_solution = True
    status = model.solve_hinted(solver, Clock(60, False))
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def two_nodes(width_gb_per_s: float, overlap: bool) -> Problem:
    """Two nodes of three devices; one layer with many parameters, best replicated widely."""
    names = [f"n{i}g{k}" for i in range(2) for k in range(3)]
    links = [
        link(u, v, 100 if u[1] == v[1] else width_gb_per_s)
        for i, u in enumerate(names)
        for v in names[i + 1 :]
    ]
    rows = [layer("only", 1, 2, parameters=["p"])]
    machines = cluster(names, links, types={"unit": device_type()})
    job = Job(microbatches=12, recompute=False, optimizer="sgd", overlap_reduction=overlap)
    return Problem(graph(rows, parameters=[parameter("p", 25 * 10**7)]), machines, job)


@pytest.mark.parametrize("width_gb_per_s", [0.1, 0.2, 1, 20])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_reduction_across_nodes_takes_the_links_between_them(width_gb_per_s, overlap):
    """Each device has a wide link to a fellow; but all of them together use a narrow one.

    The gradients of a single layer are ready when its backward ends.
    """
    problem = two_nodes(width_gb_per_s, overlap)
    bounds = [schedule_bound_s(place(problem, specs)) for specs in all_partitions(problem)]
    _, model, solver = solved(problem, 1.01 * min(bounds))
    found_s = solver.objective_value * model.tick_s
    assert found_s <= min(bounds) * (1 + 1e-9)
    assert found_s >= min(bounds) * (1 - 1e-6) - 1.01 * model.tick_s


@pytest.mark.parametrize("replicas", range(1, 9))
def test_reductions_of_any_number_of_replicas_are_exact(replicas):
    problem = tiny_problem(3, layers=2, devices=8, microbatches=7)
    names = tuple(problem.graph.layers)
    specs = [StageSpec(names, problem.cluster.device_names[-replicas:])]
    bound_s = schedule_bound_s(place(problem, specs))
    model = PartitionModel(Chain(problem), 1.01 * bound_s, 1)
    is_allowed, value_s = fixed(model, specs)
    assert is_allowed
    assert value_s <= bound_s * (1 + 1e-9)
    assert value_s >= bound_s * (1 - 1e-6) - 1.01 * model.tick_s


def test_layers_keep_to_the_device_types_they_may_run_on():
    problem = tiny_problem(2, layers=5, devices=3, microbatches=4, types=2)
    record = problem.graph.record
    rows = [
        row.model_copy(update={"device_types": ("type1",)}) if row.name == "layer2" else row
        for row in record.layers
    ]
    limited = record.model_copy(update={"layers": tuple(rows)})
    problem = replace(problem, graph=LayerGraph.from_record(limited))
    model = PartitionModel(Chain(problem), 10.0, 3)
    solver = cp_model.CpSolver()
    assert solver.solve(model.model) == cp_model.OPTIMAL
    found = next(stage for stage in model.stages(solver) if "layer2" in stage.layers)
    assert {problem.cluster.type_of(device) for device in found.devices} == {"type1"}
    kept = [
        specs
        for specs in all_partitions(problem)
        if all("layer2" not in s.layers or set(s.devices) == {"d1"} for s in specs)
    ]
    best_s = min(schedule_bound_s(place(problem, specs)) for specs in kept)
    assert solver.objective_value * model.tick_s == pytest.approx(best_s, rel=1e-3)


def test_a_proven_bound_is_the_least_the_search_reports():
    problem = tiny_problem(2, layers=6, devices=3, microbatches=4, replication=False)
    chain = Chain(problem)

    def search(least_s):
        clock = Clock(10, True)
        return PartitionSearch(chain, 3, Settings(0, 1, True), clock, None, 10.0, least_s=least_s)

    best_s = search(0.0).next(10.0, 10.0).bound_s
    early = search(0.7 * best_s)
    assert early.bound_s == 0.7 * best_s
    assert early.next(10.0, 1e-3).bound_s >= 0.7 * best_s
    assert search(0.7 * best_s).next(10.0, 10.0).bound_s == pytest.approx(best_s, rel=1e-4)


def test_partitions_that_differ_by_interchangeable_devices_only_are_one():
    problem = tiny_problem(5, layers=4, devices=3, microbatches=4, topology="switches")
    chain = Chain(problem)
    model = PartitionModel(chain, 10.0, 3)
    group = model.decisions.interchangeable[0]
    ordered = [("a", group[0], group[1]), ("b", group[1], group[0])]
    specs = [
        tuple(
            replace(spec, devices=(device,))
            for spec, device in zip(split_in_two(problem), devices, strict=True)
        )
        for _, *devices in ordered
    ]
    values = [fixed(model, stages) for stages in specs]
    assert values[0] == values[1]
    assert values[0][0]
    model.forbid(specs[1])
    assert not fixed(model, specs[0])[0]


def test_a_search_starts_from_any_incumbent():
    """One with several stages a device is no hint, and nothing to exclude."""
    problem = tiny_problem(6, layers=4, devices=2, microbatches=3, replication=False)
    shared = tuple(StageChoice(i, i + 1, (f"d{i % 2}",)) for i in range(4))
    search = PartitionSearch(Chain(problem), 2, Settings(0, 1), Clock(10, False), shared, 10.0)
    search.exclude(shared, 5.0)
    assert len(search.next(10.0, 10.0).partitions) > 0


def split_in_two(problem):
    return next(specs for specs in all_partitions(problem) if len(specs) == 2)


@pytest.mark.parametrize("recompute", [False, True])
def test_search_hands_out_what_to_recompute_beside_the_partitions(recompute):
    problem = tiny_problem(
        1,
        layers=8,
        devices=3,
        microbatches=6,
        replication=False,
        memory_mib=140,
        recompute=recompute,
    )
    chain = Chain(problem)
    found = PartitionSearch(chain, 3, Settings(0, 8), Clock(20, False), None, 10.0).next(10.0, 20)
    assert len(found.partitions) == len(found.recomputed) > 0
    for plain, chosen in zip(found.partitions, found.recomputed, strict=True):
        assert tuple(replace(stage, recompute=()) for stage in chosen) == plain
    assert any(stage.recompute for stage in found.recomputed[-1]) == recompute


@pytest.mark.parametrize("microbatches", [1, 2, 6, 16, 17, 100, 65536])
def test_levels_in_flight_are_every_number_once(microbatches):
    levels = in_flight_levels(microbatches)
    assert len(levels) < 70
    edges = [0, *(level.most for level in levels)]
    assert [level.least for level in levels] == [edge + 1 for edge in edges[:-1]]
    assert edges[-1] == microbatches
    for level in levels:
        assert level.blocks * level.most + level.rest == microbatches
        assert 1 <= level.rest <= level.most


def test_a_model_that_probing_calls_infeasible_is_solved():
    """OR-Tools 9.15 does so in presolve; the model is one of a partition with tied parameters."""
    model = cp_model.CpModel()
    text = (Path(__file__).parent / "probed_infeasible.txt").read_text()
    assert model.proto.parse_text_format(text)
    solver = Settings(0, 2).solver(20.0)
    assert solver.solve(model) == cp_model.OPTIMAL
    assert solver.objective_value == 199958


def test_a_replica_too_slow_for_a_single_microbatch_may_stand_beside_others():
    """It takes 90 s for what the horizon gives 10 s, so it runs nothing."""
    slow = {"unit": device_type(), "snail": device_type(peak_tflop_per_s={"float32": 1 / 30})}
    machines = cluster(
        {"d0": "unit", "d1": "unit", "d2": "snail"},
        [link(d, "hub") for d in ("d0", "d1", "d2")],
        ["hub"],
        slow,
    )
    problem = Problem(graph([layer("a")]), machines, Job(microbatches=2))
    model = PartitionModel(Chain(problem), 10.0, 1)
    model.hint((StageChoice(0, 1, ("d0", "d1", "d2")),))
    solver = Settings(0, 1, True).solver(20.0)
    assert model.solve_hinted(solver, Clock(20, True)) == cp_model.OPTIMAL
    assert solver.objective_value * model.tick_s == pytest.approx(3.0, rel=1e-3)
