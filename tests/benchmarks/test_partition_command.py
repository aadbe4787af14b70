"""`python -m benchmarks.partition --instance FILE --json` on files of every kind."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_problem_files import PLACEMENT, PROFILE

from benchmarks.partition import __main__ as partition
from benchmarks.partition import instances as partition_instances
from benchmarks.partition import rows as partition_rows
from benchmarks.partition.best import best_partition

KEYS = {"instance", "objective", "lower_bound", "status", "seconds", "peak_memory_gib"}


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["partition", *arguments])
    status = partition.main()
    return status, *capsys.readouterr()


@pytest.mark.parametrize("form", ["--contiguous", "--free"])
def test_a_placement_instance_prints_one_line(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(PLACEMENT))
    status, out, _ = run(monkeypatch, capsys, "--instance", str(path), form, "--json")
    found: dict[str, Any] = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert set(found) == KEYS
    # Times 2, 3, 4 on two accelerators, each transfer costs 0.5: 2 + 3 against 4, with a cut.
    assert found["status"] == "optimal"
    assert found["objective"] == found["lower_bound"] == pytest.approx(5.5)


def test_a_profile_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(PROFILE)
    limit = ("--time-limit", "0.5")
    status, out, _ = run(monkeypatch, capsys, "--instance", str(path), *limit, "--json")
    found: dict[str, Any] = json.loads(out)
    assert status == 0
    assert set(found) == KEYS
    assert 0 < found["lower_bound"] <= found["objective"] * (1 + 1e-9)


@pytest.mark.parametrize("text", ["", "{}", "{", "nonsense", '{"nodes": [], "edges": []}'])
@pytest.mark.parametrize("name", ["file.json", "file.txt"])
def test_bad_files_are_told_in_a_line(
    text: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_text(text)
    status, out, error = run(monkeypatch, capsys, "--instance", str(path), "--json")
    assert status == 1
    assert out == ""
    assert "Traceback" not in error
    assert error.strip()


def test_random_instances_of_every_family_are_planned() -> None:
    chain = partition_instances.layers(6, "cnn", 2, seed=1)
    for cluster in (
        partition_instances.random_matrix(4, 2, seed=1),
        partition_instances.two_level((1, 1), 2),
    ):
        instance = partition_instances.problem(chain, cluster, 4, True)
        found = best_partition(instance, time_limit_s=0.5, deterministic=True)
        assert found.lower_bound_s <= found.objective_s * (1 + 1e-9)


def test_the_rows_cover_every_bar() -> None:
    names = [case.name for case in partition_rows.matrix_cases()]
    assert len(set(names)) == len(names)
    for devices in ("6 devices", "8 devices", "16 devices", "64 devices"):
        assert any(name.startswith(devices) for name in names)
