"""After any wrong edit of a plan by hand, ``pipeplan verify`` exits 1 and names the field."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import pipeplan

Data = dict[str, Any]
Edit = Callable[[Data], object]


def _swap(one: Data, other: Data, field: str) -> None:
    one[field], other[field] = other[field], one[field]


def _swap_orders(plan: Data) -> None:
    here, there = (plan["stages"][stage]["devices"][0] for stage in (0, 1))
    plan["orders"][here], plan["orders"][there] = plan["orders"][there], plan["orders"][here]


def _rewrite(plan: Data, rewritten: Callable[[str], str]) -> None:
    """Rewrite the order of the first stage's first device."""
    device = plan["stages"][0]["devices"][0]
    plan["orders"][device] = rewritten(plan["orders"][device])


def _change_types(plan: Data, change: Edit) -> None:
    for kind in plan["cluster"]["device_types"].values():
        change(kind)


def _speed_up(kind: Data) -> None:
    kind["memory_bandwidth_gb_per_s"] *= 3
    kind["peak_tflop_per_s"] = {name: 3 * peak for name, peak in kind["peak_tflop_per_s"].items()}


EDITS: dict[str, tuple[Edit, str]] = {
    "a layer less": (
        lambda plan: plan["stages"][0]["layers"].pop(),
        r"stages: layer '.*' is in no stage",
    ),
    "unknown layer": (
        lambda plan: plan["stages"][0]["layers"].append("h.99"),
        r"stages\[0\]\.layers: unknown layer 'h\.99'",
    ),
    "a layer in two stages": (
        lambda plan: plan["stages"][1]["layers"].append(plan["stages"][0]["layers"][0]),
        r"stages\[1\]\.layers: layer '.*' is already in stage 0",
    ),
    "layers of two stages swapped": (
        lambda plan: _swap(plan["stages"][0], plan["stages"][1], "layers"),
        "stages: .* an edge backwards",
    ),
    "operation twice": (
        lambda plan: _rewrite(plan, lambda order: f"{order} 0F0"),
        "orders.*: .*0F0",
    ),
    "an operation less": (
        lambda plan: _rewrite(plan, lambda order: re.sub("0[BI]0", "", order, count=1)),
        "orders: microbatch 0 of stage 0 has F(, W)?; it needs F and then B",
    ),
    "misspelt operation": (
        lambda plan: _rewrite(plan, lambda order: re.sub("0[BI]0", "0X0", order, count=1)),
        r"orders\[.*\].*'0X0'",
    ),
    "operations elsewhere": (_swap_orders, r"orders\[.*\]: .* does not hold stage 0"),
    "orders that wait for each other": (
        lambda plan: _rewrite(plan, lambda order: " ".join(reversed(order.split()))),
        "the orders deadlock: .* waits at 0[BIW]",
    ),
    "too little memory": (
        lambda plan: _change_types(
            plan, lambda kind: kind.update(memory_gib=kind["reserved_gib"] + 0.001)
        ),
        "memory of .* [GMK]iB .*memory_gib",
    ),
    "unknown device": (
        lambda plan: plan["stages"][0].update(devices=["nowhere"]),
        r"stages\[0\]\.devices: unknown device 'nowhere'",
    ),
    "a rank less": (lambda plan: plan["ranks"].pop(0), "ranks: device .* has no rank; add it"),
    "negative time": (
        lambda plan: plan["predicted"].update(iteration_time_s=-1.0),
        r"predicted\.iteration_time_s: .*0",
    ),
    "shorter time": (
        lambda plan: plan["predicted"].update(
            iteration_time_s=plan["predicted"]["iteration_time_s"] / 2
        ),
        r"predicted\.iteration_time_s: .*simulation gives",
    ),
    "higher bound": (
        lambda plan: plan["predicted"].update(
            lower_bound_s=2 * plan["predicted"]["iteration_time_s"]
        ),
        r"predicted\.lower_bound_s: ",
    ),
    "wrong digest": (
        lambda plan: plan["model"].update(graph_digest="sha256:" + 64 * "0"),
        r"model\.graph_digest: ",
    ),
    "another model": (
        lambda plan: plan["model"]["graph"]["layers"][0].update(stash_bytes=12345),
        r"model\.graph_digest: .*plan again",
    ),
    "a layer without its work": (
        lambda plan: plan["model"]["graph"]["layers"][0].update(forward_flops=1000),
        r"forward_flops is 1000, its rows of work add up to 0",
    ),
    "unknown field": (
        lambda plan: plan["stages"][0].update(layer=[]),
        r"stages\[0\]\.layer: .*did you mean 'layers'",
    ),
    "future format": (
        lambda plan: plan.update(format="pipeplan/99"),
        "format: 'pipeplan/99' is newer",
    ),
    "unknown strategy": (
        lambda plan: plan["sync"].update(strategy="telepathy"),
        r"sync\.strategy: 'telepathy'",
    ),
    "a field less": (lambda plan: plan.pop("orders"), "orders: "),
    "more microbatches": (
        lambda plan: plan.update(microbatches=5),
        r"microbatches: 5, but job\.microbatches is 4",
    ),
    "endless microbatches": (lambda plan: plan.update(microbatches=10**9), "microbatches: .*65536"),
    "faster devices": (
        lambda plan: _change_types(plan, _speed_up),
        r"provenance\.problem_digest: .*predicted\.lower_bound_s",
    ),
    "another optimizer": (
        lambda plan: plan["job"].update(optimizer="sgd"),
        r"provenance\.problem_digest: .*`pipeplan simulate PLAN -o PLAN`",
    ),
    "a bound for nothing": (
        lambda plan: plan["provenance"].pop("problem_digest"),
        r"provenance\.problem_digest: none",
    ),
    "one stage only": (
        lambda plan: plan["job"].update(max_stages=1),
        r"stages\[1\]: there are \d stages, but job\.max_stages is 1; merge",
    ),
    "forbidden replicas": (
        lambda plan: plan["stages"][0]["devices"].append(plan["stages"][1]["devices"][0]),
        r"stages\[0\]\.devices: 2 devices, but job\.replication is false",
    ),
}


