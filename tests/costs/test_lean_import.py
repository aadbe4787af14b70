"""Whoever only reads plans does not pay for torch or a solver."""

import json
import subprocess
import sys

import pytest
from builders import ROOT

HEAVY = {"torch", "ortools", "matplotlib", "typer", "rich"}


def modules_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    show = "import json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    command = [sys.executable, "-c", f"{code}\n{show}"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


@pytest.mark.extensive
def test_reading_files_and_verifying_plans_is_light() -> None:
    code = (
        "from planner import Cluster, Job, LayerGraph, Plan, Problem, simulate, verify\n"
        "Cluster.load('examples/clusters/irregular.toml')"
    )
    assert modules_after(code) & HEAVY == set()


def test_the_command_line_imports_the_solver_only_to_solve() -> None:
    assert modules_after("import planner.cli") & {"torch", "ortools", "matplotlib"} == set()


def test_the_solver_needs_no_torch() -> None:
    assert modules_after("from planner import solve") & {"torch", "matplotlib"} == set()


def test_every_public_name_can_be_imported() -> None:
    import planner

    for name in planner.__all__:
        assert getattr(planner, name).__name__
        assert name in dir(planner)
    with pytest.raises(AttributeError, match="no_such_name"):
        planner.no_such_name  # noqa: B018
