"""The packages are quiet: imports print and load little, and what they log has their names."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import executor
import planner
from executor.launch.console import show_log
from planner import load_plan

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def other_plan(tmp_path: Path) -> Path:
    """A plan that names another revision of the cost model, so that it is predicted again."""
    data = json.loads((ROOT / "tests" / "data" / "formats" / "plan-8-whole.json").read_text())
    data["provenance"]["cost_model"] -= 1
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    return path


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )


def test_importing_prints_nothing_and_loads_neither_torch_nor_a_solver() -> None:
    heavy = ("torch", "ortools", "matplotlib", "rich", "typer")
    code = (
        "import sys, planner, executor\n"
        f"found = [name for name in {heavy} if name in sys.modules]\n"
        "assert not found, found"
    )
    made = run(code)
    assert (made.stdout, made.stderr) == ("", "")


@pytest.mark.parametrize("package", [planner, executor])
def test_a_package_logs_to_nobody_until_someone_listens(package: object) -> None:
    logger = logging.getLogger(package.__name__)  # type: ignore[attr-defined]
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)


@pytest.fixture
def own_loggers() -> object:
    """Loggers of the packages as they were, after a test."""
    loggers = [logging.getLogger(name) for name in ("planner", "executor")]
    before = [(row.level, list(row.handlers)) for row in loggers]
    yield
    for row, (level, handlers) in zip(loggers, before, strict=True):
        row.setLevel(level)
        row.handlers[:] = handlers


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_says_what_all_of_them_find(
    rank: int, own_loggers: object, other_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_log(rank)
    load_plan(other_plan)
    logging.getLogger("executor.test").info("a step")
    logging.getLogger("executor.test").warning("a loss")
    told = capsys.readouterr()
    assert told.out == "a step\n"
    assert "warning: a loss\n" in told.err
    assert ("predicted again" in told.err) == (rank == 0)
