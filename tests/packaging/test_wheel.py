"""The wheel is whole: it plans, reports, trains and profiles outside of a checkout."""

import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from installed import ROOT, Installed

pytestmark = pytest.mark.extensive

TYPED = """
from planner import Cluster, Job, ModelSource, PipeplanError, Plan, Problem, Result, solve, trace
from planner import simulate, verify


def made(model: str, job_path: str) -> Plan:
    job = Job.load(job_path)
    problem = Problem(trace(model, job), Cluster.load("cluster.toml"), job, ModelSource(model))
    result: Result = solve(problem, time_limit_s=1.0)
    return result.plan


def seconds(plan: Plan) -> float:
    problems: list[str] = verify(plan)
    if problems:
        raise PipeplanError(problems)
    return simulate(plan).iteration_time_s
"""


@pytest.fixture(scope="module")
def plan(installed: Installed) -> Path:
    made = installed.pipeplan(
        *("plan", "my_net:build", "--cluster", "cluster.toml", "--job", "job.toml"),
        *("--time-limit", 1, "--deterministic", "-o", "plan.json"),
    )
    assert made.returncode == 0, made.stderr
    assert "-m executor plan.json --model my_net:build" in made.stdout
    return installed.folder / "plan.json"


def test_the_wheel_holds_both_packages_and_nothing_of_the_checkout(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"planner", "executor"}
    assert {"planner/py.typed", "executor/py.typed"} <= names
    files = {
        path.relative_to(ROOT).as_posix()
        for package in ("planner", "executor")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "planner/cluster/presets.toml" in files
    assert files <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_holds_what_a_wheel_is_made_of(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "planner/py.typed"} <= names


def test_the_metadata_is_complete(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "pipeplan"
    assert re.fullmatch(r"\d+\.\d+\.\d+", metadata["Version"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert {"hf", "ray", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert (installed.folder.parent / "venv" / "bin" / "pipeplan").is_file()
    said = installed.pipeplan("--version")
    assert said.stdout == f"pipeplan {metadata['Version']}\n"


def test_what_is_imported_is_what_was_installed(installed: Installed) -> None:
    code = "import planner, executor; print(planner.__file__); print(executor.__file__)"
    said = installed.run("-c", code)
    assert said.stderr == ""
    for line in said.stdout.splitlines():
        assert Path(line).is_relative_to(installed.folder.parent / "venv")


def test_the_zoo_is_said_to_be_in_the_repository(installed: Installed) -> None:
    said = installed.pipeplan(
        *("plan", "models.gpt:gpt_tiny", "--cluster", "cluster.toml", "-o", "zoo.json")
    )
    assert said.returncode == 1
    assert "the zoo of models is in Pipeplan's repository and is not installed" in said.stderr
    assert "name a module:factory of your own" in said.stderr


def test_a_users_script_is_strictly_typed(installed: Installed) -> None:
    (installed.folder / "typed.py").write_text(TYPED)
    checked = installed.run(
        *("-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache" / "of_the_wheel"),
        *("typed.py",),
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (installed.folder / "wrong.py").write_text(TYPED + "\nseconds('plan.json')\n")
    wrong = installed.run(
        *("-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache" / "of_the_wheel"),
        *("wrong.py",),
    )
    assert 'incompatible type "str"; expected "Plan"' in wrong.stdout
