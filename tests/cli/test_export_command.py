"""``pipeplan export``."""

import json
import subprocess
import textwrap
from pathlib import Path

import pytest
from commands import pipeplan
from transformers_by_hand import machines, transformer

from planner import Plan, adopt, export_plan
from planner.interop.exported import TARGETS, Exported
from planner.job import Job
from planner.plan.problem import Problem


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
    for line in exported.use_in(folder):
        assert line in done.output
    assert f'folder = "{folder}"' in done.output
    assert "FOLDER" not in done.output
    for note in exported.notes:
        assert f"note: {note}" in done.output


def test_json_has_all_that_is_printed(plan_path: Path, tmp_path: Path) -> None:
    done = export(plan_path, tmp_path / "out", "--json")
    exported = export_plan(Plan.load(plan_path), "torch-csv")
    assert json.loads(done.output) == {
        "to": "torch-csv",
        "files": [str(tmp_path / "out" / name) for name in exported.files],
        "use": list(exported.use_in(tmp_path / "out")),
        "notes": list(exported.notes),
    }


def test_each_tool_has_a_folder_of_its_own_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = Problem(transformer(4), machines(2), Job(microbatches=4, optimizer="sgd"))
    adopt(problem, "Ett|ttL").save(tmp_path / "plan.json")
    for tool in TARGETS:
        done = pipeplan("export", "plan.json", "--to", tool)
        assert done.exit_code == 0, done.output
    found = {path.parent.name for path in (tmp_path / "export").glob("*/*")}
    assert found == set(TARGETS)


HARD = "a 'folder' of \"mine\" \\ $HOME é"
"""A name that neither Python nor a shell takes as it is."""


def test_paths_in_lines_of_python_are_those_of_the_folder(tmp_path: Path) -> None:
    exported = Exported({}, ('  folder = "FOLDER"', "  path = folder + '/plan.csv'"), ())
    told: dict[str, str] = {}
    lines = exported.use_in(tmp_path / HARD)
    exec(textwrap.dedent("\n".join(lines)), told)  # noqa: S102 - our own text
    assert told["path"] == str(tmp_path / HARD / "plan.csv")


def test_paths_in_lines_of_a_shell_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / HARD
    folder.mkdir()
    (folder / "megatron.sh").write_text("printf sourced")
    (line,) = Exported({}, ("source FOLDER/megatron.sh",), ()).use_in(folder)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "sourced"


def test_a_folder_that_is_given_from_here_is_told_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = Exported({}, ("of FOLDER/stages.json",), ()).use_in(Path("here"))
    assert line == f"of {tmp_path}/here/stages.json"


def test_an_export_can_be_repeated(plan_path: Path, tmp_path: Path) -> None:
    assert export(plan_path, tmp_path).exit_code == 0
    assert export(plan_path, tmp_path).exit_code == 0


def test_other_contents_are_replaced_only_if_told(plan_path: Path, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text("mine")
    refused = export(plan_path, tmp_path)
    assert refused.exit_code == 1
    assert "stages.json: exists with different contents" in refused.output
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
        assert "cannot create the folder: File exists; give another" in refused.output
    assert refused.exit_code == 1


def test_an_unknown_target_is_refused_with_those_there_are(plan_path: Path, tmp_path: Path) -> None:
    refused = export(plan_path, tmp_path / "out", to="fairscale")
    assert refused.exit_code == 1
    assert "--to fairscale: no such target; choose from torch-csv, torchtitan" in refused.output
    assert not (tmp_path / "out").exists()
