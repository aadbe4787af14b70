"""The metrics file: one line a step, kept by a training that goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from executor.training.loop import StepMetrics, StepReport
from planner.errors import PipeplanError


def metrics(step: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(step, loss, 0.1, 0.1, 0.0, 0)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def report(path: Path, *numbers: int, resumes: bool = False) -> None:
    told = StepReport(path, resumes=resumes)
    for number in numbers:
        told(metrics(number))


def test_a_new_training_begins_the_file_anew(tmp_path: Path) -> None:
    report(tmp_path / "m.jsonl", 1, 2, 3)
    report(tmp_path / "m.jsonl", 1, 2)
    assert steps(tmp_path / "m.jsonl") == [1, 2]


def test_a_training_that_goes_on_keeps_the_steps_before(tmp_path: Path) -> None:
    report(tmp_path / "m.jsonl", 1, 2, 3, 4)
    report(tmp_path / "m.jsonl", 3, 4, 5, resumes=True)
    assert steps(tmp_path / "m.jsonl") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("resumes", [False, True])
def test_without_a_step_the_file_stays(tmp_path: Path, resumes: bool) -> None:
    report(tmp_path / "m.jsonl", 1, 2)
    report(tmp_path / "m.jsonl", resumes=resumes)
    assert steps(tmp_path / "m.jsonl") == [1, 2]


def test_another_file_is_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(PipeplanError, match=r"notes.txt: not the metrics of a training"):
        StepReport(tmp_path / "notes.txt", resumes=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    told = StepReport(tmp_path / "m.jsonl", resumes=False)
    told(metrics(1, math.nan))
    told(metrics(2, math.inf))
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [None, None]
