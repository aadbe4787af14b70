"""``pipeplan report``: one page, or a reason and nothing written."""

import json

import pytest
from commands import ROOT, pipeplan
from measured_runs import run_of

from planner.plan.plan import Plan
from planner.report.page import report_html


def test_it_writes_the_page_of_the_plan_and_says_where(plan_path, tmp_path):
    output = tmp_path / "plan.html"
    result = pipeplan("report", plan_path, "-o", output)
    assert result.exit_code == 0
    assert result.output == f"wrote {output}\n"
    assert output.read_text() == report_html(Plan.load(plan_path), plan_path=plan_path)


def test_a_measurement_is_shown_if_asked_for(plan_path, tmp_path):
    plan, measured, output = Plan.load(plan_path), tmp_path / "run.json", tmp_path / "plan.html"
    run_of(plan).save(measured)
    result = pipeplan("report", plan_path, "-o", output, "--against", measured)
    assert result.exit_code == 0, result.output
    assert 'id="measured"' in output.read_text()


def test_a_measurement_of_another_plan_is_refused_by_its_files_name(plan_path, plan_data, tmp_path):
    device = next(iter(plan_data["orders"]))
    words = plan_data["orders"][device].split()
    plan_data["orders"][device] = " ".join([*words[1:], words[0]])
    other = run_of(Plan.load(plan_path)).model_copy(
        update={"plan_digest": Plan.parse(plan_data, "other").execution_digest}
    )
    other.save(tmp_path / "run.json")
    result = pipeplan(
        *("report", plan_path, "-o", tmp_path / "plan.html"), *("--against", tmp_path / "run.json")
    )
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'run.json'}: plan_digest: ")
    assert not (tmp_path / "plan.html").exists()


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("plan.pdf", "expected a name that ends in .html"),
        ("missing/plan.html", "there is no folder"),
        ("folder.html", "it is a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(plan_path, tmp_path, output, told):
    (tmp_path / "folder.html").mkdir()
    result = pipeplan("report", plan_path, "-o", tmp_path / output)
    assert result.exit_code == 1
    assert told in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_the_plan_itself_is_not_written_over(plan_path, tmp_path):
    copy = tmp_path / "plan.html"
    copy.write_text(plan_path.read_text())
    result = pipeplan("report", copy, "-o", copy)
    assert result.exit_code == 1
    assert "this is an input file of the command" in result.stderr
    assert json.loads(copy.read_text())


def test_a_plan_that_cannot_be_simulated_is_refused(plan_data, tmp_path):
    plan_data["stages"][0]["layers"] = ["no such layer"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data))
    result = pipeplan("report", path, "-o", tmp_path / "plan.html")
    assert result.exit_code == 1
    assert "no such layer" in result.stderr
    assert not (tmp_path / "plan.html").exists()


def test_every_file_the_page_is_made_of_is_installed_with_the_package():
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["planner"]
    installed = {path for pattern in patterns for path in (ROOT / "planner").glob(pattern)}
    templates = set((ROOT / "planner/report/templates").iterdir())
    assert {path.suffix for path in templates} == {".html", ".css"}
    assert templates <= installed
