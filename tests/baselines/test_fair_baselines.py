"""Baselines get what their authors would give them: memory limits, recomputation, all schedules."""

from dataclasses import replace

import pytest
from builders import boundary, graph, layer, link, parameter, pipeline, star
from builders import cluster as cluster_of
from builders import device_type as device_type_of
from planner_layers import layers_of
from tiny_problems import tiny_problem

from planner import Cluster, InfeasibleError, Job, LayerGraph, Problem
from planner.baselines import BASELINES
from planner.baselines.layers import Stage
from planner.baselines.scheduled import ScheduledBaselines, UnscheduledError
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place
from planner.schedules.assignment import balanced_assignment
from planner.schedules.best import best_schedule, published_for
from planner.schedules.whole import one_by_one
from planner.simulation.simulator import simulate

GIB = 2**30
STASH_GIB = 8


def equal_layers(count: int, memory_gib: float, **job: object) -> Problem:
    """Layers of 1 + 2 s with stashes of 8 GiB on as many devices; messages take a millisecond."""
    rows = [layer(f"l{n}", stash_bytes=STASH_GIB * GIB, peak_bytes=0) for n in range(count)]
    cuts = [
        boundary(f"l{n}", f"l{n + 1}", bytes_=10**6, saved_by=f"l{n + 1}") for n in range(count - 1)
    ]
    names = [f"d{n}" for n in range(count)]
    machines = cluster_of(
        names,
        [link(name, "hub") for name in names],
        ["hub"],
        {"unit": device_type_of(memory_gib=memory_gib)},
    )
    settings = {"optimizer": "sgd", "microbatches": 8, "backward": "whole", **job}
    return Problem(graph(rows, cuts), machines, Job.model_validate(settings))


def one_by_one_s(pipeline: PlacedPipeline) -> float:
    return simulate(pipeline, one_by_one(pipeline, balanced_assignment(pipeline))).iteration_time_s


def most_in_flight(orders: list) -> int:
    held, most = 0, 0
    for operation in orders:
        held += {"F": 1, "B": -1}[operation.kind]
        most = max(most, held)
    return most


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "in_flight"), [(2.5, 2), (3.5, 3)])
def test_a_schedule_keeps_as_many_microbatches_in_flight_as_fit(room: float, in_flight: int):
    """1F1B needs 4 stashes on the first of four stages, memory has room for fewer."""
    problem = equal_layers(4, room * STASH_GIB, recompute=False, replication=False)
    schedule = ScheduledBaselines(problem).best(BASELINES["even"])
    placed = schedule.timeline.pipeline
    assert [stage.spec.devices for stage in placed.stages] == [("d0",), ("d1",), ("d2",), ("d3",)]
    assert not schedule.timeline.overflow_bytes
    assert most_in_flight(schedule.orders["d0"]) == in_flight
    # So many microbatches pass in the time of one, but for the fill and the drain.
    assert schedule.iteration_time_s < 1.25 * one_by_one_s(placed) / in_flight


def test_recomputation_replaces_stashes_that_do_not_fit() -> None:
    """With its input alone kept, a microbatch takes a megabyte and a second forward."""
    tight = equal_layers(4, 1.5 * STASH_GIB, replication=False)
    schedule = ScheduledBaselines(tight).best(BASELINES["even"])
    assert not schedule.timeline.overflow_bytes
    assert schedule.timeline.pipeline.stages[0].spec.recompute == ("l0",)
    # 8 microbatches of 1 + 3 s, three stages of fill and drain, against 8 * 4 * 3 s one by one.
    assert schedule.iteration_time_s < 8 * 4 + 3 * 4 + 1
    without = replace(tight, job=tight.job.model_copy(update={"recompute": False}))
    alone = ScheduledBaselines(without).best(BASELINES["even"])
    assert alone.iteration_time_s > 8 * 4 * 3


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "even"])
def test_planners_turn_recomputation_on_where_nothing_fits_without(name: str) -> None:
    tight = equal_layers(2, 0.75 * STASH_GIB)
    partition = next(BASELINES[name].stages(layers_of(tight)))
    assert (partition[0].begin, partition[-1].end) == (0, 2)
    with pytest.raises(InfeasibleError, match=f"{name}: none of"):
        BASELINES[name].plan(layers_of(tight))
    without = replace(tight, job=tight.job.model_copy(update={"recompute": False}))
    if name != "grid":
        with pytest.raises(InfeasibleError, match=f"{name}: none of"):
            next(BASELINES[name].stages(layers_of(without)))


