"""What a training side by side prints at its beginning and its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from executor_plans import pipeline_of, scheduled, traced
from launch import torchrun

from executor.elastic.faults import parse_faults
from executor.elastic.run import missed_lines
from models import ZOO

pytestmark = pytest.mark.extensive


def test_pipelines_tell_what_all_of_them_trained_and_which_faults_did_not_happen(
    tmp_path: Path,
) -> None:
    graph = traced("gpt_tiny")
    stage = (list(graph.layers), ["d0", "d1"])
    job = {"microbatches": 4}
    plan = tmp_path / "plan.json"
    scheduled(pipeline_of(graph, ZOO["gpt_tiny"], [stage], **job)).save(plan)
    options = ["--steps", "3", "--data", "random", "--sync", "parameter_server"]
    faults = ["--inject", "hang_at(1,1,0) hang_at(1,900,1)"]
    done = torchrun(2, "-m", "executor", str(plan), *options, *faults)
    assert done.returncode == 0, done.stderr[-4000:]
    compared, first, *_, missed, last = done.stdout.splitlines()
    assert compared.startswith("compared with eager autograd: ")
    assert first == (
        "parameter_server: 2 pipelines of 1 rank side by side, 6 work units of 2 microbatches in "
        "all; the steps are pipeline 0's, their loss is the mean over the pipelines' last ones"
    )
    never = "inject: hang_at(1,900,1) never happened: its pipeline did not begin step 900"
    assert missed == never
    assert done.stdout.count("never happened") == 1
    assert re.fullmatch(
        r"trained 6 work units on 2 pipelines, [\d.]+ a second, \d of them on pipeline 0; loss "
        r"[\d.]+ -> [\d.]+",
        last,
    )


def test_it_says_why_a_fault_did_not_happen() -> None:
    lines = list(missed_lines(parse_faults("fail_at(1,7) stop_in(0,8,2) return_at(1,3)")))
    assert lines[0].endswith("fail_at(1,7) never happened: its pipeline did not begin step 7")
    assert "no average of several members under way at step 8" in lines[1]
    assert lines[2].endswith("return_at(1,3) never happened: its pipeline was not started again")
