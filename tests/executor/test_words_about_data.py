"""What is said of data that a model cannot read or nothing draws, and of what was written."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import star
from executor_plans import scheduled

from executor import train
from executor.__main__ import main
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.tracing.factory import import_factory
from planner.tracing.trace import trace

Run = Callable[..., tuple[int, list[str], list[str]]]
SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, tokens=256, added=0, is_drawn=True):
        super().__init__()
        self.added, self.is_drawn = added, is_drawn
        self.table = nn.Embedding(tokens, 4)
        self.head = nn.Linear(4, 256)

    def forward(self, ids):
        return self.head(self.table(ids + self.added if self.added else ids))

    def example_batch(self, samples):
        draw = torch.randint if self.is_drawn else lambda below, shape: torch.zeros(shape).long()
        return {"ids": draw(8, (samples, 5)), "target": draw(8, (samples, 5))}
"""
NET = "net_for_a_test:Net"


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's own."""
    (tmp_path / "net_for_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net_for_a_test", raising=False)
    return tmp_path


def plan_of(microbatches: int = 2, **arguments: Any) -> Plan:
    job = Job(samples_per_microbatch=2, microbatches=microbatches, model_arguments=arguments)
    graph = trace(NET, job)
    problem = Problem(graph, star(2), job, ModelSource(NET, arguments))
    return scheduled(place(problem, [StageSpec(tuple(graph.layers), ("d0",))]))


@pytest.fixture
def run(net: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call ``main`` without torchrun: its status, and the lines of stdout and of stderr."""

    def run_main(plan: Plan, *options: str) -> tuple[int, list[str], list[str]]:
        plan.save(net / "plan.json")
        words = ["executor", str(net / "plan.json"), "--model", NET, "--no-check", *options]
        monkeypatch.setattr(sys, "argv", words)
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        status = main()
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()

    return run_main


REFUSAL = (
    "table.weight of the model takes 'ids' below 100 only, but --data text has 256 kinds of bytes; "
    "give the model a larger vocabulary or use --data random"
)


def test_a_vocabulary_too_small_for_text_is_refused_in_one_line(run: Run) -> None:
    assert run(plan_of(tokens=100)) == (1, [], [f"error: {REFUSAL}"])
    assert run(plan_of(tokens=100), "--data", "random", "--steps", "1")[0] == 0


@pytest.mark.parametrize(("place", "value"), [((1, 2), 100), ((0, 0), -1)])
def test_an_index_that_the_model_cannot_look_up_names_its_batch(
    net: Path, place: tuple[int, int], value: int
) -> None:
    plan = plan_of(tokens=100)

    def batch(step: int, microbatch: int) -> dict[str, torch.Tensor]:
        found = import_factory(NET)(tokens=100).example_batch(2)
        if (step, microbatch) == (2, 1):
            found["ids"][place] = value
        return found

    words = re.escape(
        f"data: step 2, microbatch 1: ids{list(place)} is {value}, and table.weight of the model "
        "takes 0 to 99; correct the data"
    )
    with pytest.raises(PipeplanError, match=words):
        train(plan, NET, batch, steps=3)


def test_an_index_out_of_range_keeps_its_traceback_and_has_a_hint_on_text(run: Run) -> None:
    status, _, lines = run(plan_of(added=250))
    assert status == 1
    assert "Traceback (most recent call last):" in lines
    assert any(line.startswith("IndexError: ") for line in lines)
    assert lines[-1].startswith("note: --data text has 256 kinds of bytes; ")
    status, _, lines = run(plan_of(added=250), "--data", "random")
    assert status == 1
    assert any(line.startswith("IndexError: ") for line in lines)
    assert not any(line.startswith("note: ") for line in lines)


def warned(lines: Sequence[str]) -> bool:
    found = [line for line in lines if line.startswith("warning: ")]
    assert all(line.startswith("warning: --data random: all 2 microbatches") for line in found)
    return len(found) == 1 and "draw tensors in example_batch" in found[0]


@pytest.mark.parametrize(
    ("arguments", "microbatches", "data", "expected"),
    [
        ({"is_drawn": False}, 2, "random", True),
        ({"is_drawn": False}, 1, "random", False),
        ({"is_drawn": False}, 2, "text", False),
        ({}, 2, "random", False),
    ],
)
def test_random_batches_that_nobody_draws_are_told_once(
    run: Run, arguments: dict[str, Any], microbatches: int, data: str, expected: bool
) -> None:
    plan = plan_of(microbatches=microbatches, **arguments)
    status, _, lines = run(plan, "--data", data, "--steps", "2")
    assert status == 0
    assert warned(lines) == expected


def test_what_is_written_is_told_and_where_a_finished_training_stands(run: Run, net: Path) -> None:
    config, metrics, timeline = net / "train.toml", net / "metrics.jsonl", net / "measured.json"
    config.write_text(
        f'format = "pipeplan-train/1"\n[checkpoint]\nfolder = "{net}/checkpoints"\nevery = 2\n'
    )
    words = ("--config", str(config), "--metrics", str(metrics), "--timeline", str(timeline))
    status, lines, errors = run(plan_of(), *words, "--steps", "3")
    assert (status, [line for line in errors if "memory is" not in line]) == (0, [])
    written = [line.removeprefix("wrote ") for line in lines if line.startswith("wrote ")]
    folders = sorted(str(path) for path in (net / "checkpoints").glob("step*"))
    assert len(folders) == 2
    assert written == [*folders, str(timeline), str(metrics)]
    resume = ("--config", str(config), "--resume", f"{net}/checkpoints", "--steps", "3")
    assert run(plan_of(), *resume) == (
        0,
        [
            f"nothing to do: {folders[-1]} is of step 3 and --steps is 3; to go on, give more "
            "--steps, which count from the very first"
        ],
        [],
    )