@pytest.mark.parametrize("seed", range(12))
def test_no_baseline_runs_one_by_one_where_two_in_flight_fit(seed: int) -> None:
    """Random times and stashes, memory for a part of what 1F1B holds."""
    problem = tiny_problem(
        seed, layers=6, devices=3, microbatches=6, memory_mib=150, replication=seed % 2 == 0
    )
    schedules = ScheduledBaselines(problem)
    for planner in BASELINES.values():
        try:
            schedule = schedules.best(planner)
        except InfeasibleError:
            continue
        placed = schedule.timeline.pipeline
        assert not schedule.timeline.overflow_bytes
        roomy = all(
            placed.stash_limit(j, device) >= 3
            for j, stage in enumerate(placed.stages)
            for device in stage.spec.devices
        )
        if roomy and len(placed.stages) > 1:
            assert schedule.method != "one by one"
            assert schedule.iteration_time_s < one_by_one_s(placed)


def test_the_fastest_published_schedule_stands_where_it_fits() -> None:
    problem = equal_layers(4, 100 * STASH_GIB, replication=False)
    placed = place(problem, layers_of(problem).specs(BASELINES["even"].plan(layers_of(problem))))
    found = best_schedule(placed)
    published = [simulate(placed, orders) for _, orders in published_for(placed, "whole")]
    assert not found.method.startswith("list")
    assert found.iteration_time_s == min(timeline.iteration_time_s for timeline in published)


def test_stages_that_fit_by_no_schedule_are_told() -> None:
    rows = [layer(name, parameters=[f"p{name}"], peak_bytes=0) for name in "abcd"]
    sizes = {"a": 100, "b": 100, "c": 1, "d": 1}
    model = graph(rows, parameters=[parameter(f"p{n}", sizes[n] * 10**9) for n in "abcd"])
    problem = Problem(model, star(2), Job(microbatches=2, optimizer="sgd"))
    with pytest.raises(UnscheduledError, match="does not fit: stage 0 needs") as error:
        ScheduledBaselines(problem).best(BASELINES["even"])
    assert [len(stage.layers) for stage in error.value.stages] == [2, 2]


# --- schedules ------------------------------------------------------------------------------------


def test_split_schedules_stand_where_the_job_allows_them() -> None:
    whole = equal_layers(4, 100 * STASH_GIB, replication=False)
    split = replace(whole, job=whole.job.model_copy(update={"backward": "any"}))
    slow, fast = (ScheduledBaselines(p).best(BASELINES["even"]) for p in (whole, split))
    # Of 8 * 3 s and (4 - 1) * 3 s of fill and drain, zero bubbles leave the fill.
    assert slow.iteration_time_s == pytest.approx(33, rel=0.01)
    assert fast.iteration_time_s == pytest.approx(27, rel=0.01)
    assert fast.method.startswith("z")


def test_chunks_halve_each_stages_work_on_its_own_devices() -> None:
    problem = equal_layers(16, 1000, max_stages_per_device=2, backward="any")
    partition = (Stage(0, 4, ("d3",)), Stage(4, 12, ("d1",)), Stage(12, 16, ("d0",)))
    loop, v = ScheduledBaselines(problem)._chunked(partition)
    assert [(s.begin, s.end) for s in loop] == [(0, 2), (2, 6), (6, 8), (8, 10), (10, 14), (14, 16)]
    assert [(s.begin, s.end) for s in v] == [(0, 2), (2, 6), (6, 8), (8, 10), (10, 14), (14, 16)]
    assert [s.devices for s in loop] == [s.devices for s in partition] * 2
    assert [s.devices for s in v[3:]] == [s.devices for s in reversed(partition)]


@pytest.mark.parametrize("seed", range(8))
def test_chunks_are_partitions_whatever_the_work(seed: int) -> None:
    problem = tiny_problem(
        seed, layers=7, devices=3, microbatches=4, types=2, max_stages_per_device=2, backward="any"
    )
    chain = layers_of(problem)
    for planner in BASELINES.values():
        partition = planner.plan(chain)
        for chunks in ScheduledBaselines(problem)._chunked(partition):
            assert len(chunks) == 2 * len(partition)
            assert all(stage.begin < stage.end for stage in chunks)
            assert [stage.begin for stage in chunks[1:]] == [stage.end for stage in chunks[:-1]]
            assert (chunks[0].begin, chunks[-1].end) == (0, 7)


