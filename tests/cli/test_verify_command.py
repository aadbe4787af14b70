"""``pipeplan verify --prove``: what it prints, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import pipeplan

from benchmarks.plans.oracle import tiny_problems
from planner import solve


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    plan = solve(next(tiny_problems(1)), time_limit_s=0.3, deterministic=True).plan
    return json.loads(plan.model_dump_json())


@pytest.fixture
def path(planned: dict[str, Any], tmp_path: Path) -> Path:
    return written(planned, tmp_path)


def written(data: dict[str, Any], folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(data))
    return path


def test_what_is_proved_is_printed(path: Path) -> None:
    found = pipeplan("verify", path, "--prove")
    assert found.exit_code == 0
    assert f"{path}: holds" in found.output
    assert f"{path}: proved: no plan with " in found.output


def test_without_prove_nothing_is_said_of_it(path: Path) -> None:
    output = pipeplan("verify", path).output
    assert output.startswith(f"{path}: holds")
    assert "proved" not in output


def test_json_has_the_proof(path: Path, planned: dict[str, Any]) -> None:
    found = pipeplan("verify", path, "--prove", "--json")
    assert found.exit_code == 0
    document = json.loads(found.stdout)
    certificate = planned["proof"]["certificate"]
    assert document["valid"] is True
    assert document["proof"]["proved_s"] == certificate["bound_s"]
    assert document["proof"]["kind"] == certificate["argument"]["kind"]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_forged_bound_is_refused(
    planned: dict[str, Any], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    forged = json.loads(json.dumps(planned))
    forged["proof"]["certificate"]["space"]["recompute"] = True
    path = written(forged, tmp_path)
    found = pipeplan("verify", path, "--prove", *flags)
    assert found.exit_code == 1
    assert "proof.certificate" in found.output
    if flags:
        assert json.loads(found.stdout)["valid"] is False


def test_a_plan_without_a_certificate_is_refused_with_prove_alone(
    planned: dict[str, Any], tmp_path: Path
) -> None:
    path = written({**planned, "proof": None}, tmp_path)
    assert pipeplan("verify", path).exit_code == 0
    found = pipeplan("verify", path, "--prove", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["proof"]["proved_s"] is None
