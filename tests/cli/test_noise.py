"""What ``pipeplan simulate`` says of a plan under noise, and which options it refuses."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from commands import CLUSTERS, pipeplan

from planner import Plan, simulate
from planner.simulation.noise import Noise, times_under_noise
from planner.units import format_seconds

WORDS = "jitter=0.1,slow_probability=0.05,slow_factor=2,samples=50,seed=7"
NOISE = Noise(jitter=0.1, slow_probability=0.05, slow_factor=2, samples=50, seed=7)


def test_times_under_noise_are_added_to_the_predictions(plan_path: Path) -> None:
    made = pipeplan("simulate", plan_path, "--noise", WORDS, "--json")
    report, plan = json.loads(made.stdout), Plan.load(plan_path)
    times = times_under_noise(simulate(plan), NOISE)
    assert report.pop("under_noise") == {**asdict(NOISE), **asdict(times)}
    assert report.pop("throughput")["samples_per_s"] > 0
    assert report == plan.predicted.model_dump(mode="json")


def test_times_under_noise_are_printed_as_a_table(plan_path: Path) -> None:
    output = pipeplan("simulate", plan_path, "--noise", WORDS).stdout
    times = times_under_noise(simulate(Plan.load(plan_path)), NOISE)
    for name, time_s in {
        "predicted": times.predicted_s,
        "expected": times.expected_s,
        "median": times.median_s,
        "95th percentile": times.percentile_95_s,
        "worst of 50": times.worst_s,
    }.items():
        assert name in output
        assert format_seconds(time_s) in output


def test_slow_devices_need_no_jitter(plan_path: Path) -> None:
    options = ("--noise", "slow_probability=1,samples=20", "--json")
    report = json.loads(pipeplan("simulate", plan_path, *options).stdout)["under_noise"]
    assert report["jitter"] == 0
    assert report["percentile_95_s"] == pytest.approx(report["worst_s"], rel=1e-9)
    assert 1 < report["worst_s"] / report["predicted_s"] <= report["slow_factor"] == 1.5


@pytest.mark.parametrize(
    ("noise", "named"),
    [
        ("jitter=5", "jitter: 5.0 is not a fraction from 0 to 1; write 0.05 for 5 %"),
        ("jitter=0.1,transfer_jitter=-1", "transfer_jitter: -1.0 is not"),
        ("slow_probability=2", "slow_probability: 2.0 is not a probability"),
        ("slow_probability=0.1,slow_factor=0.5", "slow_factor: 0.5 is not"),
        ("jitter=0.1,samples=1", "samples: 1 is not a whole number from 20"),
        ("jitter=0.1,seed=-1", "seed: -1 is not a whole number from 0"),
        ("jitter=0.1,slow_factor=2", "slow_factor=2.0: has no effect"),
        ("samples=50", "samples=50: has no effect without noise; give jitter"),
        ("seed=1", "seed=1: has no effect without noise; give jitter"),
    ],
)
def test_wrong_noise_is_named(plan_path: Path, noise: str, named: str) -> None:
    result = pipeplan("simulate", plan_path, "--noise", noise)
    assert result.exit_code == 1
    assert named in result.stderr


def test_a_simple_plan_says_what_it_costs(tmp_path: Path) -> None:
    cluster = CLUSTERS / "single_node.toml"
    options = ("--time-limit", 0.3, "--prefer", "simple")
    files = ("--json", "-o", tmp_path / "plan.json")
    made = pipeplan("plan", "models.vgg:vgg_tiny", "--cluster", cluster, *options, *files)
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    simplicity = found["simplicity"]
    assert found["iteration_time_s"] == simplicity["iteration_time_s"]
    assert simplicity["iteration_time_s"] <= 1.0101 * simplicity["fastest_s"]
    assert simplicity["complexity"]["searched_orders"] == 0
    assert "chosen as the simplest" in Plan.load(tmp_path / "plan.json").provenance.solver


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--prefer", "simple", "--sync", "semi_decentralized"), "--prefer simple: compares plans")],
)
def test_a_choice_that_is_impossible_is_refused(options: tuple[str, ...], named: str) -> None:
    cluster = CLUSTERS / "single_node.toml"
    result = pipeplan("plan", "models.vgg:vgg_tiny", "--cluster", cluster, *options)
    assert result.exit_code == 1
    assert named in result.stderr


def test_a_robust_plan_keeps_the_times_it_was_chosen_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    cluster = CLUSTERS / "single_node.toml"
    options = ("--time-limit", 0.3, "--prefer", "robust", "--json", "-o", path)
    made = pipeplan("plan", "models.vgg:vgg_tiny", "--cluster", cluster, *options)
    assert made.exit_code == 0, made.output
    robustness = json.loads(made.stdout)["robustness"]
    again = json.loads(pipeplan("simulate", path, "--noise", "jitter=0.05", "--json").stdout)[
        "under_noise"
    ]
    for name, value in {**robustness["noise"], **robustness["times"]}.items():
        assert again[name] == pytest.approx(value)
    assert robustness["times"]["predicted_s"] <= 1.02 * robustness["fastest"]["predicted_s"]
    assert "chosen for robustness" in Plan.load(path).provenance.solver
