"""``pipeplan sweep``: what it prints and refuses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import CLUSTERS, ROOT, pipeplan

from planner import LayerGraph, Plan

NODE = """
format = "pipeplan-cluster/1"
currency = "EUR"
[[nodes]]
name = "n"
devices = 3
type = "A10"
link = "PCIe4-x16"
price_per_hour = 3.0
"""
JOB = """
format = "pipeplan-job/1"
microbatches = 4
samples_per_microbatch = 4
"""
QUICK = ("--deterministic", "--time-limit", 0.3)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    (folder / "job.toml").write_text(JOB)
    path = folder / "graph.json"
    made = pipeplan(*("trace", "models.gpt:gpt_tiny", "--job", folder / "job.toml", "-o", path))
    assert made.exit_code == 0, made.output
    return path


@pytest.fixture
def asked(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """A command of two points, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("node.toml").write_text(NODE)
    Path("job.toml").write_text(JOB)
    return (
        *("sweep", graph, "--cluster", "node.toml", "--job", "job.toml", *QUICK),
        *("--devices", "1,2", "-o", "out"),
    )


def data(*arguments: object) -> dict[str, Any]:
    result = pipeplan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_table_and_the_lines_below_it_tell_every_point(asked: tuple[object, ...]) -> None:
    result = pipeplan(*asked)
    assert result.exit_code == 0, result.output
    assert "gpt_tiny: 2 points" in result.stdout
    assert "EUR per" in result.stdout
    assert "1 device of node: n/gpu0 (at 4 x 4)" in result.stdout
    assert "2 points; 2 to solve, up to 0.3 deterministic s each" in result.stderr
    assert "1/2 node, 1 device, 4 x 4 samples: " in result.stderr
    again = pipeplan(*asked)
    assert again.stdout == result.stdout
    assert "2 points, 2 of them already in out; 0 to solve" in again.stderr


def test_json_has_every_figure_of_every_point(asked: tuple[object, ...]) -> None:
    found = data(*asked)
    assert (found["currency"], found["solved"]) == ("EUR", 2)
    for point in found["points"]:
        plan = Plan.load(Path("out") / point["plan"])
        seconds = plan.predicted.iteration_time_s
        assert point["iteration_time_s"] == seconds
        assert point["time_per_sample_s"] == pytest.approx(seconds / 16)
        cost = 1e6 * seconds / 16 * len(plan.ranks) / 3600
        assert point["cost_per_million_samples"] == pytest.approx(cost)


def test_without_prices_there_is_no_cost(asked: tuple[object, ...]) -> None:
    Path("node.toml").write_text(NODE.replace("price_per_hour = 3.0", ""))
    result = pipeplan(*asked)
    assert "no costs: the clusters have no prices; set price_per_hour" in result.stdout
    assert "million" not in result.stdout


def test_a_device_without_a_price_has_no_cost_of_zero(asked: tuple[object, ...]) -> None:
    Path("bare.toml").write_text(
        NODE.replace("price_per_hour = 3.0", "").replace('currency = "EUR"', "")
    )
    result = pipeplan(*asked, "--cluster", "bare.toml")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("no price") == 2
    assert "the front compares time and devices only" in result.stdout


def test_a_graph_file_has_one_size(asked: tuple[object, ...]) -> None:
    result = pipeplan(*asked, "--microbatch-samples", "4,8", "--global-batch", 16)
    assert result.exit_code == 1
    assert "was traced with 4 samples per microbatch, not 8; name the model" in result.stderr


