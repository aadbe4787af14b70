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


def _drop_a_layer(plan: Data) -> None:
    del plan["stages"][0]["layers"][-1]


def _name_an_unknown_layer(plan: Data) -> None:
    plan["stages"][0]["layers"].append("h.99")


def _put_a_layer_into_two_stages(plan: Data) -> None:
    plan["stages"][1]["layers"].append(plan["stages"][0]["layers"][0])


def _swap_the_layers_of_two_stages(plan: Data) -> None:
    first, second = plan["stages"][0], plan["stages"][1]
    first["layers"], second["layers"] = second["layers"], first["layers"]


def _run_an_operation_twice(plan: Data) -> None:
    plan["orders"][plan["ranks"][0]] += " 0F0"


def _drop_an_operation(plan: Data) -> None:
    device = plan["stages"][0]["devices"][0]
    plan["orders"][device] = re.sub("0[BI]0", "", plan["orders"][device], count=1)


def _misspell_an_operation(plan: Data) -> None:
    device = plan["stages"][0]["devices"][0]
    plan["orders"][device] = re.sub("0[BI]0", "0X0", plan["orders"][device], count=1)


def _run_an_operation_elsewhere(plan: Data) -> None:
    here, there = (plan["stages"][stage]["devices"][0] for stage in (0, 1))
    plan["orders"][here], plan["orders"][there] = plan["orders"][there], plan["orders"][here]


def _let_orders_wait_for_each_other(plan: Data) -> None:
    device = plan["stages"][0]["devices"][0]
    plan["orders"][device] = " ".join(reversed(plan["orders"][device].split()))


def _leave_too_little_memory(plan: Data) -> None:
    for kind in plan["cluster"]["device_types"].values():
        kind["memory_gib"] = kind["reserved_gib"] + 0.001


def _name_an_unknown_device(plan: Data) -> None:
    plan["stages"][0]["devices"] = ["nowhere"]


def _give_a_device_no_rank(plan: Data) -> None:
    del plan["ranks"][0]


def _predict_a_negative_time(plan: Data) -> None:
    plan["predicted"]["iteration_time_s"] *= -1


def _predict_a_shorter_time(plan: Data) -> None:
    plan["predicted"]["iteration_time_s"] *= 0.5


def _predict_a_higher_bound(plan: Data) -> None:
    plan["predicted"]["lower_bound_s"] = 2 * plan["predicted"]["iteration_time_s"]


def _give_a_wrong_digest(plan: Data) -> None:
    plan["model"]["graph_digest"] = "sha256:" + 64 * "0"


def _change_the_model_under_the_plan(plan: Data) -> None:
    plan["model"]["graph"]["layers"][0]["stash_bytes"] += 1000


def _change_a_layer_but_not_its_work(plan: Data) -> None:
    plan["model"]["graph"]["layers"][0]["forward_flops"] += 1000


def _add_an_unknown_field(plan: Data) -> None:
    plan["stages"][0]["layer"] = []


def _declare_a_future_format(plan: Data) -> None:
    plan["format"] = "pipeplan/99"


def _ask_for_an_unknown_strategy(plan: Data) -> None:
    plan["sync"]["strategy"] = "telepathy"


def _forget_a_field(plan: Data) -> None:
    del plan["orders"]


def _ask_for_more_microbatches(plan: Data) -> None:
    plan["microbatches"] += 1


def _ask_for_endless_microbatches(plan: Data) -> None:
    plan["microbatches"] = 10**9


def _speed_up_the_devices(plan: Data) -> None:
    for kind in plan["cluster"]["device_types"].values():
        kind["memory_bandwidth_gb_per_s"] *= 3
        for precision in kind["peak_tflop_per_s"]:
            kind["peak_tflop_per_s"][precision] *= 3


def _change_the_optimizer(plan: Data) -> None:
    plan["job"]["optimizer"] = "sgd"


def _forget_what_the_bound_is_for(plan: Data) -> None:
    del plan["provenance"]["problem_digest"]


def _allow_one_stage_only(plan: Data) -> None:
    plan["job"]["max_stages"] = 1


def _replicate_where_the_job_forbids_it(plan: Data) -> None:
    plan["stages"][0]["devices"].append(plan["stages"][1]["devices"][0])


