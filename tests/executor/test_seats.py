"""Which processes may be which pipeline, and which coordinator they may meet."""

from __future__ import annotations

import socket

import pytest
from executor_plans import pipeline_of, scheduled, traced

from executor.coordinator.server import ServerThread, Serving
from executor.elastic.rank_assignment import rank_assignment_of
from executor.elastic.run import PipelineRun
from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from models import ZOO
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.sync.pipeline_replicas import pipeline_replicas_of
from planner.sync.strategies import parse_sync


def plan_of(places: int) -> Plan:
    """Two pipelines of so many places."""
    graph = traced("gpt_tiny")
    layers = list(graph.layers)
    cut = [(layers, ["d0", "d1"])]
    if places == 2:
        cut = [(layers[:4], ["d0", "d1"]), (layers[4:], ["d2", "d3"])]
    return scheduled(pipeline_of(graph, ZOO["gpt_tiny"], cut, microbatches=4))


@pytest.mark.parametrize(
    ("world_size", "pipeline", "coordinator", "why"),
    [
        (4, 0, None, "--pipeline and --coordinator belong together"),
        (4, None, "node1:1", "--pipeline and --coordinator belong together"),
        (2, 2, "node1:1", "--pipeline: 2; the plan has pipelines 0 to 1"),
        (2, -1, "node1:1", "--pipeline: -1; the plan has pipelines 0 to 1"),
        (1, 1, "node1:1", "has 2 ranks, 1 processes were started; .*--nproc-per-node 2 .*line 1"),
        (4, 1, "node1:1", "has 2 ranks, 4 processes were started"),
        (2, None, None, "the plan has 4 ranks, 2 processes were started; .*--nproc-per-node 4"),
        (2, 1, "node1", "coordinator: 'node1' is not HOST:PORT"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    pipeline: int | None,
    coordinator: str | None,
    why: str,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    plan = plan_of(2)
    with pytest.raises(PipeplanError, match=why):
        rank_assignment_of(plan, pipeline_replicas_of(plan), pipeline, coordinator)


def test_several_pipelines_without_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    plan = plan_of(2)
    with pytest.raises(PipeplanError, match="started by torchrun"):
        rank_assignment_of(plan, pipeline_replicas_of(plan), None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("shares", 7), ("pipelines", 3), ("sync", {"strategy": "ad_psgd", "options": {}})],
)
def test_a_coordinator_of_other_work_is_refused_by_the_field(
    monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    plan = plan_of(1).model_copy(update={"sync": parse_sync("semi_decentralized")})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        run = PipelineRun(
            plan,
            TrainingConfig(steps=5, data="random"),
            RunSettings(pipeline=1, coordinator=address, device="cpu"),
        )
        facts = {**run.work.facts(), field: value}
        ServerThread(listener, Serving(facts, 1000.0))
        with pytest.raises(PipeplanError) as caught:
            run.train()
    (problem,) = caught.value.problems
    assert problem.startswith(f"coordinator at {address}: it has {field} {value}, here it is ")
    assert problem.endswith("start all with the same plan, --steps, --sync and --resume")


OF_PIPELINES = {
    "fail_at(2,5)": "inject: 'fail_at(2,5)': there is no pipeline 2; the plan has pipelines 0 to 1",
    "fail_at(1,0)": "inject: 'fail_at(1,0)': STEP is 0, expected 1 or more",
}


@pytest.mark.parametrize("inject", OF_PIPELINES)
def test_faults_that_cannot_happen_are_refused_before_any_group(
    monkeypatch: pytest.MonkeyPatch, inject: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    plan = plan_of(1).model_copy(update={"sync": parse_sync("semi_decentralized")})
    with pytest.raises(PipeplanError) as raised:
        PipelineRun(plan, TrainingConfig(), RunSettings(inject=inject, device="cpu"))
    assert str(raised.value).startswith(OF_PIPELINES[inject])
