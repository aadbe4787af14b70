"""Files of every format that was ever written are read, and what they say holds."""

import json
import logging
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from builders import ROOT
from hypothesis import given
from hypothesis import strategies as st

from executor.checkpoint.manifest import Manifest
from executor.launch.config import TrainingConfig
from planner import Plan, load_plan, simulate, verify
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.interop.export import exported as stage_table
from planner.job import Job
from planner.measured.sync_trace import SyncTrace
from planner.measured.timeline import MeasuredTimeline
from planner.model.layer_graph import LayerGraph
from planner.model.measured_costs import Costs
from planner.plan.moves import Moves
from planner.plan.plan import COST_MODEL
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.sweep_index import SweepIndex
from planner.records.document import read_json
from planner.records.formats import KINDS, STEPS, WRITTEN_ONLY, check_format, migrate, newest_format
from planner.space import BoundCovers

FOLDER = Path(__file__).resolve().parents[1] / "data" / "formats"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".md")
OLD_PLANS = [path for path in FILES if path.name.startswith("plan-1-")]
SECOND_PLANS = [path for path in FILES if path.name.startswith("plan-2-")]
NEW_PLANS = [path for path in FILES if path.name.startswith("plan-8-")]
WHOLE_CHAIN = (
    "every plan that cuts the chain of layers, with up to 1 stage a device, whole backwards and "
    "any layers recomputed"
)
READERS = {
    "plan": load_plan,
    "graph": LayerGraph.load,
    "cluster": Cluster.load,
    "job": Job.load,
    "runtime": RuntimeRules.load,
    "train": TrainingConfig.load,
    "checkpoint": lambda path: Manifest.parse(read_json(path), str(path)),
    "timeline": MeasuredTimeline.load,
    "costs": Costs.load,
    "sync-trace": SyncTrace.load,
    "sweep": SweepIndex.load,
    "moves": Moves.load,
}


def plain(path: Path) -> dict[str, Any]:
    text = path.read_text()
    return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)


def kind(path: Path) -> str:
    return re.match(r"([a-z-]+)-\d", path.name)[1]


def ids(path: Path) -> str:
    return path.name


def test_there_is_a_file_of_every_format_that_was_written() -> None:
    there = {plain(path)["format"] for path in FILES}
    assert there == {*KINDS, *STEPS}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_every_file_that_was_written_is_read(path: Path) -> None:
    READERS[kind(path)](path)


@pytest.mark.parametrize("path", OLD_PLANS, ids=ids)
def test_an_old_plan_holds_and_its_predictions_are_those_of_a_simulation(path: Path) -> None:
    plan = load_plan(path)
    assert verify(plan) == []
    timeline = simulate(plan)
    assert plan.predicted.iteration_time_s == timeline.iteration_time_s
    assert {name: row.peak_memory_bytes for name, row in plan.predicted.devices.items()} == dict(
        timeline.peak_memory_bytes
    )


@pytest.mark.parametrize("path", OLD_PLANS, ids=ids)
def test_an_old_plan_keeps_what_it_runs_and_loses_its_bound(path: Path) -> None:
    before, plan = plain(path), load_plan(path)
    assert before["predicted"]["lower_bound_s"] > 0
    assert (plan.predicted.lower_bound_s, plan.predicted.gap) == (0.0, None)
    assert str(plan.provenance.bound_covers).startswith("nothing: ")
    assert plan.orders == before["orders"]
    assert [list(stage.layers) for stage in plan.stages] == [
        row["layers"] for row in before["stages"]
    ]
    assert [list(stage.devices) for stage in plan.stages] == [
        row["devices"] for row in before["stages"]
    ]


@pytest.mark.parametrize("path", SECOND_PLANS, ids=ids)
def test_a_plan_of_the_second_format_keeps_its_bound_and_its_time_provenance(path: Path) -> None:
    data = plain(path)
    bound_s = data["predicted"]["lower_bound_s"] = data["predicted"]["iteration_time_s"] / 2
    data["predicted"]["gap"] = 1.0
    data["provenance"]["bound_covers"] = WHOLE_CHAIN
    plan = Plan.parse(data)
    covers = plan.provenance.bound_covers
    if "I" in str(data["orders"]):
        assert (plan.predicted.lower_bound_s, plan.job.backward) == (0.0, "any")
        assert covers.reason == "its bound was proved for whole backwards only"
    else:
        assert (plan.predicted.lower_bound_s, plan.job.backward) == (bound_s, "whole")
        assert covers == BoundCovers(space=plan.job.space)
    assert plan.predicted.time_provenance is not None
    assert plan.predicted.time_provenance.model_dump() == data["predicted"]["rests_on"]
    assert verify(Plan.load(path)) == []


def test_rows_of_an_old_sync_trace_keep_their_pipeline_ranks() -> None:
    path = FOLDER / "sync-trace-1.json"
    before = [[row["key"] for row in rows] for rows in plain(path)["workers"]]
    found = SyncTrace.load(path).workers
    assert [[row.pipeline_rank for row in rows] for rows in found] == before


