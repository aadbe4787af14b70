"""Replicas that another stage's load hides are left out; those that save time stay."""

from dataclasses import replace

import pytest
from builders import boundary, device_type, graph, layer, link, star
from builders import cluster as cluster_of
from tiny_problems import tiny_problem

from planner import Problem, solve
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.search.budget import Clock, Settings, TimeShare
from planner.search.partition.chain import StageChoice
from planner.search.schedule.heuristic import best_heuristic_schedule
from planner.search.state import Search, SearchTask
from planner.search.steps import prune_replicas

pytestmark = pytest.mark.extensive

HEAVY_AND_LIGHT = graph(
    [layer("heavy", 2, 4), layer("light", 0.25, 0.25)], [boundary("heavy", "light", bytes_=0)]
)
WASTEFUL = (StageChoice(0, 1, ("d0", "d1")), StageChoice(1, 2, ("d2", "d3", "d4", "d5")))


def search_of(cluster: Cluster, limit_s: float = 5.0) -> Search:
    job = Job.model_validate({"optimizer": "sgd", "microbatches": 4})
    problem = Problem(HEAVY_AND_LIGHT, cluster, job)
    return Search(SearchTask(problem, Settings(0, 1, True), 0.0), Clock(limit_s, True))


def test_hidden_replicas_are_left_out_and_the_time_stays() -> None:
    search = search_of(star(6))
    search.consider(WASTEFUL)
    time_s = search.best_s
    prune_replicas(search, TimeShare(0.02, "beyond").slice_of(search.clock))
    assert search.best is not None
    assert search.best_s == time_s
    assert [len(stage.devices) for stage in search.best.partition] == [2, 1]
    assert [row.iteration_time_s for row in search.found.history] == [time_s] * len(
        search.found.history
    )


def test_the_busiest_replicas_are_kept() -> None:
    types = {"slow": device_type(), "fast": device_type(peak_tflop_per_s={"float32": 2})}
    kinds = dict.fromkeys(("d0", "d1", "d2", "d3", "d4"), "slow") | {"d5": "fast"}
    links = [link(device, "hub") for device in kinds]
    search = search_of(cluster_of(kinds, links, ["hub"], types))
    search.consider((StageChoice(0, 1, ("d3", "d4", "d5")), StageChoice(1, 2, ("d2",))))
    time_s = search.best_s
    prune_replicas(search, TimeShare(0.02, "beyond").slice_of(search.clock))
    assert search.best is not None
    assert search.best_s == time_s
    assert "d5" in search.best.partition[0].devices


def test_nothing_is_left_out_after_an_interruption() -> None:
    search = search_of(star(6))
    search.consider(WASTEFUL)
    search.clock.stop()
    prune_replicas(search, TimeShare(0.02, "beyond").slice_of(search.clock))
    assert search.best is not None
    assert search.best.partition == WASTEFUL


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_as_fast_without_one_of_its_replicas(seed: int) -> None:
    problem = tiny_problem(seed, layers=3, devices=6, microbatches=8, replication=True)
    result = solve(problem, time_limit_s=0.5, deterministic=True)
    specs = [StageSpec(s.layers, s.devices, s.recompute) for s in result.plan.stages]
    for number, spec in enumerate(specs):
        for device in spec.devices if len(spec.devices) > 1 else ():
            fewer = tuple(name for name in spec.devices if name != device)
            changed = [*specs[:number], replace(spec, devices=fewer), *specs[number + 1 :]]
            schedule = best_heuristic_schedule(place(problem, changed))
            assert schedule is None or schedule.iteration_time_s > result.iteration_time_s