EDITS: list[tuple[Callable[[Data], None], str]] = [
    (_drop_a_layer, r"stages: layer '.*' is in no stage"),
    (_name_an_unknown_layer, r"stages\[0\]\.layers: unknown layer 'h\.99'"),
    (_put_a_layer_into_two_stages, r"stages\[1\]\.layers: layer '.*' is already in stage 0"),
    (_swap_the_layers_of_two_stages, "stages: .* an edge backwards"),
    (_run_an_operation_twice, "orders.*: .*0F0"),
    (_drop_an_operation, "orders: microbatch 0 of stage 0 has F(, W)?; it needs F and then B"),
    (_misspell_an_operation, r"orders\[.*\].*'0X0'"),
    (_run_an_operation_elsewhere, r"orders\[.*\]: .* does not hold stage 0"),
    (_let_orders_wait_for_each_other, "the orders deadlock: .* waits at 0[BIW]"),
    (_leave_too_little_memory, "memory of .* [GMK]iB .*memory_gib"),
    (_name_an_unknown_device, r"stages\[0\]\.devices: unknown device 'nowhere'"),
    (_give_a_device_no_rank, "ranks: device .* has no rank; add it"),
    (_predict_a_negative_time, r"predicted\.iteration_time_s: .*0"),
    (_predict_a_shorter_time, r"predicted\.iteration_time_s: .*simulation gives"),
    (_predict_a_higher_bound, r"predicted\.lower_bound_s: "),
    (_give_a_wrong_digest, r"model\.graph_digest: "),
    (_change_the_model_under_the_plan, r"model\.graph_digest: .*plan again"),
    (_change_a_layer_but_not_its_work, r"forward_flops is 1000, its rows of work add up to 0"),
    (_add_an_unknown_field, r"stages\[0\]\.layer: .*did you mean 'layers'"),
    (_declare_a_future_format, "format: 'pipeplan/99' is newer"),
    (_ask_for_an_unknown_strategy, r"sync\.strategy: 'telepathy'"),
    (_forget_a_field, "orders: "),
    (_ask_for_more_microbatches, r"microbatches: 5, but job\.microbatches is 4"),
    (_ask_for_endless_microbatches, "microbatches: .*65536"),
    (_speed_up_the_devices, r"provenance\.problem_digest: .*predicted\.lower_bound_s"),
    (_change_the_optimizer, r"provenance\.problem_digest: .*`pipeplan simulate PLAN -o PLAN`"),
    (_forget_what_the_bound_is_for, r"provenance\.problem_digest: none"),
    (_allow_one_stage_only, r"stages\[1\]: there are \d stages, but job\.max_stages is 1; merge"),
    (
        _replicate_where_the_job_forbids_it,
        r"stages\[0\]\.devices: 2 devices, but job\.replication is false",
    ),
]


def test_an_unedited_plan_holds(plan_path: Path) -> None:
    result = pipeplan("verify", plan_path)
    assert result.exit_code == 0
    assert result.output.startswith(f"{plan_path}: holds; it lies in the space of its bound: ")


@pytest.mark.parametrize(
    ("edit", "message"), EDITS, ids=[edit.__name__.strip("_") for edit, _ in EDITS]
)
def test_a_wrong_edit_is_named(
    plan_data: Data,
    tmp_path: Path,
    edit: Callable[[Data], None],
    message: str,
) -> None:
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


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9999])
def test_a_cut_file_is_refused(plan_path: Path, tmp_path: Path, share: float) -> None:
    text = plan_path.read_text()
    path = tmp_path / "cut.json"
    path.write_text(text[: int(share * len(text)) or 0])
    result = pipeplan("verify", path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {path}: ")
    assert "line" in result.stderr


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


@pytest.mark.parametrize("edit", [_speed_up_the_devices, _change_the_optimizer])
def test_a_bound_does_not_outlive_the_problem_it_was_proved_for(
    plan_data: Data, tmp_path: Path, edit: Callable[[Data], None]
) -> None:
    assert plan_data["predicted"]["lower_bound_s"] > 0
    edit(plan_data)
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
    "edit",
    [_drop_a_layer, _name_an_unknown_layer, _name_an_unknown_device, _misspell_an_operation],
)
@pytest.mark.parametrize("command", ["simulate", "report", "explain"])
def test_what_cannot_be_simulated_is_named(
    plan_data: Data, tmp_path: Path, edit: Callable[[Data], None], command: str
) -> None:
    edit(plan_data)
    path, picture = tmp_path / "edited.json", tmp_path / "plan.png"
    path.write_text(json.dumps(plan_data))
    result = pipeplan(command, path, *([] if command == "explain" else ["-o", picture]))
    assert result.exit_code == 1
    assert result.stderr.startswith((f"error: {path}: stages", f"error: {path}: orders"))
    assert not picture.exists()
