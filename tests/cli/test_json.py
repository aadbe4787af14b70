"""Under ``--json`` stdout holds exactly one JSON document, whatever becomes of the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import CLUSTERS, pipeplan
from link_files import topology
from measured_runs import run_of

from planner import Plan, simulate
from planner.cli.commands import app
from planner.interop.exported import Exported

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
NOISY = """
import torch

print("a model may print what it likes")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x))

    def example_batch(self, samples):
        return {"x": torch.zeros(samples, 4), "target": torch.zeros(samples, 4)}


def build():
    print("so may its factory")
    return Net()
"""
JOB = 'format = "pipeplan-job/1"\nmicrobatches = 2\nloss = "mse"\n'


@pytest.fixture
def folder(tmp_path: Path, plan_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files lie that the commands below are given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    # Whether a tool can run the plan is not the question here.
    taken = Exported(files={"plan.csv": "0F0\n"}, use=("run it",), notes=())
    monkeypatch.setattr("planner.interop.exported.export_plan", lambda plan, target: taken)
    (tmp_path / "noisy_net.py").write_text(NOISY)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "topo.txt").write_text(topology(["X PIX", "PIX X"]))
    (tmp_path / "cluster.toml").write_text((CLUSTERS / "single_node.toml").read_text())
    (tmp_path / "stages.json").write_text('[["first"], ["second"]]')
    (tmp_path / "plan.json").write_text(plan_path.read_text())
    plan = Plan.load(plan_path)
    run_of(plan, [simulate(plan)] * 3).save(tmp_path / "run.json")
    return tmp_path


OF_A_MODEL = ("noisy_net:build", "--job", "job.toml", "--cluster", "cluster.toml")
LINES: dict[str, tuple[str, ...]] = {
    "trace": ("noisy_net:build", "--job", "job.toml"),
    "plan": (*OF_A_MODEL, "--time-limit", "0.2", "-o", "made.json"),
    "compare": (*OF_A_MODEL, "--time-limit", "0.2", "--planners", "even"),
    "sweep": (*OF_A_MODEL, "--time-limit", "0.2", "--devices", "1", "-o", "points"),
    "verify": ("plan.json",),
    "simulate": ("plan.json", "--trace", "trace.json"),
    "explain": ("plan.json",),
    "report": ("plan.json", "-o", "plan.html"),
    "export": ("plan.json", "--to", "torch-csv", "-o", "out"),
    "adopt": (*OF_A_MODEL, "--stages", "stages.json", "-o", "made.json"),
    "replan": ("plan.json", "--slow", "big/gpu0:1.5", "--time-limit", "0.2", "-o", "made.json"),
    "import": ("topo.txt", "--device-type", "T4", "-o", "imported.toml"),
}
MORE: dict[str, tuple[str, ...]] = {
    "plan of stages": ("plan", "plan.json", "--time-limit", "0.2", "-o", "made.json"),
    "calibration": ("profile", "plan.json", "run.json", "-o", "made.json"),
    "moves": ("explain", "plan.json", "--apply", "reschedule all stages", "-o", "made.json"),
    "picture": ("report", "plan.json", "-o", "plan.svg"),
    "merged": (
        *("import", "cluster.toml", "cluster.toml", "--prefix", "a", "--prefix", "b"),
        *("--card", "n0", "--network", "25gbit", "-o", "merged.toml"),
    ),
}
"""What some commands do besides."""
OF_THE_EXECUTOR = {"detect", "profile"}
"""Run in processes of their own; tests/executor has their documents."""


def document(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = pipeplan(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_every_command_has_a_line_here() -> None:
    assert set(COMMANDS) == set(LINES) | OF_THE_EXECUTOR


EVERY = {**{name: (name, *words) for name, words in LINES.items()}, **MORE}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_command_prints_one_json_document(name: str, folder: Path) -> None:
    status, found = document(*EVERY[name])
    assert "error" not in found
    assert status == 0


@pytest.mark.parametrize("name", ["compare", "export", "import", "simulate"])
def test_nothing_printed_through_a_pipe_is_an_escape_code(name: str, folder: Path) -> None:
    """Tables, progress, help and refusals are plain text where no terminal shows them."""
    printed = [pipeplan(name, *words) for words in (["--help"], ["--no-such-option"], LINES[name])]
    assert printed[-1].exit_code == 0
    assert not any("\x1b" in result.output for result in printed)


@pytest.mark.parametrize("name", sorted(EVERY))
def test_what_is_wrong_is_a_document_too(name: str, folder: Path) -> None:
    words = [word.replace("plan.json", "nothing.json") for word in EVERY[name]]
    words = [word.replace("job.toml", "nothing.toml") for word in words]
    words = [word.replace("topo.txt", "nothing.txt") for word in words]
    words = [word.replace("cluster.toml", "nothing.toml") for word in words]
    result = pipeplan(*words, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    told = found["problems"] if name == "verify" else found["error"]
    assert any("nothing" in line and "no such file" in line for line in told)
    if name != "verify":
        assert "error: " in result.stderr


def test_the_files_that_were_written_are_named(folder: Path) -> None:
    for name in ("picture", "report"):
        _, found = document(*EVERY[name])
        assert all(Path(path).is_file() for path in found["written"])


def test_an_interrupt_is_a_document_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.analysis.explain.explain", interrupt)
    assert document("explain", "plan.json") == (130, {"error": ["interrupted"]})


def test_usage_that_cannot_be_read_leaves_stdout_empty(folder: Path) -> None:
    result = pipeplan("verify", "--no-such-option", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--no-such-option" in result.stderr
