"""Plans that consist of pipelines: they do, they hold, and the bound is one of theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import graph, layer, parameter, star

from planner.cluster.cluster import Cluster
from planner.errors import InfeasibleError
from planner.job import Job
from planner.plan.plan import Sync
from planner.plan.problem import Problem
from planner.search.data_parallel import solve_data_parallel
from planner.search.solve import solve
from planner.sync.pipeline_replicas import pipeline_replicas_of
from planner.verification import verify

GRAPH = graph(
    [layer(name, parameters=[f"w{name}"]) for name in "abc"],
    parameters=[parameter(f"w{name}") for name in "abc"],
)


def problem(devices: int, microbatches: int, **job: object) -> Problem:
    return Problem(GRAPH, star(devices), Job(microbatches=microbatches, **job))  # type: ignore[arg-type]


def uneven(**fast: float) -> Problem:
    """Two devices of 1 TFLOP/s and three of 2."""
    cluster = star(5)
    data = cluster.model_dump(mode="json")
    (name,) = data["device_types"]
    data["device_types"]["fast"] = {
        **data["device_types"][name],
        "peak_tflop_per_s": {"float32": 2},
        **fast,
    }
    for device in data["devices"][2:]:
        device["type"] = "fast"
    return Problem(GRAPH, Cluster.from_data(data), Job(microbatches=4))


@pytest.mark.parametrize("devices", [2, 3, 5, 6])
def test_there_are_pipelines_whatever_the_number_of_devices(devices: int) -> None:
    result = solve_data_parallel(problem(devices, 4), time_limit_s=0.5, deterministic=True)
    lanes = pipeline_replicas_of(result.plan)
    assert len(lanes) > 1
    assert 4 % len(lanes) == 0
    assert verify(result.plan.model_copy(update={"sync": Sync(strategy="ad_psgd")})) == []


def test_devices_of_several_kinds_make_pipelines() -> None:
    result = solve_data_parallel(uneven(), time_limit_s=0.5, deterministic=True)
    assert len(pipeline_replicas_of(result.plan)) > 1
    assert verify(result.plan) == []


def test_the_bound_is_one_of_equal_pipelines() -> None:
    asked = problem(4, 4, equal_pipelines=True)
    result = solve_data_parallel(problem(4, 4), time_limit_s=1, deterministic=True)
    fastest = solve(asked, time_limit_s=0.5, deterministic=True)
    assert 0 < result.lower_bound_s <= fastest.iteration_time_s * (1 + 1e-9)
    assert fastest.lower_bound_s <= result.iteration_time_s * (1 + 1e-9)
    assert result.plan.provenance.problem_digest == asked.digest


def test_a_warm_start_of_one_pipeline_is_not_taken() -> None:
    asked = problem(4, 4, equal_pipelines=True)
    one = solve(replace(asked, job=asked.job.model_copy(update={"replication": False}))).plan
    one = one.model_copy(update={"job": asked.job})
    result = solve_data_parallel(asked, warm_starts=[one], time_limit_s=0.5, deterministic=True)
    assert len(pipeline_replicas_of(result.plan)) > 1


IMPOSSIBLE = {
    "job.replication: it is false": problem(4, 4, replication=False),
    "cluster.devices: there is one": problem(1, 4),
    "job.microbatches: 7 cannot be divided among 2 to 4 pipelines": problem(4, 7),
}


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_what_is_in_the_way_is_named_before_any_search(said: str) -> None:
    with pytest.raises(InfeasibleError) as raised:
        solve_data_parallel(IMPOSSIBLE[said], time_limit_s=60)
    assert str(raised.value).startswith(said)
    assert "one of all_reduce, fused" in str(raised.value)


def test_where_only_one_pipeline_fits_the_memory_is_in_the_way() -> None:
    heavy = graph(
        [layer(name, parameters=[f"w{name}"], peak_bytes=0) for name in "ab"],
        parameters=[parameter(f"w{name}", elements=10**9) for name in "ab"],
    )
    data = star(3).model_dump(mode="json")
    for kind in data["device_types"].values():
        kind["memory_gib"] = 20
    tight = Problem(heavy, Cluster.from_data(data), Job(microbatches=2))
    solve(replace(tight), time_limit_s=0.5, deterministic=True)
    with pytest.raises(InfeasibleError, match="no plan of several pipelines was found"):
        solve_data_parallel(tight, time_limit_s=0.5, deterministic=True)
