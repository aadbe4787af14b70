"""Measured timelines of real runs, and plans emulated without their model."""

import json
import re
from pathlib import Path

import pytest
from executor_plans import cut_pipeline, scheduled, traced
from launch import forked
from typer.testing import CliRunner

from executor.runtime.timeline import ClockReading, on_clock_of_first_s
from planner.cli.commands import app
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan
from planner.simulation.simulator import simulate_plan


def plan_of(factory: str | None) -> Plan:
    graph, devices = traced("gpt_tiny"), ["d0 d1", "d2"]
    return scheduled(cut_pipeline(graph, factory, [4], devices, microbatches=4))


def test_moments_are_on_the_first_ranks_clock_which_drifts_steadily() -> None:
    """At 10 s the first rank's clock shows 15 s, at 110 s, 116 s: 1 s more in 100."""
    before, after = ClockReading(10.0, 5.0), ClockReading(110.0, 6.0)
    shown = [on_clock_of_first_s(moment_s, before, after) for moment_s in (10.0, 60.0, 110.0)]
    assert shown == pytest.approx([15.0, 65.5, 116.0])


def pipeplan(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


@pytest.mark.extensive
def test_a_real_run_is_compared_and_calibrates(path: Path) -> None:
    plan = plan_of("models.gpt:gpt_tiny")
    plan.save(path)
    measured = path.with_name("measured.json")
    options = ["--data", "random", "--steps", "3", "--timeline", str(measured)]
    done = forked(3, "-m", "executor", str(path), *options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == f"wrote {measured}"
    timeline = MeasuredTimeline.load(measured)
    assert [step.step for step in timeline.steps] == [1, 2, 3]
    assert not timeline.emulated
    assert len(timeline.operations) == 3 * sum(map(len, plan.parsed_orders().values()))
    assert {tuple(row.stages) for row in timeline.reductions} == {
        tuple(event.synchronisation.stages) for event in simulate_plan(plan).synchronisations
    }
    report = json.loads(pipeplan("simulate", path, "--against", measured, "--json"))
    assert report["against"]["steps"] == [2, 3]
    calibrated = path.with_name("calibrated.json")
    pipeplan("profile", path, measured, "-o", calibrated)
    report = json.loads(pipeplan("simulate", calibrated, "--against", measured, "--json"))
    assert abs(report["against"]["error"]) < 0.9


@pytest.mark.extensive
def test_a_plan_without_a_factory_is_emulated(path: Path) -> None:
    plan_of(None).save(path)
    measured = path.with_name("measured.json")
    options = ["--emulate", "--steps", "3", "--timeline", str(measured)]
    done = forked(3, "-m", "executor", str(path), *options)
    assert done.returncode == 0, done.stderr[-4000:]
    *steps, summary, wrote = done.stdout.splitlines()
    assert len(steps) == 3
    assert re.match(r"emulated 3 steps on 3 ranks: median \d+\.\d+ s \(predicted ", summary)
    assert wrote == f"wrote {measured}"
    assert MeasuredTimeline.load(measured).emulated
    pipeplan("simulate", path, "--against", measured)
    refused = CliRunner().invoke(app, ["profile", str(path), str(measured), "-o", "no.json"])
    assert refused.exit_code == 1
    assert "--links-only" in refused.output
