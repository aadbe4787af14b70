"""Microbatches that stay in a node, and equal groups of devices that are planned as one."""

import math
import random
from collections import Counter

import pytest
from brute_force import all_partitions
from builders import boundary, cluster, graph, layer, link, parameter
from hypothesis import given
from hypothesis import strategies as st

from planner import Job, Problem
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.plan.plan import Sync
from planner.search.budget import Clock, Settings, TimeShare
from planner.search.finished import plan_of
from planner.search.group_search import plan_groups
from planner.search.groupings import even_groupings
from planner.search.local_search import Walk, estimated_s
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.schedule import search as search_module
from planner.search.schedule.assignment import (
    Assignment,
    assignments,
    balanced_assignment,
    following_assignment,
    islands_of,
    local_assignment,
)
from planner.search.schedule.heuristic import best_heuristic_schedule, fits_memory, quick_schedules
from planner.search.schedule.list_scheduler import (
    backward_first,
    in_flight_limits,
    list_schedule,
)
from planner.search.schedule.pipeline_groups import groups_of, place_first, scheduled_forms
from planner.search.schedule.search import improve_any
from planner.search.schedule.solve import ScheduleTask
from planner.search.state import Search, SearchTask
from planner.simulation.simulator import simulate
from planner.verification import verify

MEGA = 10**6


def nodes(
    count: int, each: int, *, slow: float = 0.2, types: tuple[str, ...] = ("unit",)
) -> Cluster:
    """Nodes of devices around a switch each, all on one slow network; types in turn by node."""
    names = [(f"n{n}d{k}", n) for n in range(count) for k in range(each)]
    links = [link(name, f"s{n}", 50) for name, n in names]
    links += [link(f"s{n}", "network", slow) for n in range(count)]
    kinds = {
        kind: {
            "memory_gib": 1024,
            "memory_bandwidth_gb_per_s": 1000,
            "peak_tflop_per_s": {"float32": speed},
            "efficiency": 1,
            "reserved_gib": 0,
        }
        for kind, speed in (("unit", 1), ("fast", 2))
    }
    switches = [*(f"s{n}" for n in range(count)), "network"]
    return cluster({name: types[n % len(types)] for name, n in names}, links, switches, kinds)


def chain_problem(the_cluster: Cluster, layers: int = 4, microbatches: int = 8) -> Problem:
    rng = random.Random(layers)
    rows = [
        layer(f"l{i}", rng.uniform(0.5, 2), rng.uniform(1, 3), parameters=[f"w{i}"])
        for i in range(layers)
    ]
    parameters = [parameter(f"w{i}", 10_000_000) for i in range(layers)]
    job = Job(microbatches=microbatches, optimizer="sgd", backward="whole")
    return Problem(graph(rows, parameters=parameters), the_cluster, job)


def placed(problem: Problem, *stages: tuple[int, str]) -> PlacedPipeline:
    """Stages of so many layers each, on devices given by a blank-separated text."""
    names, specs, begin = list(problem.graph.layers), [], 0
    for count, devices in stages:
        specs.append(StageSpec(tuple(names[begin : begin + count]), tuple(devices.split())))
        begin += count
    return place(problem, specs)


UNEQUAL = (2, "n0d0 n0d1 n1d0"), (2, "n0d2 n1d1 n1d2")
EQUAL = (2, "n0d0 n0d1 n1d0 n1d1"), (2, "n0d2 n1d2")


# --- assignments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("types", [("unit",), ("fast", "unit")])
def test_a_balanced_assignment_gives_each_microbatch_to_the_first_to_finish_it(types) -> None:
    pipeline = placed(chain_problem(nodes(2, 3, types=types), microbatches=11), *UNEQUAL)
    owner = balanced_assignment(pipeline)
    for index, stage in enumerate(pipeline.stages):
        load = dict.fromkeys(stage.spec.devices, 0.0)
        for microbatch in range(11):
            after = {
                d: load[d] + stage.times[d].forward_s + stage.times[d].backward_s for d in load
            }
            first = min(after, key=after.__getitem__)
            assert owner[index, microbatch] == first
            load[first] = after[first]


@pytest.mark.parametrize("stages", [UNEQUAL, EQUAL])
def test_local_microbatches_stay_in_their_node_wherever_it_has_a_replica(stages) -> None:
    pipeline = placed(chain_problem(nodes(2, 3)), *stages)
    islands = islands_of(pipeline)[0]
    owner = local_assignment(pipeline, islands)
    for microbatch in range(pipeline.microbatches):
        assert len({islands[owner[stage, microbatch]] for stage in (0, 1)}) == 1


