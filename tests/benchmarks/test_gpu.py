"""The script for a GPU machine, rehearsed on the CPU in the environment that it finds there."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from builders import ROOT

from benchmarks.gpu.__main__ import Run, _last_error
from benchmarks.gpu.cases import Case, all_cases
from planner.verification import verify

GPU = ROOT / "benchmarks" / "gpu"
TORCH = "torch==2.13.0"
ON_THE_MACHINE = (
    *("transformers==5.17.0", "safetensors==0.8.0"),
    *("numpy", "numba", "networkx", "matplotlib", "rich", "typer"),
)


def environment(folder: Path, python: str, *packages: str) -> Path:
    """A new environment with these packages and what they need; returns its executables."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([folder / "bin" / "python", *pip, *packages], check=True)
    return folder / "bin"


def wheels(version: str, folder: Path) -> Path:
    subprocess.run(["bash", GPU / "wheels.sh", version, folder], check=True)
    return folder


@pytest.mark.extensive
def test_the_whole_list_is_rehearsed_with_what_the_machine_has_and_the_wheels(
    tmp_path: Path,
) -> None:
    programs = environment(tmp_path / "env", sys.executable, TORCH, *ON_THE_MACHINE)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "WHEELS": str(wheels(here, tmp_path / "wheels")),
        "HOME": str(tmp_path),
    }
    # Far more time than it takes, since other tests run beside it.
    words = ["bash", GPU / "run.sh", "18", "--short", "--output", tmp_path / "out"]
    done = subprocess.run(words, env=found, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = all_cases(short=True)
    assert done.stdout.count("\nok") + done.stdout.startswith("ok") == len(cases)
    page = (tmp_path / "out" / "GPU.md").read_text()
    assert all(f"| {case.key} | ok |" in page for case in cases)


def python_312() -> str | None:
    """Python 3.12, on the PATH or among those of pyenv."""
    found = [shutil.which("python3.12"), *Path.home().glob(".pyenv/versions/3.12.*/bin/python")]
    for path in filter(None, map(str, filter(None, found))):
        told = subprocess.run([path, "--version"], capture_output=True, text=True)
        if told.returncode == 0 and told.stdout.startswith("Python 3.12"):
            return path
    return None


def outside_imports() -> set[str]:
    """What the modules of the checkout import of other packages as they are loaded, but torch."""
    names: set[str] = set()
    for path in [
        p for top in ("planner", "executor", "models") for p in (ROOT / top).rglob("*.py")
    ]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    ours = (*sys.stdlib_module_names, "planner", "executor", "models", "torch", "__future__")
    outside = {name for name in names if name.split(".")[0] not in ours}
    return {name for name in outside if "torch" not in name.split(".")}


@pytest.mark.extensive
def test_all_imports_but_torch_work_with_the_wheels_of_python_312(tmp_path: Path) -> None:
    python = python_312()
    if python is None:
        pytest.skip("there is no Python 3.12 here")
    site = wheels("3.12", tmp_path / "wheels")
    travels = sum(path.stat().st_size for path in site.iterdir())
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    travels += sum((ROOT / name).stat().st_size for name in tracked.split("\0") if name)
    assert travels < 64 * 2**20
    programs = environment(tmp_path / "env", python, *ON_THE_MACHINE, "numpy==2.5.2")
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([programs / "python", *install, tmp_path / "site", *site.iterdir()], check=True)
    # The search imports its solver when it begins.
    solver = "ortools.sat.python.cp_model"
    modules = [*sorted(outside_imports()), solver, "planner.search.solve", "planner.assembly"]
    assert {"pydantic", "numpy", "networkx"} <= set(modules)
    code = f"import importlib\nfor name in {modules!r}:\n    importlib.import_module(name)"
    path = os.pathsep.join((str(ROOT), str(tmp_path / "site")))
    words = [programs / "python", "-c", code]
    done = subprocess.run(words, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_case_that_hangs_loses_itself_alone_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = Run(all_cases(short=True)[:1], tmp_path / "out", short=True, seconds=600)
    slow = next(case for case in all_cases(short=True) if case.ranks == 2)
    # Too short for imports to end: the ranks of torchrun are running.
    assert run.figures(slow, limit_s=4.0) == {"error": "hung: nothing was said"}
    time.sleep(0.2)  # Killed processes leave the table a moment later.
    assert [p for p in Path("/proc").glob("[0-9]*/cmdline") if has(p, str(tmp_path))] == []


def has(path: Path, word: str) -> bool:
    try:
        return word.encode() in path.read_bytes()
    except OSError:
        return False


def test_the_journal_keeps_each_case_and_the_same_command_tries_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = all_cases(short=True)[0].shape
    bar = {"error_of_loss": 0.1}
    cases = [Case(f"models: {name}", "model", shape, bar) for name in ("good", "off", "crashed")]
    answers = {
        "models: good": {"error_of_loss": 0.01},
        "models: off": {"error_of_loss": float("nan")},
        "models: crashed": {"error": "status 1: ValueError: no | such"},
    }
    tried: list[str] = []

    def figures(self: Run, case: Case, limit_s: float) -> dict[str, object]:
        tried.append(case.key)
        return answers[case.key]

    monkeypatch.setattr(Run, "figures", figures)
    first = Run(cases, tmp_path, short=True, seconds=60)
    first.all()
    assert sorted(tried) == sorted(answers)
    assert [case.key for case in first.left()] == ["models: off", "models: crashed"]
    page = first.page.read_text()
    assert "| models: good | ok | took_s" in page
    assert "| models: off | error_of_loss nan is above 0.1 |" in page
    assert r"| models: crashed | status 1: ValueError: no \| such |" in page
    with first.journal.open("a") as file:
        file.write('{"case": "models: off", "kin')  # What a kill may leave.
    tried.clear()
    answers["models: off"] = answers["models: good"]
    Run(cases, tmp_path, short=True, seconds=60).all()
    assert sorted(tried) == ["models: crashed", "models: off"]
    assert "FAILED" in capsys.readouterr().out
    tried.clear()
    Run(cases, tmp_path, short=True, seconds=0).all()
    assert tried == []


def test_the_error_told_is_that_of_the_rank_that_failed_first() -> None:
    text = "[rank1]: ValueError: no such thing\n[rank0]: [rank0]: x.FollowedError: rank 1 failed\n"
    assert _last_error(text) == "ValueError: no such thing"


@pytest.mark.parametrize("short", [True, False])
def test_every_case_has_a_name_of_its_own_and_at_most_four_ranks(short: bool) -> None:
    cases = all_cases(short=short)
    assert len({case.key for case in cases}) == len(cases)
    assert {case.ranks for case in cases} <= {1, 2, 4}
    order = [case.key.split(":")[0] for case in cases]
    assert list(dict.fromkeys(order)) == [
        *("models", "parity", "strategies", "prediction", "overhead"),
    ]


@pytest.mark.extensive
def test_plans_of_the_cases_hold() -> None:
    for case in all_cases(short=True):
        if case.key.startswith("parity"):
            assert verify(case.shape.plan()) == [], case.key