def test_points_without_a_plan_stand_in_the_table_with_the_reason(
    asked: tuple[object, ...],
) -> None:
    small = NODE.replace("A10", "tiny") + (
        "[device_types.tiny]\nmemory_gib = 0.001\nreserved_gib = 0\n"
        "memory_bandwidth_gb_per_s = 10\npeak_tflop_per_s = { float32 = 1 }\n"
    )
    Path("small.toml").write_text(small)
    result = pipeplan(*asked, "--cluster", "small.toml")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("no plan ") >= 2
    assert "no price" not in result.stdout
    assert "no plan for small, 1 device, 4 x 4 samples" in result.stdout
    alone = [part if part != "node.toml" else "small.toml" for part in asked]
    assert pipeplan(*alone, "-o", "other").exit_code == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--devices", "2,x"], "--devices 2,x: expected whole numbers separated by commas"),
        (["--devices", "2,"], "--devices 2,: expected whole numbers"),
        (["--devices", "4"], "devices: 4 is not a whole number from 1 to 3"),
        (["--microbatches", "0"], "microbatches: 0 is not a whole number from 1"),
        (["--microbatches", "4", "--global-batch", "16"], "leave one of them out"),
        (["--microbatch-samples", "3", "--global-batch", "16"], "into microbatches of 3 samples"),
        (["--cluster", "other/node.toml"], "points are named after it"),
        (["--time-limit", "0"], "--time-limit: 0.0 is not a positive number"),
        (["--time-limit", "inf"], "--time-limit: inf is not a finite number"),
        (["--set", "width=3"], "is a traced graph"),
        (["-o", "job.toml"], "job.toml: is a file; a sweep needs a folder"),
        (["-o", "."], "holds other files and no sweep.json"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_solved(
    asked: tuple[object, ...], options: list[str], reason: str
) -> None:
    result = pipeplan(*asked, *options)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert not Path("out").exists()


def test_a_missing_ray_is_named_with_its_extra(
    asked: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = pipeplan(*asked, "--ray", "auto")
    assert result.exit_code == 1
    assert 'ray: it is not installed; pip install "pipeplan[ray]"' in result.stderr


def test_another_search_in_the_same_folder_is_refused(asked: tuple[object, ...]) -> None:
    assert pipeplan(*asked).exit_code == 0
    result = pipeplan(*asked, "--time-limit", 0.2)
    assert result.exit_code == 1
    assert "time_limit_s: 0.3 there, 0.2 now" in result.stderr
    assert "name another folder" in result.stderr


def test_measured_times_are_those_of_any_of_the_clusters(
    asked: tuple[object, ...], graph: Path
) -> None:
    """Times of the A10 in a sweep whose first cluster has none."""
    data = json.loads(LayerGraph.load(graph).record.model_dump_json())
    times = {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}
    for layer in data["layers"]:
        layer["measured"] = {"A10": times}
    Path("costs.json").write_text(json.dumps(data))
    result = pipeplan(
        *("sweep", graph, "--job", "job.toml", *QUICK, "-o", "out", "--costs", "costs.json"),
        *("--cluster", CLUSTERS / "single_node.toml", "--cluster", "node.toml", "--json"),
    )
    assert result.exit_code == 0, result.output
    quick, slow = json.loads(result.stdout)["points"]
    assert slow["iteration_time_s"] > 4.0 > quick["iteration_time_s"]


@pytest.mark.extensive
def test_ctrl_c_keeps_points_tells_how_to_go_on_and_stops(tmp_path: Path) -> None:
    """The first point is a small one; the others would take minutes each."""
    job = tmp_path / "job.toml"
    job.write_text('format = "pipeplan-job/1"\nmicrobatches = 8\nsamples_per_microbatch = 64\n')
    command = [
        *(sys.executable, "-m", "planner.cli", "sweep", "models.gpt:gpt_tiny"),
        *("--cluster", str(CLUSTERS / "irregular.toml"), "--job", str(job), "--time-limit", "300"),
        *("--devices", "1,8,9", "-o", str(tmp_path / "out")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert run.stderr is not None
    told = ""
    for line in run.stderr:
        told += line
        if line.startswith("1/3"):
            os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 130, told
    assert "2 points not solved yet; run the same command again" in told
    assert "Traceback" not in told
    assert len([*(tmp_path / "out").glob("irregular-*.json")]) == 1
