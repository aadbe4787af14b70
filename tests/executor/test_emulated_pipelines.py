"""Pipelines of one torchrun, emulated: every strategy, and what the death of one does to others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from emulated_worker import STEPS, STRATEGIES
from executor_plans import pipeline_of, scheduled, traced
from launch import environment, forked, torchrun

from models import ZOO

pytestmark = pytest.mark.extensive
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipelines of one rank."""
    graph = traced("gpt_tiny")
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    stage = (list(graph.layers), ["d0", "d1"])
    scheduled(pipeline_of(graph, ZOO["gpt_tiny"], [stage], microbatches=4)).save(path)
    return path


def test_every_strategy_is_emulated_and_all_work_units_are_done(plan: Path, tmp_path: Path) -> None:
    words = (str(HERE / "emulated_worker.py"), str(plan), str(tmp_path))
    done = forked(2, *words, env=environment(HERE))
    assert done.returncode == 0, done.stderr[-4000:]
    for number in range(len(STRATEGIES)):
        times = [json.loads((tmp_path / f"{number}.{rank}").read_text()) for rank in (0, 1)]
        assert len(times[0]) + len(times[1]) == 2 * STEPS


@pytest.mark.parametrize("lost", [0, 1])
def test_one_pipeline_that_is_killed_ends_no_other(plan: Path, lost: int) -> None:
    options = ["--emulate", "--steps", "8", "--sync", "semi_decentralized"]
    faults = ["--inject", f"fail_at({lost},4)"]
    done = torchrun(2, "-m", "executor", str(plan), *options, *faults)
    assert done.returncode == 0, done.stderr[-4000:]
    told = f"error: rank {lost} ended by signal 9: its pipeline is lost; the other pipelines go on"
    assert done.stderr.count(told) == 1
    assert "16 of 16 work units trained, 1 of them again after a loss" in done.stdout
    assert re.search(f"pipeline {lost}: 3 work units, 1 lost, not there at the end", done.stdout)
    assert f"pipeline {1 - lost}: 13 work units, 0 lost" in done.stdout


def test_where_all_pipelines_are_lost_the_job_fails(plan: Path) -> None:
    options = ["--emulate", "--steps", "8", "--sync", "ad_psgd"]
    done = torchrun(
        2, "-m", "executor", str(plan), *options, "--inject", "fail_at(0,2) fail_at(1,2)"
    )
    assert done.returncode != 0
    assert "all pipelines (0, 1) are lost" in done.stderr
