"""Files are written whole or not at all, and reading one runs nothing of it."""

import os
import sys
from pathlib import Path

import pytest
from builders import GIGA, cluster, graph, layer, orders, parameter, pipeline
from hypothesis import given
from strategies import Scheduled, scheduled

from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.records.document import write_atomically
from planner.simulation.simulator import simulate_plan
from planner.verification import save_valid, verify


def plan_of(factory: str | None = None, layers: int = 1) -> Plan:
    the_graph = graph([layer("a", parameters=["w"])], parameters=[parameter("w", GIGA)])
    placed = pipeline(the_graph, cluster(["d0"], []), [(["a"], ["d0"])], microbatches=1)
    problem = Problem(the_graph, placed.problem.cluster, placed.problem.job, ModelSource(factory))
    return plan_by_hand(place(problem, [StageSpec(("a",), ("d0",))]), orders(d0="0F0 0B0"))


def test_a_file_is_replaced_by_the_new_one_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")
    write_atomically(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"
    write_atomically(str(path), b"bytes")
    assert path.read_bytes() == b"bytes"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("step", ["replace", "chmod", "fdopen"])
def test_a_failed_write_leaves_the_old_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full_disk)
    with pytest.raises(PipeplanError, match=r"plan\.json: cannot be written: No space left"):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_write_that_is_interrupted_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no" / "plan.json"
    with pytest.raises(
        PipeplanError, match=r"no/plan\.json: cannot be written: there is no folder"
    ):
        write_atomically(path, "new")
    with pytest.raises(PipeplanError, match="cannot be written"):
        write_atomically(tmp_path, "new")
    assert os.listdir(tmp_path) == []


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    write_atomically(tmp_path / "ours", "x")
    (tmp_path / "any").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_plan_that_does_not_hold_is_not_written(tmp_path: Path) -> None:
    wrong = plan_of().model_copy(update={"orders": {"d0": "0F0"}})
    with pytest.raises(PipeplanError, match="microbatch 0 of stage 0 has F"):
        save_valid(wrong, tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


def test_reading_verifying_and_simulating_a_plan_never_imports_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "was imported"
    module = tmp_path / "planted_module.py"
    module.write_text(f"open({str(marker)!r}, 'w').close()\ndef factory(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = plan_of("planted_module:factory")
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.model.factory == "planted_module:factory"
    assert verify(read) == []
    assert simulate_plan(read).iteration_time_s > 0
    assert not marker.exists()
    assert "planted_module" not in sys.modules


@given(scheduled())
def test_every_plan_of_a_valid_schedule_holds(case: Scheduled) -> None:
    assert verify(plan_by_hand(case.pipeline, case.orders)) == []


def test_a_link_stays_and_what_it_points_at_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, symbolic = tmp_path / "real" / "file.txt", tmp_path / "link.txt"
    real.write_text("old")
    symbolic.symlink_to(real)
    write_atomically(symbolic, "new")
    assert symbolic.is_symlink()
    assert real.read_text() == "new"
    assert [path.name for path in real.parent.iterdir()] == ["file.txt"]


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(PipeplanError, match="pipe: cannot be written: it is no regular file"):
        write_atomically(pipe, "new")
    assert pipe.is_fifo()
    with pytest.raises(PipeplanError, match="it is a folder"):
        write_atomically(tmp_path, "new")