@pytest.mark.parametrize(
    ("update", "stages"),
    [({"max_stages_per_device": 1}, 2), ({"max_stages": 3}, 2), ({}, 1), ({}, 4)],
)
def test_there_are_no_chunks_where_none_are_allowed_or_layers_do_not_suffice(
    update: dict, stages: int
) -> None:
    problem = equal_layers(6, 1000, max_stages_per_device=2)
    problem = replace(problem, job=problem.job.model_copy(update=update))
    edges = [0, *range(1, stages), 6]
    partition = tuple(Stage(edges[n], edges[n + 1], (f"d{n}",)) for n in range(stages))
    assert not [*ScheduledBaselines(problem)._chunked(partition)]


def test_chunks_keep_the_layers_device_rules() -> None:
    """The last layer may run on the first device alone, which only a V gives its last chunk."""
    problem = equal_layers(4, 1000, max_stages_per_device=2, backward="any")
    record = problem.graph.record.model_dump(mode="json")
    record["layers"][-1]["device_types"] = ["first"]
    cluster = problem.cluster.model_dump(mode="json")
    cluster["device_types"]["first"] = cluster["device_types"]["unit"]
    cluster["devices"][0]["type"] = "first"
    ruled = Problem(LayerGraph.parse(record), Cluster.from_data(cluster), problem.job)
    partition = (Stage(0, 2, ("d0",)), Stage(2, 4, ("d1",)))
    assert len([*ScheduledBaselines(problem)._chunked(partition)]) == 2
    (v,) = ScheduledBaselines(ruled)._chunked(partition)
    assert [stage.devices for stage in v] == [("d0",), ("d1",), ("d1",), ("d0",)]


def test_interleaved_schedules_stand_where_the_job_allows_two_stages_a_device() -> None:
    """Two devices, eight layers, eight microbatches of 3 s a layer, transfers next to nothing.

    1F1B fills for four layers (12 s) before the second device has work, interleaved for two. Memory
    is too small for all microbatches at once.
    """
    rows = [layer(f"l{n}", stash_bytes=70 * GIB, peak_bytes=0) for n in range(8)]
    model = graph(rows, [boundary(f"l{n}", f"l{n + 1}", bytes_=1000) for n in range(7)])
    job = Job(microbatches=8, replication=False, recompute=False, backward="whole")
    single = Problem(model, star(2), job)
    double = replace(single, job=job.model_copy(update={"max_stages_per_device": 2}))
    slow, fast = (ScheduledBaselines(p).best(BASELINES["even"]) for p in (single, double))
    assert slow.iteration_time_s == pytest.approx(8 * 12 + 12, rel=1e-3)
    assert fast.iteration_time_s == pytest.approx(8 * 12 + 6, rel=1e-3)
    placed = fast.timeline.pipeline
    assert len(placed.stages) == 4
    interleaved = simulate(placed, dict(published_for(placed, "whole"))["interleaved 1f1b"])
    assert fast.iteration_time_s == pytest.approx(interleaved.iteration_time_s, rel=1e-4)


def side_by_side(replicas: tuple[int, int]) -> PlacedPipeline:
    names = [f"d{n}" for n in range(sum(replicas))]
    stages = [(("a",), tuple(names[: replicas[0]])), (("b",), tuple(names[replicas[0] :]))]
    model = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=1000)])
    return pipeline(model, star(len(names)), stages, microbatches=8, backward="any")


def test_schedules_without_replicas_run_in_each_of_several_equal_pipelines() -> None:
    placed = side_by_side((2, 2))
    found = dict(published_for(placed, "any"))
    assert {"zb-h1 in 2 pipelines", "zb-h2 in 2 pipelines"} <= set(found)
    alone = pipeline(
        graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=1000)]),
        star(2),
        [(("a",), ("d0",)), (("b",), ("d1",))],
        microbatches=4,
        backward="any",
    )
    one = simulate(alone, dict(published_for(alone, "any"))["zb-h1"])
    both = found["zb-h1 in 2 pipelines"]
    assert simulate(placed, both).iteration_time_s == pytest.approx(one.iteration_time_s)
    assert {op.microbatch for op in both["d0"]} == {0, 2, 4, 6}
    assert {op.microbatch for op in both["d1"]} == {1, 3, 5, 7}


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (3, 3)])
def test_other_replicas_make_no_equal_pipelines(replicas: tuple[int, int]) -> None:
    """Eight microbatches cannot be shared out equally among three pipelines."""
    methods = {name for name, _ in published_for(side_by_side(replicas), "any")}
    assert not any("pipelines" in method for method in methods)
