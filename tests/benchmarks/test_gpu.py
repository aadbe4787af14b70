"""The script for a GPU machine, rehearsed on the CPU in the environment that it finds there."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builders import ROOT

from benchmarks.gpu.cases import all_cases
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


@pytest.mark.extensive
def test_plans_of_the_cases_hold() -> None:
    for case in all_cases(short=True):
        if case.key.startswith("parity"):
            assert verify(case.shape.plan()) == [], case.key