@given(st.data())
def test_microbatches_that_follow_load_no_replica_more_and_move_no_more_often(
    data: st.DataObject,
) -> None:
    the_cluster = nodes(3, 3, types=data.draw(st.sampled_from([("unit",), ("fast", "unit")])))
    devices = data.draw(st.permutations(the_cluster.device_names))
    first = data.draw(st.integers(1, 8))
    problem = chain_problem(the_cluster, 4, data.draw(st.integers(1, 12)))
    pipeline = placed(problem, (2, " ".join(devices[:first])), (2, " ".join(devices[first:])))
    islands, balanced = islands_of(pipeline), balanced_assignment(pipeline)
    if not islands:
        return
    owner = following_assignment(pipeline, islands[0], balanced)

    def load(assignment: Assignment) -> Counter[tuple[int, int]]:
        return Counter((stage, islands[0][device]) for (stage, _), device in assignment.items())

    def moves(assignment: Assignment) -> int:
        return sum(
            islands[0][assignment[0, m]] != islands[0][assignment[1, m]]
            for m in range(pipeline.microbatches)
        )

    assert owner.keys() == balanced.keys()
    assert load(owner) == load(balanced)
    assert moves(owner) <= moves(balanced)


def test_a_node_s_share_is_in_proportion_to_the_speed_of_its_slowest_stage() -> None:
    problem = chain_problem(nodes(2, 3, types=("fast", "unit")), microbatches=12)
    pipeline = placed(problem, (2, "n0d0 n1d0"), (2, "n0d1 n1d1"))
    owner = local_assignment(pipeline, islands_of(pipeline)[0])
    for stage in (0, 1):
        share = Counter(owner[stage, m][:2] for m in range(12))
        assert share == {"n0": 8, "n1": 4}


def test_microbatches_of_a_node_without_a_replica_go_where_they_are_finished_first() -> None:
    pipeline = placed(chain_problem(nodes(2, 3)), (2, "n0d0 n1d0"), (2, "n0d1 n0d2"))
    owner = local_assignment(pipeline, islands_of(pipeline)[0])
    assert Counter(owner[1, m] for m in range(8)) == {"n0d1": 4, "n0d2": 4}


def test_where_all_devices_are_at_one_switch_there_is_nothing_to_keep_local() -> None:
    pipeline = placed(chain_problem(nodes(1, 6)), (2, "n0d0 n0d1"), (2, "n0d2 n0d3"))
    assert islands_of(pipeline) == []
    assert assignments(pipeline) == [balanced_assignment(pipeline)]


def test_quick_schedules_keep_microbatches_local_where_that_is_faster() -> None:
    pipeline = placed(chain_problem(nodes(2, 3)), *UNEQUAL)
    balanced = balanced_assignment(pipeline)
    apart = [
        list_schedule(pipeline, balanced, limits, backward_first)
        for limits in in_flight_limits(pipeline)
    ]
    best = best_heuristic_schedule(pipeline)
    assert best is not None
    assert best.iteration_time_s < 0.9 * min(t.iteration_time_s for t in apart if t is not None)


# --- equal groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stages",
    [UNEQUAL, ((2, "n0d0 n0d1 n0d2 n1d0"), (2, "n1d1")), ((2, "n0d0"), (2, "n1d0"))],
)
def test_devices_that_are_not_equal_groups_are_one_pipeline(stages) -> None:
    pipeline = placed(chain_problem(nodes(2, 3), microbatches=9), *stages)
    groups = groups_of(pipeline)
    assert groups is None or pipeline.microbatches % len(groups.counterparts) == 0
    if groups is not None:
        counts = [len(stage.spec.devices) for stage in pipeline.stages]
        assert all(count % len(groups.counterparts) == 0 for count in counts)
    if stages is not UNEQUAL:
        assert groups is None


def test_microbatches_that_cannot_be_shared_equally_make_no_groups() -> None:
    problem = chain_problem(nodes(2, 3), microbatches=7)
    assert groups_of(placed(problem, *EQUAL)) is None


def test_groups_lie_in_nodes_where_stages_do() -> None:
    groups = groups_of(placed(chain_problem(nodes(2, 3)), *EQUAL))
    assert groups is not None
    assert groups.are_apart
    nodes_of = [{device[:2] for device in names.values()} for names in groups.counterparts]
    assert nodes_of == [{"n0"}, {"n1"}]


