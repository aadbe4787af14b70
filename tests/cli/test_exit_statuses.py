"""The exit statuses that docs/cli_conventions.md tells."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import CLUSTERS, pipeplan

from planner.cli import main

JOB = """
format = "pipeplan-job/1"
microbatches = 2
replication = false
"""
TINY = """
format = "pipeplan-cluster/1"

[[devices]]
name = "d0"
type = "small"

[device_types.small]
memory_gib = 0.002
reserved_gib = 0.0015
memory_bandwidth_gb_per_s = 100
peak_tflop_per_s = { float32 = 1 }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_1_a_problem_without_a_plan(tmp_path: Path, job: Path) -> None:
    (tmp_path / "cluster.toml").write_text(TINY)
    made = pipeplan(
        *("plan", "models.gpt:gpt_tiny", "--cluster", tmp_path / "cluster.toml", "--job", job),
        *("--time-limit", 0.3, "-o", tmp_path / "plan.json"),
    )
    assert made.exit_code == 1
    assert made.stderr.startswith("error: ")
    assert not (tmp_path / "plan.json").exists()


def test_130_an_interrupt_while_modules_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.cli.commands.run", interrupt)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_130_an_interrupt_before_there_is_a_plan(
    as_json: bool, tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt("before any plan")

    monkeypatch.setattr("planner.search.solve.Steps", interrupt)
    made = pipeplan(
        *("plan", "models.gpt:gpt_tiny", "--cluster", CLUSTERS / "single_node.toml"),
        *("--job", job, "-o", tmp_path / "plan.json", *(["--json"] if as_json else [])),
    )
    assert made.exit_code == 130
    assert "interrupted" in made.stderr
    assert not (tmp_path / "plan.json").exists()
    if as_json:
        assert json.loads(made.stdout)["error"] == ["interrupted before any plan"]