def test_what_was_read_from_an_older_format_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    path = FOLDER / "plan-1-a9cf8ad.json"
    with caplog.at_level(logging.INFO, logger="planner"):
        load_plan(path)
    assert {record.name for record in caplog.records} == {
        "planner.records.formats",
        "planner.prediction",
    }
    assert f"{path}: read from pipeplan/1 as pipeplan/2" in caplog.text
    assert "predicted again" in caplog.text


def test_a_plan_of_the_newest_format_is_read_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="planner"):
        load_plan(NEW_PLANS[0])
    assert caplog.text == ""


def test_a_migrated_plan_is_read_as_it_was_saved(tmp_path: Path) -> None:
    plan = load_plan(OLD_PLANS[0])
    plan.save(tmp_path / "plan.json")
    assert plain(tmp_path / "plan.json")["format"] == "pipeplan/8"
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("path", NEW_PLANS, ids=ids)
def test_the_cost_model_predicts_what_it_did_when_its_revision_began(path: Path) -> None:
    """If this fails on purpose: raise COST_MODEL, and make these plans again."""
    plan = Plan.parse(plain(path))
    assert plain(path)["provenance"]["cost_model"] == COST_MODEL
    assert verify(plan) == []
    assert simulate(plan).iteration_time_s == pytest.approx(
        plain(path)["predicted"]["iteration_time_s"], rel=1e-9
    )


def test_a_plan_of_another_revision_of_the_cost_model_is_predicted_anew(tmp_path: Path) -> None:
    data = plain(NEW_PLANS[0])
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


def test_an_old_plan_that_cannot_be_replayed_is_read_and_does_not_hold(tmp_path: Path) -> None:
    data, path = plain(OLD_PLANS[0]), tmp_path / "plan.json"
    data["stages"][0]["layers"] = data["stages"][0]["layers"][1:]
    path.write_text(json.dumps(data))
    problems = verify(load_plan(path))
    assert any("in no stage" in problem or "layers" in problem for problem in problems)


def test_points_of_an_old_sweep_do_not_stand_beside_new_ones() -> None:
    old = SweepIndex.load(FOLDER / "sweep-1-2de7c03.json")
    now = old.model_copy(update={"cost_model": COST_MODEL})
    assert list(old.differences(now)) == [f"cost_model: 0 there, {COST_MODEL} now"]


@pytest.mark.parametrize("newest", KINDS)
def test_a_file_of_a_newer_format_says_to_upgrade(newest: str) -> None:
    name, _, number = newest.rpartition("/")
    newer = f"{name}/{int(number) + 1}"
    with pytest.raises(PipeplanError, match=r"is newer than .*; upgrade Pipeplan"):
        check_format({"format": newer}, newest, "a file")


@pytest.mark.parametrize("number", [1, 2])
def test_files_that_are_written_only_are_named_as_that(number: int) -> None:
    found = stage_table.FORMAT.replace("1", str(number))
    assert list(WRITTEN_ONLY) == [stage_table.FORMAT]
    with pytest.raises(PipeplanError, match="the stages of an export, which Pipeplan writes and"):
        newest_format(found, "a file")
    with pytest.raises(PipeplanError, match="this is the stages of an export, give a plan"):
        check_format({"format": found}, "pipeplan/8", "a file")


def test_the_page_lists_every_format_there_is() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    table = re.findall(r"^\| [^|]+ \| `([^`]+)` \| ([^|]*)\|$", page, re.MULTILINE)
    assert [newest for newest, _ in table] == [*KINDS, *WRITTEN_ONLY]
    older = {name for _, cell in table for name in re.findall(r"`([^`]+)`", cell)}
    assert older == set(STEPS)


def test_every_step_leads_on_to_a_newest_format_of_the_same_kind() -> None:
    for older in STEPS:
        seen, at = {older}, older
        while at in STEPS:
            at = STEPS[at].to
            assert at not in seen, "steps in a circle"
            seen.add(at)
        assert at in KINDS
        assert at.rpartition("/")[0] == older.rpartition("/")[0]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    older=st.sampled_from(sorted(STEPS)),
    data=st.dictionaries(
        st.sampled_from(["predicted", "provenance", "stages", "points", "workers", "job", "else"]),
        _VALUES,
    ),
)
def test_a_migration_takes_any_data_and_leaves_what_it_was_given(
    older: str, data: dict[str, Any]
) -> None:
    """What is wrong in a file is the reader's to tell, in its own words."""
    given_data: Mapping[str, Any] = {"format": older, **data}
    before = json.dumps(given_data)
    newest = next(name for name in KINDS if name.rpartition("/")[0] == older.rpartition("/")[0])
    found = migrate(given_data, newest, "a file")
    assert found["format"] == newest
    assert json.dumps(given_data) == before
