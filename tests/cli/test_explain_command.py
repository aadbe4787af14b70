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
        *("devices ", "Stages: ", "Effect of changes, "),
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
    assert {row["device"] for row in report["devices"]} == set(predicted.devices)
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


def test_values_in_json_are_of_the_plan_and_ranked(plan_path: Path) -> None:
    report = json.loads(pipeplan("explain", plan_path, "--json").stdout)
    found = report["what_if"]
    assert found["plan_s"] == report["iteration_time_s"]
    assert not found["solved_anew"]
    gains = [row["gain"] for row in found["values"] if row["gain"] is not None]
    assert gains
    assert gains == sorted(gains, reverse=True)
    assert [row["stage"] for row in report["stages"]] == list(range(len(report["stages"])))


def test_changes_of_ones_own_replace_the_usual_ones(plan_path: Path) -> None:
    device = Plan.load(plan_path).ranks[0]
    texts = [f"device {device} speed +50%", f"device {device} memory x2"]
    result = pipeplan("explain", plan_path, "--json", "--change", texts[0], "--change", texts[1])
    rows = json.loads(result.stdout)["what_if"]["values"]
    assert {row["change"] for row in rows} == {f"device {device} speed x1.5", texts[1]}


def test_the_best_single_change_is_made_by_edit(by_hand_path: Path, tmp_path: Path) -> None:
    report = json.loads(pipeplan("explain", by_hand_path, "--json").stdout)
    best = report["moves"]["moves"][0]
    assert best["gain"] > 0
    said = pipeplan("explain", by_hand_path).stdout
    assert f'pipeplan edit {by_hand_path} --move "{best["move"]}" -o new.json' in said
    assert "why the plan did not take it: it was not searched for (none: adopted" in said
    path = tmp_path / "new.json"
    result = pipeplan("edit", by_hand_path, "--move", best["move"], "-o", path, "--json")
    (made,) = json.loads(result.stdout)["moves"]
    assert made == {"move": best["move"], "iteration_time_s": best["iteration_time_s"]}
    assert Plan.load(path).predicted.iteration_time_s == best["iteration_time_s"]
    assert pipeplan("verify", path).exit_code == 0


def test_edit_makes_one_move_after_the_other(by_hand_path: Path, tmp_path: Path) -> None:
    stages = Plan.load(by_hand_path).stages
    there, first = stages[0].layers[-1], stages[1].layers[0]
    texts = (
        f"move layer {there} from stage 0 to stage 1",
        f"move layers {there} to {first} from stage 1 to stage 0",
    )
    path = tmp_path / "new.json"
    moves = [word for text in texts for word in ("--move", text)]
    result = pipeplan("edit", by_hand_path, *moves, "-o", path)
    assert result.exit_code == 0
    assert [line.split(": ")[0] for line in result.stdout.splitlines() if " before, " in line] == [
        *texts
    ]
    assert Plan.load(path).stages[0].layers == (*stages[0].layers, first)


def test_edit_refuses_what_is_no_move_and_writes_nothing(
    by_hand_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "new.json"
    result = pipeplan("edit", by_hand_path, "--move", "faster", "-o", path)
    assert result.exit_code == 1
    assert "is of no known form; write one of: move layer LAYER from stage I" in result.stderr
    assert not path.exists()


@pytest.mark.extensive
def test_what_if_solves_anew_within_its_limit(plan_path: Path) -> None:
    device = Plan.load(plan_path).ranks[0]
    options = ("--what-if", "--time-limit", "0.5", "--deterministic", "--json")
    result = pipeplan("explain", plan_path, "--change", f"another {device}", *options)
    found = json.loads(result.stdout)["what_if"]
    assert found["solved_anew"]
    (row,) = found["values"]
    assert row["lower_bound_s"] <= row["iteration_time_s"] <= row["replay_s"]
    again = pipeplan("explain", plan_path, "--change", f"another {device}", *options)
    assert json.loads(again.stdout)["what_if"] == found


def test_progress_of_searches_goes_to_the_error_stream(by_hand_path: Path) -> None:
    options = ("--what-if", "--time-limit", "0.2", "--deterministic")
    device = Plan.load(by_hand_path).ranks[0]
    result = pipeplan("explain", by_hand_path, "--change", f"device {device} speed x2", *options)
    assert "solved" in result.stderr
    assert "no change" in result.stderr
    assert "no change" not in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--time-limit", 5), "--time-limit: only has an effect with --what-if"),
        (("--what-if", "--time-limit", 0), "--time-limit: 0.0 is not a positive number"),
        (("--change", "faster"), "change 'faster': is of no known form; write one of: device"),
        (("--change", "device nowhere speed x2"), "the cluster has no such device; choose one"),
        (("--change", "link big-old speed x2"), "'speed' is no figure of a link"),
        (("--seed", -1), "seed: -1 is not a whole number"),
    ],
)
def test_wrong_options_are_refused(plan_path: Path, options: tuple, said: str) -> None:
    result = pipeplan("explain", plan_path, *options)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr


def test_what_is_wrong_is_told_before_anything_is_shown(plan_path: Path) -> None:
    result = pipeplan("explain", plan_path, "--change", "device nowhere speed x2")
    assert result.stdout == ""


def test_a_plan_beyond_memory_is_explained_without_values(plan_data: dict, tmp_path: Path) -> None:
    for kind in plan_data["cluster"]["device_types"].values():
        kind["memory_gib"], kind["reserved_gib"] = 0.001, 0
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data))
    result = pipeplan("explain", path)
    assert result.exit_code == 0
    assert "the plan exceeds memory: " in result.stdout
    assert "Effect of changes" not in result.stdout
    assert json.loads(pipeplan("explain", path, "--json").stdout)["what_if"] is None
    refused = pipeplan("explain", path, "--what-if")
    assert refused.exit_code == 1
    assert "overflows memory" in refused.stderr
