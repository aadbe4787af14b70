"""A file of each kind is read, and what it says holds; other formats are refused by name."""

import json
import logging
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from builders import ROOT
from changed_files import LOADERS

from planner import Plan, load_plan, simulate, verify
from planner.errors import PipeplanError
from planner.interop import exported as stage_table
from planner.plan.plan import COST_MODEL
from planner.plan.sweep_index import SweepIndex
from planner.records.formats import KINDS, MADE_BY, WRITTEN_ONLY, check_format

FOLDER = Path(__file__).resolve().parents[1] / "data" / "formats"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".md")
PLANS = [path for path in FILES if path.name.startswith("plan-")]
READERS = {"plan": load_plan, **LOADERS}


def plain(path: Path) -> dict[str, Any]:
    text = path.read_text()
    return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)


def kind(path: Path) -> str:
    return re.match(r"([a-z-]+)-\d", path.name)[1]


def ids(path: Path) -> str:
    return path.name


def test_there_is_a_file_of_every_kind() -> None:
    assert {plain(path)["format"] for path in FILES} == set(KINDS)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_the_present_file_of_each_kind_is_read_without_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="planner"):
        READERS[kind(path)](path)
    assert caplog.text == ""


def refusal(found: object, expected: str) -> str:
    with pytest.raises(PipeplanError) as error:
        check_format({"format": found}, expected, "a file")
    return str(error.value)


@pytest.mark.parametrize("present", KINDS)
def test_other_numbers_and_kinds_are_refused_by_name(present: str) -> None:
    name, _, number = present.rpartition("/")
    newer = f"{name}/{int(number) + 1}"
    assert refusal(newer, present) == (
        f"a file: format: {newer!r} is newer than {present!r}, which this version of Pipeplan "
        "reads; upgrade Pipeplan"
    )
    assert refusal("pipeplan-recipe/1", present) == (
        f"a file: format: expected {present!r}, found 'pipeplan-recipe/1'; this is something "
        f"else, give {KINDS[present]}"
    )
    assert refusal(f"{name}/one", present) == (
        f"a file: format: expected {present!r}, found '{name}/one'; correct the number"
    )
    for older in (f"{name}/{earlier}" for earlier in range(1, int(number))):
        assert refusal(older, present) == (
            f"a file: format: {older!r} is of an earlier development version, which this version "
            f"does not read; make the file anew with `{MADE_BY[present]}`"
        )


def test_a_plan_whose_layer_graph_has_an_earlier_format_is_refused() -> None:
    data = plain(PLANS[0])
    data["model"]["graph"]["format"] = "pipeplan-graph/1"
    with pytest.raises(PipeplanError, match=r"model\.graph\.format: .*'pipeplan-graph/1'"):
        Plan.parse(data)


@pytest.mark.parametrize("path", PLANS, ids=ids)
def test_the_cost_model_predicts_what_it_did_when_its_revision_began(path: Path) -> None:
    """If this fails on purpose: raise COST_MODEL, and make these plans again."""
    plan = Plan.parse(plain(path))
    assert plain(path)["provenance"]["cost_model"] == COST_MODEL
    assert verify(plan) == []
    assert simulate(plan).iteration_time_s == pytest.approx(
        plain(path)["predicted"]["iteration_time_s"], rel=1e-9
    )


def test_a_plan_of_another_revision_of_the_cost_model_is_predicted_anew(tmp_path: Path) -> None:
    data = plain(PLANS[0])
    expected = data["predicted"]["iteration_time_s"]
    data["provenance"]["cost_model"] = COST_MODEL + 1
    data["predicted"]["iteration_time_s"] = 2 * expected
    data["predicted"]["lower_bound_s"] = 1.5 * expected
    data["provenance"]["bound_covers"] = {"space": Plan.parse(data).job.space.model_dump()}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    as_it_is = verify(Plan.load(path))
    assert any(problem.startswith("provenance.cost_model: ") for problem in as_it_is)
    plan = load_plan(path)
    assert plan.predicted.iteration_time_s == pytest.approx(expected, rel=1e-9)
    assert plan.predicted.lower_bound_s == 0.0
    assert plan.provenance.cost_model == COST_MODEL
    assert verify(plan) == []


def test_a_plan_of_another_revision_that_cannot_be_replayed_is_read_and_does_not_hold(
    tmp_path: Path,
) -> None:
    data, path = plain(PLANS[0]), tmp_path / "plan.json"
    data["provenance"]["cost_model"] = COST_MODEL + 1
    data["stages"][0]["layers"] = data["stages"][0]["layers"][1:]
    path.write_text(json.dumps(data))
    problems = verify(load_plan(path))
    assert any("in no stage" in problem or "layers" in problem for problem in problems)


def test_points_of_another_revision_do_not_stand_beside_new_ones() -> None:
    now = SweepIndex.load(FOLDER / "sweep-7.json").inputs
    other = SweepIndex(inputs={**now, "cost_model": COST_MODEL - 1})
    assert list(other.differences({**now, "cost_model": COST_MODEL})) == [
        f"cost_model: {COST_MODEL - 1} there, {COST_MODEL} now"
    ]


@pytest.mark.parametrize("number", [1, 2])
def test_files_that_are_written_only_are_named_as_that(number: int) -> None:
    found = stage_table.FORMAT.replace("1", str(number))
    assert list(WRITTEN_ONLY) == [stage_table.FORMAT]
    assert "this is the stages of an export, give a plan" in refusal(found, "pipeplan/8")


def test_the_page_lists_every_format_there_is() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert re.findall(r"^\| [^|]+ \| `([^`]+)`", page, re.MULTILINE) == [*KINDS, *WRITTEN_ONLY]