def test_groups_that_share_a_network_card_are_not_apart() -> None:
    stages = (2, "n0d0 n0d1"), (2, "n1d0 n1d1")
    groups = groups_of(placed(chain_problem(nodes(2, 3)), *stages))
    assert groups is not None
    assert not groups.are_apart


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_group_placed_by_itself_reduces_among_all(overlaps: bool) -> None:
    problem = chain_problem(nodes(2, 3), 4, 1024)
    job = problem.job.model_copy(update={"overlap_reduction": overlaps})
    problem = Problem(problem.graph, problem.cluster, job)
    pipeline = placed(problem, *EQUAL)
    groups = groups_of(pipeline)
    assert groups is not None
    first = place_first(problem, [stage.spec for stage in pipeline.stages])
    assert first == groups.first_of(pipeline)
    assert (first.reduced_at_once is None) is not overlaps
    assert first.reduced_at_once is None or first.reduced_at_once == groups.first_of(
        place(problem, [stage.spec for stage in pipeline.stages], Sync(options={"overlap": False}))
    )
    assert first.microbatches == 512


@pytest.mark.parametrize("microbatches", [4, 8, 12])
@pytest.mark.parametrize("layers", [4, 5])
def test_groups_that_are_apart_all_run_as_the_first_alone(layers: int, microbatches: int) -> None:
    problem = chain_problem(nodes(2, 3), layers, microbatches)
    pipeline = placed(problem, (2, "n0d0 n0d1 n1d0 n1d1"), (layers - 2, "n0d2 n1d2"))
    groups = groups_of(pipeline)
    assert groups is not None
    first = groups.first_of(pipeline)
    for limits in in_flight_limits(first):
        alone = list_schedule(first, balanced_assignment(first), limits, backward_first)
        assert alone is not None
        orders = {device: [] for device in first.devices}
        for event in sorted(alone.operations, key=lambda event: event.start_s):
            orders[event.device].append(event.operation)
        both = simulate(pipeline, groups.spread(orders))
        assert both.iteration_time_s == pytest.approx(alone.iteration_time_s)
        assert fits_memory(both) == fits_memory(alone)
        starts = {
            (event.device, event.operation.kind, event.operation.microbatch // 2): event.start_s
            for event in both.operations
        }
        for event in alone.operations:
            kind, microbatch = event.operation.kind, event.operation.microbatch
            for names in groups.counterparts:
                at = starts[names[event.device], kind, microbatch]
                assert at == pytest.approx(event.start_s)


def test_all_quick_schedules_of_groups_run_every_microbatch_once() -> None:
    pipeline = placed(chain_problem(nodes(2, 3)), *EQUAL)
    assert scheduled_forms(pipeline)[0].groups is not None
    for schedule in quick_schedules(pipeline, backward="any"):
        ran = Counter(
            (operation.stage, operation.microbatch)
            for order in schedule.orders.values()
            for operation in order
            if operation.kind == "F"
        )
        assert ran == {(stage, m): 1 for stage in (0, 1) for m in range(8)}


# --- the search -----------------------------------------------------------------------------------


def search_of(problem: Problem, limit_s: float = 30.0) -> Search:
    return Search(SearchTask(problem, Settings(0, 1, True), 0.0), Clock(limit_s, True))


@pytest.mark.parametrize("types", [("unit",), ("fast", "unit")])
def test_even_groupings_share_out_each_type_equally(types: tuple[str, ...]) -> None:
    the_cluster = nodes(4, 2, types=types)
    groupings = even_groupings(chain_problem(the_cluster, microbatches=8))
    assert [len(grouping) for grouping in groupings] == ([2, 4, 8] if len(types) == 1 else [2, 4])
    for grouping in groupings:
        mixes = [Counter(map(the_cluster.type_of, group)) for group in grouping]
        assert all(mix == mixes[0] for mix in mixes)
        held = [device for group in grouping for device in group]
        assert len(held) == len(set(held)) == 8


def test_a_walk_in_units_changes_whole_units_only() -> None:
    problem = chain_problem(nodes(2, 3), 6)
    search = search_of(problem)
    names, units = problem.cluster.device_names, ((0, 3), (1, 4), (2, 5))
    pairs = [{names[number] for number in unit} for unit in units]
    start = search.chain.partition([(tuple(problem.graph.layers), names)])
    assert start is not None
    met = []
    search.consider = lambda partition: met.append(partition)  # type: ignore[method-assign]
    Walk(search, units, 0).go(start, 1.0)
    assert len({len(partition) for partition in met}) > 1
    for partition in met:
        for stage in partition:
            held = set(stage.devices)
            assert all(not (held & pair) or pair <= held for pair in pairs)


@pytest.mark.extensive
def test_the_step_finds_the_fastest_of_all_plans_where_that_is_of_equal_groups() -> None:
    search = search_of(chain_problem(nodes(2, 2), 3))
    plan_groups(search, TimeShare(1).slice_of(search.clock))
    found = [
        time_s
        for specs in all_partitions(search.problem)
        if is_connected(pipeline := place(search.problem, specs))
        and (schedule := best_heuristic_schedule(pipeline)) is not None
        for time_s in [schedule.iteration_time_s]
    ]
    assert search.best_s <= min(found) * (1 + 1e-9)


def test_what_the_step_finds_is_a_valid_plan() -> None:
    search = search_of(chain_problem(nodes(4, 2, types=("fast", "unit")), 6), 2.0)
    plan_groups(search, TimeShare(1).slice_of(search.clock))
    assert search.best is not None
    assert "equal groups" in search.best.schedule.method
    assert verify(plan_of(search, search.best.schedule, "deterministic 30 s", "test")) == []


def test_the_step_does_nothing_where_stages_may_have_no_replicas() -> None:
    problem = chain_problem(nodes(2, 2))
    job = problem.job.model_copy(update={"replication": False})
    search = search_of(Problem(problem.graph, problem.cluster, job))
    plan_groups(search, TimeShare(1).slice_of(search.clock))
    assert search.best is None


def test_an_estimate_of_what_cannot_run_is_infinite() -> None:
    names = ["a", "b"]
    apart = Problem(graph([layer("x"), layer("y")]), cluster(names, []), Job(microbatches=2))
    search = search_of(apart)
    partition = search.chain.partition([(("x",), ("a",)), (("y",), ("b",))])
    assert partition is not None
    assert estimated_s(search, partition) == float("inf")


def test_an_estimate_of_equal_groups_recomputes_where_memory_is_short() -> None:
    """A device holds one stash of 700 GiB, and thousands where its first layer runs again."""
    rows = [
        layer(f"l{i}", 1, 2, stash_bytes=stash * 2**30) for i, stash in enumerate((350, 350, 1, 1))
    ]
    cuts = [boundary(f"l{i}", f"l{i + 1}", bytes_=1) for i in range(3)]
    job = Job(microbatches=1024, optimizer="sgd", backward="whole")
    problem = Problem(graph(rows, cuts), nodes(2, 3), job)
    search = search_of(problem)
    pipeline = placed(problem, *EQUAL)
    held = [(stage.spec.layers, stage.spec.devices) for stage in pipeline.stages]
    partition = search.chain.partition(held)
    assert partition is not None
    first = place_first(problem, [stage.spec for stage in pipeline.stages])
    choices = search.recomputed.choices(partition, first, math.inf)
    assert any(placed_stage.spec.recompute for placed_stage in choices[-1].stages)
    assert all(len(choice.devices) == 3 for choice in choices)
    assert estimated_s(search, partition) < math.inf


# --- improvement ----------------------------------------------------------------------------------


@pytest.mark.extensive
@pytest.mark.parametrize(("microbatches", "many"), [(8, False), (240, True)])
def test_an_improved_group_is_carried_over_to_all_and_proves_nothing_false(
    microbatches: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "MAX_OPERATIONS", 600)
    stages = (2, "n0d0 n1d0"), (2, "n0d1 n1d1"), (2, "n0d2 n1d2")
    pipeline = placed(chain_problem(nodes(2, 3), 6, microbatches), *stages)
    start = best_heuristic_schedule(pipeline)
    assert start is not None
    assert (len(start.timeline.operations) > 600) == many
    settings = Settings(0, 1, deterministic=True)
    found = improve_any(pipeline, start, ScheduleTask(settings, Clock(4.0, True)), 4.0)
    assert fits_memory(found.timeline)
    assert schedule_bound_s(pipeline) <= found.iteration_time_s <= start.iteration_time_s
    assert found.lower_bound_s <= found.iteration_time_s
    assert simulate(pipeline, found.orders).iteration_time_s == found.iteration_time_s
