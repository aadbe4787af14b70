"""``pipeplan export``."""

import json
from pathlib import Path

import pytest
from commands import pipeplan

from planner import Plan, export_plan


def files_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def export(plan: Path, folder: Path, *more: object, to: str = "torch-csv") -> object:
    return pipeplan("export", plan, "--to", to, "-o", folder, *more)


def test_the_command_writes_what_python_hands_out(plan_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    done = export(plan_path, folder)
    assert done.exit_code == 0, done.output
    exported = export_plan(Plan.load(plan_path), "torch-csv")
    assert files_in(folder) == exported.files
    for line in exported.use:
        assert line in done.output
    for note in exported.notes:
        assert f"note: {note}" in done.output


def test_json_has_all_that_is_printed(plan_path: Path, tmp_path: Path) -> None:
    done = export(plan_path, tmp_path / "out", "--json")
    exported = export_plan(Plan.load(plan_path), "torch-csv")
    assert json.loads(done.output) == {
        "to": "torch-csv",
        "files": [str(tmp_path / "out" / name) for name in exported.files],
        "use": list(exported.use),
        "notes": list(exported.notes),
    }


def test_an_export_can_be_repeated(plan_path: Path, tmp_path: Path) -> None:
    assert export(plan_path, tmp_path).exit_code == 0
    assert export(plan_path, tmp_path).exit_code == 0


def test_other_contents_are_replaced_only_if_told(plan_path: Path, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text("mine")
    refused = export(plan_path, tmp_path)
    assert refused.exit_code == 1
    assert "stages.json: is there already, with other contents" in refused.output
    assert files_in(tmp_path) == {"stages.json": "mine"}
    assert export(plan_path, tmp_path, "--overwrite").exit_code == 0
    assert files_in(tmp_path).keys() == {"schedule.csv", "stages.json"}
    assert files_in(tmp_path)["stages.json"] != "mine"


def test_a_refused_plan_leaves_no_folder(plan_data: dict, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan_data["ranks"] = []
    plan.write_text(json.dumps(plan_data))
    refused = export(plan, tmp_path / "out")
    assert refused.exit_code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["a file", "folder/schedule.csv/"])
def test_what_cannot_be_written_is_said(plan_path: Path, tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    if file.endswith("/"):
        path.mkdir(parents=True)
        refused = export(plan_path, path.parent)
        assert "it is a folder; give the path of a file" in refused.output
    else:
        path.write_text("")
        refused = export(plan_path, path)
        assert "cannot be made a folder: File exists; give another" in refused.output
    assert refused.exit_code == 1


def test_an_unknown_target_is_refused_with_those_there_are(plan_path: Path, tmp_path: Path) -> None:
    refused = export(plan_path, tmp_path / "out", to="fairscale")
    assert refused.exit_code == 1
    assert "--to fairscale: no such target; choose from torch-csv, torchtitan" in refused.output
    assert not (tmp_path / "out").exists()