def test_an_unedited_plan_holds(plan_path: Path) -> None:
    result = pipeplan("verify", plan_path)
    assert result.exit_code == 0
    assert result.output.startswith(f"{plan_path}: holds; it lies in the space of its bound: ")


@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=EDITS)
def test_a_wrong_edit_is_named(plan_data: Data, tmp_path: Path, edit: Edit, message: str) -> None:
    edited = copy.deepcopy(plan_data)
    edit(edited)
    assert edited != plan_data
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(edited))

    result = pipeplan("verify", path)
    as_json = pipeplan("verify", path, "--json")

    assert result.exit_code == as_json.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    report = json.loads(as_json.stdout)
    assert not report["valid"]
    assert [f"error: {problem}" for problem in report["problems"]] == lines
    assert any(re.search(message, line) for line in lines), lines


def test_a_good_edit_holds_after_fresh_predictions(plan_data: Data, tmp_path: Path) -> None:
    """Moving a layer is a matter of editing two lists and simulating again."""
    stages = plan_data["stages"]
    long = next((k for k, stage in enumerate(stages) if k and len(stage["layers"]) > 1), None)
    if long is None:
        pytest.fail("no later stage of this plan has two layers; the test needs another plan")
    stages[long - 1]["layers"].append(stages[long]["layers"].pop(0))
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(plan_data))
    assert pipeplan("verify", path).exit_code == 1
    assert pipeplan("simulate", path, "-o", path).exit_code == 0
    assert pipeplan("verify", path).exit_code == 0
    again = json.loads(path.read_text())
    assert again["stages"] == stages
    assert again["predicted"] != plan_data["predicted"]
    # The bound is one of the problem, which is as it was.
    assert again["predicted"]["lower_bound_s"] == plan_data["predicted"]["lower_bound_s"] > 0
    assert again["provenance"] == plan_data["provenance"]


@pytest.mark.parametrize("edit", ["faster devices", "another optimizer"])
def test_a_bound_does_not_outlive_the_problem_it_was_proved_for(
    plan_data: Data, tmp_path: Path, edit: str
) -> None:
    assert plan_data["predicted"]["lower_bound_s"] > 0
    EDITS[edit][0](plan_data)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(plan_data))
    result = pipeplan("simulate", path, "-o", path)
    assert result.exit_code == 0
    assert "no lower bound" in result.stdout
    assert "bound covers nothing: " in result.stdout
    again = json.loads(path.read_text())
    assert again["predicted"]["lower_bound_s"] == 0
    assert again["predicted"]["gap"] is None
    assert again["provenance"]["bound_covers"]["space"] is None
    assert again["provenance"]["problem_digest"] != plan_data["provenance"]["problem_digest"]
    assert pipeplan("verify", path).exit_code == 0


def test_an_edit_that_no_cost_depends_on_keeps_the_bound(plan_data: Data, tmp_path: Path) -> None:
    plan_data["job"]["learning_rate"] /= 2
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(plan_data))
    assert pipeplan("verify", path).exit_code == 0


@pytest.mark.parametrize(
    "edit", ["a layer less", "unknown layer", "unknown device", "misspelt operation"]
)
@pytest.mark.parametrize("command", ["simulate", "report", "explain"])
def test_what_cannot_be_simulated_is_named(
    plan_data: Data, tmp_path: Path, edit: str, command: str
) -> None:
    EDITS[edit][0](plan_data)
    path, picture = tmp_path / "edited.json", tmp_path / "plan.png"
    path.write_text(json.dumps(plan_data))
    result = pipeplan(command, path, *([] if command == "explain" else ["-o", picture]))
    assert result.exit_code == 1
    assert result.stderr.startswith((f"error: {path}: stages", f"error: {path}: orders"))
    assert not picture.exists()
