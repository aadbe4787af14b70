"""What the commands write, print and refuse."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import CLUSTERS, ROOT, pipeplan

from planner import LayerGraph, Plan, verify

COMMANDS = ("trace", "plan", "compare", "verify", "simulate", "explain", "report")


def test_help_names_every_command() -> None:
    output = pipeplan("--help").output
    for command in COMMANDS:
        assert command in output
        assert pipeplan(command, "-h").exit_code == 0


def test_the_version_is_printed() -> None:
    assert pipeplan("--version").output.startswith("pipeplan ")


# --- trace ----------------------------------------------------------------------------------------


def test_trace_shows_how_layers_split_and_what_is_not_split() -> None:
    command = ("trace", "models.vgg:vgg_tiny", "--split", "2")
    result = pipeplan(*command)
    assert result.exit_code == 0
    assert "classifier.0" in result.stdout
    assert "not split: features.0.conv.weight: dimension 0: aten.conv2d.default" in result.stdout
    record = json.loads(pipeplan(*command, "--json").stdout)
    assert {region["kind"] for region in record["regions"]} == {"columns", "vocabulary"}


def test_trace_shows_layers_and_coverage_and_writes_the_graph(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    result = pipeplan("trace", "models.unet:unet_tiny", "-o", path)
    assert result.exit_code == 0
    graph = LayerGraph.load(path)
    for name in graph.layers:
        assert name in result.stdout
    assert "coverage" in result.stdout or "%" in result.stdout
    as_json = pipeplan("trace", "models.unet:unet_tiny", "--json")
    assert LayerGraph.parse(json.loads(as_json.stdout)).record == graph.record


def test_model_arguments_can_be_set(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('format = "pipeplan-job/1"\n[model_arguments]\nlayers = 2\nwidth = 32\n')
    result = pipeplan("trace", "models.gpt:gpt_tiny", "--job", job, "--set", "layers=3", "--json")
    names = [layer["name"] for layer in json.loads(result.stdout)["layers"]]
    assert "h.2" in names
    assert "h.3" not in names


def test_a_configuration_file_of_hugging_face_is_a_model_and_not_a_graph(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job, config, path = (tmp_path / name for name in ("job.toml", "config.json", "plan.json"))
    job.write_text('format = "pipeplan-job/1"\nmicrobatches = 2\nreplication = false\n')
    config.write_text(
        '{"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "vocab_size": 99}'
    )
    result = pipeplan(
        *("plan", f"hf:{config}", "--cluster", CLUSTERS / "irregular.toml", "--job", job),
        *("--set", "n_layer=2", "--set", "sequence_length=8", "--time-limit", 0.2, "-o", path),
    )
    assert result.exit_code == 0, result.output
    plan = Plan.load(path)
    assert plan.model.factory == f"hf:{config}"
    assert plan.model.arguments == {"n_layer": 2, "sequence_length": 8}
    assert "transformer.h.1" in [layer.name for layer in plan.model.graph.layers]


# --- plan -----------------------------------------------------------------------------------------


def test_plan_from_a_traced_graph_needs_no_model(tmp_path: Path) -> None:
    graph, plan = tmp_path / "graph.json", tmp_path / "plan.json"
    assert pipeplan("trace", "models.vgg:vgg_tiny", "-o", graph).exit_code == 0
    result = pipeplan(
        *("plan", graph, "--cluster", CLUSTERS / "single_node.toml"),
        *("--time-limit", 0.5, "-o", plan, "--json"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    loaded = Plan.load(plan)
    assert not verify(loaded)
    assert loaded.model.factory is None
    assert report["plan"] == str(plan)
    assert report["status"] in ("optimal", "feasible")
    assert report["ended"] in ("proved", "time limit", "nothing left to try")
    assert report["iteration_time_s"] == loaded.predicted.iteration_time_s
    assert report["history"][-1]["iteration_time_s"] == loaded.predicted.iteration_time_s
    assert 0 < report["lower_bound_s"] <= report["iteration_time_s"]


@pytest.mark.extensive
@pytest.mark.parametrize("after_s", [0.5, 6.0])
def test_an_interrupted_search_keeps_what_it_has_found(tmp_path: Path, after_s: float) -> None:
    """Early candidates are still being tried; later CP-SAT is at work."""
    plan = tmp_path / "plan.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "planner.cli", "plan", "models.gpt:gpt2_small"),
            *("--cluster", str(CLUSTERS / "irregular.toml"), "--set", "sequence_length=256"),
            *("--time-limit", "250", "-o", str(plan)),
        ],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "walk" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "interrupted" in output
    assert not verify(Plan.load(plan))


def test_devices_that_no_link_joins_are_noted(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    types = "".join(
        f'[[devices]]\nname = "{name}"\ntype = "A10"\n' for name in ("a0", "a1", "b0", "b1")
    )
    links = "".join(
        f'[[links]]\nbetween = ["{name}0", "{name}1"]\npreset = "NVLink3"\n' for name in "ab"
    )
    cluster.write_text(f'format = "pipeplan-cluster/1"\n{types}{links}')
    made = pipeplan(
        *("plan", "models.vgg:vgg_tiny", "--cluster", cluster),
        # Of a search that ends at once, the first layouts are judged all the same.
        *("--time-limit", 1e-6, "-o", tmp_path / "plan.json"),
    )
    assert made.exit_code == 0, made.output
    unused = {"a0", "a1", "b0", "b1"} - set(Plan.load(tmp_path / "plan.json").ranks)
    assert unused >= {"b0", "b1"} or unused >= {"a0", "a1"}
    assert made.stdout.startswith("not used: ")
    assert "2 devices, since no path of links joins them" in made.stdout


# --- simulate and plot ----------------------------------------------------------------------------


def test_simulate_prints_the_predictions_of_the_plan(plan_path: Path) -> None:
    report = json.loads(pipeplan("simulate", plan_path, "--json").stdout)
    assert report.pop("throughput")["samples_per_s"] > 0
    assert report == json.loads(plan_path.read_text())["predicted"]
    tables = pipeplan("simulate", plan_path).stdout
    for device in Plan.load(plan_path).ranks:
        assert device in tables


def test_simulate_writes_a_chrome_trace(plan_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert pipeplan("simulate", plan_path, "--trace", path).exit_code == 0
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    orders = Plan.load(plan_path).orders.values()
    assert names >= {word for order in orders for word in order.split()}


@pytest.mark.parametrize("options", [[], ["--memory"]])
def test_plot_draws_pictures(plan_path: Path, tmp_path: Path, options: list[str]) -> None:
    png, svg = tmp_path / "plan.png", tmp_path / "plan.svg"
    assert pipeplan("report", plan_path, "-o", png, *options).exit_code == 0
    assert pipeplan("report", plan_path, "-o", svg, *options).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()


def _size_of_one(plan_path: Path, folder: Path) -> int:
    assert pipeplan("report", plan_path, "-o", folder / "one.svg").exit_code == 0
    return (folder / "one.svg").stat().st_size


def test_plot_draws_several_plans_below_each_other(plan_path: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.svg"
    assert pipeplan("report", plan_path, plan_path, "-o", both).exit_code == 0
    assert both.stat().st_size > 1.5 * _size_of_one(plan_path, tmp_path)
    result = pipeplan("report", plan_path, plan_path, "--memory", "-o", both)
    assert result.exit_code == 1
    assert "--memory" in result.output


# --- wrong input ----------------------------------------------------------------------------------

PLAN = ("plan", "models.gpt:gpt_tiny", "--cluster", CLUSTERS / "single_node.toml")
WRONG = {
    "no such model": (("trace", "models.gpt:gpt9"), "gpt9"),
    "no such module": (("trace", "no_such_module:make"), "no_such_module"),
    "no factory": (("trace", "models.gpt"), "module:factory"),
    "split of a graph file": (
        ("trace", "nowhere.json", "--split", "2"),
        "nowhere.json: a layer graph has no operations to split; name the model",
    ),
    "positions without a split": (("trace", "models.gpt:gpt_tiny", "--sequence"), "--split DEGREE"),
    "no such size of groups": ((*PLAN, "--set", "tensor_parallel=some"), "tensor_parallel"),
    "a size that divides nothing": (
        (*PLAN, "--set", "tensor_parallel=3"),
        "no part of 'gpt_tiny' splits into 3",
    ),
    "positions without groups": ((*PLAN, "--set", "sequence_parallel=true"), "set tensor_parallel"),
    "no such graph": (("trace", "nowhere.json"), "nowhere.json"),
    "wrong model argument": (("trace", "models.gpt:gpt_tiny", "--set", "depth=3"), "depth"),
    "half a setting": (("trace", "models.gpt:gpt_tiny", "--set", "layers"), "NAME=VALUE"),
    "no such job": ((*PLAN, "--job", "nowhere.toml"), "nowhere.toml"),
    "no such cluster": (("plan", "models.gpt:gpt_tiny", "--cluster", "no.toml"), "no.toml"),
    "no such folder": ((*PLAN, "-o", "no/such/folder/plan.json"), "folder"),
    "no time": ((*PLAN, "--time-limit", 0), "--time-limit: "),
    "time that is no number": ((*PLAN, "--time-limit", "nan"), "--time-limit: "),
    "no workers": ((*PLAN, "--workers", 0), "workers"),
    "no such plan": (("verify", "nowhere.json"), "nowhere.json"),
    "a folder for a plan": (("simulate", ROOT), str(ROOT)),
    "nothing to explain": (("explain", "nowhere.json"), "nowhere.json"),
    "another kind of file": (("verify", CLUSTERS / "irregular.toml"), "irregular.toml"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, named = WRONG[case]
    result = pipeplan(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert named in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_plan_to_start_from_is_kept_unless_it_is_named(
    plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    earlier = tmp_path / "plan.json"
    earlier.write_bytes(plan_path.read_bytes())
    refused = pipeplan(*PLAN, "--warm-start", "plan.json")
    assert refused.exit_code == 1
    assert "--warm-start plan.json: would be overwritten; give -o plan.json" in refused.stderr
    assert earlier.read_bytes() == plan_path.read_bytes()
    named = pipeplan(*PLAN, "--warm-start", "plan.json", "-o", "plan.json", "--time-limit", 0.1)
    assert named.exit_code == 0
    assert earlier.read_bytes() != plan_path.read_bytes()


def test_a_wrong_device_in_a_plan_is_told_in_few_lines(plan_path: Path, tmp_path: Path) -> None:
    data = json.loads(plan_path.read_text())
    name = data["stages"][0]["devices"][0]
    data["stages"][0]["devices"][0] = f"{name}x"
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    lines = pipeplan("verify", path).stderr.splitlines()
    assert all(line.startswith(f"error: {path}: ") for line in lines)
    assert any("the cluster has no such device, choose one such as" in line for line in lines)
    assert sum("does not hold stage 0" in line for line in lines) == 1
    assert any(" more: device " in line for line in lines)


def test_wrong_usage_exits_2() -> None:
    assert pipeplan("adopt", "models.gpt:gpt_tiny").exit_code == 2
    assert pipeplan("conquer").exit_code == 2


def test_an_impossible_problem_says_what_binds(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        """
format = "pipeplan-cluster/1"
[[nodes]]
name = "n"
devices = 2
type = "small"
link = "PCIe4-x16"
[device_types.small]
memory_gib = 0.5
memory_bandwidth_gb_per_s = 100
peak_tflop_per_s = { float32 = 10 }
reserved_gib = 0.1
"""
    )
    result = pipeplan(
        *("plan", "models.gpt:gpt_tiny", "--set", "width=768", "--set", "vocabulary=50257"),
        *("--cluster", cluster, "--time-limit", 2, "-o", tmp_path / "plan.json"),
    )
    assert result.exit_code == 1
    assert "layer 'lm_head' alone needs" in result.stderr
    assert "409.6 MiB" in result.stderr
    assert not (tmp_path / "plan.json").exists()
