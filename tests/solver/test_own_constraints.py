"""Constraints of users on CP-SAT's plan model, as the documentation shows them."""

from pathlib import Path

import pytest
from brute_force import all_partitions
from builders import ROOT
from documents import snippets
from tiny_problems import tiny_problem

from planner import PipeplanError, search_schedule, solve, verify
from planner.costs.placed_pipeline import StageSpec
from planner.search.cp_sat.decisions import Decisions

DOCUMENT = ROOT / "docs" / "own_constraints.md"
CLUSTER = """
format = "pipeplan-cluster/1"
[device_types.unit]
memory_gib = 16
memory_bandwidth_gb_per_s = 1000
peak_tflop_per_s = { float32 = 1 }
"""
NAMES = ["embedding", "block0", "block1", "block2", "block3", "head"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph, a cluster and a job as the documentation's first lines load them."""
    from builders import graph, layer

    rows = [layer(name, 0.01 * (1 + i % 3), 0.02) for i, name in enumerate(NAMES)]
    graph(rows).save(tmp_path / "graph.json")
    devices = "".join(f'[[devices]]\nname = "d{i}"\ntype = "unit"\n' for i in range(4))
    links = "".join(
        f'[[links]]\nbetween = ["d{i}", "d{k}"]\nbandwidth_gb_per_s = {20 + 10 * i + k}\n'
        for i in range(4)
        for k in range(i + 1, 4)
    )
    (tmp_path / "cluster.toml").write_text(CLUSTER + devices + links)
    (tmp_path / "job.toml").write_text('format = "pipeplan-job/1"\nmicrobatches = 6\n')
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
def test_every_snippet_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = snippets(DOCUMENT, "python")
    assert len(found) >= 5
    names: dict[str, object] = {}
    for snippet in found:
        same = snippet.replace("time_limit_s=10", "time_limit_s=0.5, deterministic=True")
        exec(compile(same, str(DOCUMENT), "exec"), names)  # noqa: S102 - our own document.
    assert "embedding" in capsys.readouterr().out


def pin(decisions):
    decisions.model.add(decisions.runs_on("layer1", "d0") == 1)


def forbid(decisions):
    decisions.model.add(decisions.is_used("d1") == 0)


def together(decisions):
    decisions.model.add(decisions.same_stage("layer0", 2) == 1)


def late(decisions):
    decisions.model.add(decisions.stage_of("layer3") >= 1)
    decisions.model.add_bool_or([~decisions.holds(1, "layer3"), ~decisions.uses(1, "d2")])


def stage_with(specs: tuple[StageSpec, ...], name: str) -> int:
    return next(j for j, spec in enumerate(specs) if name in spec.layers)


KEPT = {
    pin: lambda specs: "d0" in specs[stage_with(specs, "layer1")].devices,
    forbid: lambda specs: all("d1" not in spec.devices for spec in specs),
    together: lambda specs: stage_with(specs, "layer0") == stage_with(specs, "layer2"),
    late: lambda specs: (
        (j := stage_with(specs, "layer3")) >= 1 and not (j == 1 and "d2" in specs[1].devices)
    ),
}


@pytest.mark.parametrize(
    ("constrain", "topology"), zip(KEPT, ("mesh", "switches") * 2, strict=True)
)
def test_the_plan_keeps_the_constraint_and_is_near_the_best_that_does(constrain, topology):
    """With two switches some devices are interchangeable, but not for who names them."""
    problem = tiny_problem(
        7, layers=4, devices=3, microbatches=4, replication=topology == "mesh", topology=topology
    )
    found = solve(problem, constrain=constrain, time_limit_s=0.5, deterministic=True)
    stages = tuple(StageSpec(row.layers, row.devices) for row in found.plan.stages)
    assert KEPT[constrain](stages)
    assert verify(found.plan) == []
    times_s = [
        search_schedule(
            problem, specs, split=problem.job.splits, time_limit_s=0.01, deterministic=True
        )
        for specs in all_partitions(problem)
        if KEPT[constrain](specs)
    ]
    best_s = min(schedule.iteration_time_s for schedule in times_s)
    assert found.iteration_time_s <= 1.05 * best_s


@pytest.mark.parametrize(
    ("constrain", "message"),
    [
        (lambda d: d.runs_on("layer9", "d0"), "'layer9' is not one of the model's 3 layers"),
        (lambda d: d.runs_on("layer0", "gpu7"), "'gpu7' is not in the cluster; it has d0, d1"),
        (lambda d: d.holds(0, 17), "layer 17 is not one of the model's 3 layers"),
    ],
)
def test_names_that_are_not_there_are_said(constrain, message):
    problem = tiny_problem(1, layers=3, devices=2, microbatches=2)
    with pytest.raises(PipeplanError, match=message):
        solve(problem, constrain=constrain, time_limit_s=0.1, deterministic=True)


def test_a_constraint_that_is_returned_instead_of_added_is_told() -> None:
    problem = tiny_problem(0, layers=4, devices=2, microbatches=2)
    device = problem.cluster.device_names[0]
    with pytest.raises(PipeplanError, match="adds nothing"):
        solve(problem, constrain=lambda d: d.is_used(device), time_limit_s=0.1, deterministic=True)


def test_plans_keep_the_constraints_and_contradictions_are_named() -> None:
    problem = tiny_problem(0, layers=4, devices=2, microbatches=2)
    device = problem.cluster.device_names[0]

    def forbid(decisions: Decisions) -> None:
        decisions.model.add(decisions.is_used(device) == 0)

    def contradict(decisions: Decisions) -> None:
        forbid(decisions)
        decisions.model.add(decisions.is_used(device) == 1)

    plan = solve(problem, constrain=forbid, time_limit_s=0.2, deterministic=True).plan
    assert all(device not in stage.devices for stage in plan.stages)
    with pytest.raises(PipeplanError, match="constraints added by constrain="):
        solve(problem, constrain=contradict, time_limit_s=0.2, deterministic=True)
