"""``pipeplan explain`` says what binds, what stages are limited by and what changes would give."""

import json
from pathlib import Path

import pytest
from commands import pipeplan

from planner.analysis.explain.bubble import CAUSES
from planner.plan.plan import Plan


def test_explain_says_what_binds_and_what_would_help(plan_path: Path) -> None:
    lines = pipeplan("explain", plan_path).stdout.splitlines()
    for word in (
        *("iteration", "critical path: ", "highest lower bound: ", "memory ", "bubble "),
        "Stages: ",
    ):
        assert any(line.startswith(word) for line in lines)


def test_explain_as_json_is_complete(plan_path: Path) -> None:
    report = json.loads(pipeplan("explain", plan_path, "--json").stdout)
    predicted = Plan.load(plan_path).predicted
    assert report["iteration_time_s"] == predicted.iteration_time_s
    assert sum(row["share"] for row in report["shares"]) == pytest.approx(1)
    assert report["resources"][0] == report["binding_resource"]
    assert report["binding_resource"]["bound_s"] <= predicted.iteration_time_s * (1 + 1e-9)
    path = report["critical_path"]
    assert (path[0]["start_s"], path[-1]["end_s"]) == (0, predicted.iteration_time_s)
    for row in report["memory"]["devices"]:
        assert row["peak_bytes"] == predicted.devices[row["device"]].peak_memory_bytes


def test_the_bubble_in_json_is_that_of_the_plan(plan_path: Path) -> None:
    bubble = json.loads(pipeplan("explain", plan_path, "--json").stdout)["bubble"]
    predicted = Plan.load(plan_path).predicted
    assert bubble["share"] == pytest.approx(predicted.bubble)
    assert set(bubble["causes"]) == set(CAUSES)
    assert sum(bubble["causes"].values()) == pytest.approx(bubble["idle_s"])
    for row in bubble["devices"]:
        busy_s = predicted.devices[row["device"]].busy_s
        assert row["idle_s"] == pytest.approx(predicted.iteration_time_s - busy_s)
        assert sum(row[name] for name in CAUSES) == pytest.approx(row["idle_s"])
        waited_s = sum(waited["seconds"] for waited in row["waited_for"])
        assert waited_s == pytest.approx(row["idle_s"])


def test_changes_in_json_are_ranked(plan_path: Path) -> None:
    report = json.loads(pipeplan("explain", plan_path, "--json").stdout)
    found = report["moves"]
    assert found["plan_s"] == report["iteration_time_s"]
    fitting = [row["iteration_time_s"] for row in found["moves"] if not row["lacks_bytes"]]
    assert fitting
    assert fitting == sorted(fitting)
    assert [row["stage"] for row in report["stages"]] == list(range(len(report["stages"])))


def test_the_best_single_change_is_applied(by_hand_path: Path, tmp_path: Path) -> None:
    report = json.loads(pipeplan("explain", by_hand_path, "--json").stdout)
    best = report["moves"]["moves"][0]
    assert best["gain"] > 0
    said = pipeplan("explain", by_hand_path).stdout
    assert f'pipeplan explain {by_hand_path} --apply "{best["move"]}" -o new.json' in said
    assert "why the plan did not take it: it was not searched for (none: adopted" in said
    path = tmp_path / "new.json"
    result = pipeplan("explain", by_hand_path, "--apply", best["move"], "-o", path, "--json")
    (made,) = json.loads(result.stdout)["moves"]
    assert made == {"move": best["move"], "iteration_time_s": best["iteration_time_s"]}
    assert Plan.load(path).predicted.iteration_time_s == best["iteration_time_s"]
    assert pipeplan("verify", path).exit_code == 0


def test_applying_makes_one_move_after_the_other(by_hand_path: Path, tmp_path: Path) -> None:
    stages = Plan.load(by_hand_path).stages
    there = stages[0].layers[-1]
    texts = (f"begin stage 1 at {there}", f"begin stage 1 at {stages[1].layers[1]}")
    path = tmp_path / "new.json"
    moves = [word for text in texts for word in ("--apply", text)]
    result = pipeplan("explain", by_hand_path, *moves, "-o", path)
    assert result.exit_code == 0
    assert [line.split(": ")[0] for line in result.stdout.splitlines() if " before, " in line] == [
        *texts
    ]
    assert Plan.load(path).stages[0].layers == (*stages[0].layers, stages[1].layers[0])


def test_applying_refuses_what_is_no_move_and_writes_nothing(
    by_hand_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "new.json"
    result = pipeplan("explain", by_hand_path, "--apply", "faster", "-o", path)
    assert result.exit_code == 1
    assert "is of no known form; write one of these" in result.stderr
    assert not path.exists()


def test_a_plan_beyond_memory_is_explained(plan_data: dict, tmp_path: Path) -> None:
    for kind in plan_data["cluster"]["device_types"].values():
        kind["memory_gib"], kind["reserved_gib"] = 0.001, 0
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data))
    result = pipeplan("explain", path)
    assert result.exit_code == 0
    assert "the plan exceeds memory: " in result.stdout
    assert "no single change that was tried makes the plan fit" in result.stdout
