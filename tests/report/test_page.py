"""The page of a plan: one file, well formed, without a way out, and no name becomes markup."""

import json
import os
import re

import pytest
from builders import boundary, cluster, device_type, graph, layer, link, orders, parameter, pipeline
from html_pages import page_of, parsed, plan_of
from measured_runs import run_of

from planner.analysis.explain import explain
from planner.assembly import plan_by_hand
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.report.explanation import explanation_lines
from planner.report.page import report_html, save_report
from planner.units import format_seconds

HOSTILE = (
    "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;<!--\u202e${title}"
)
SECTIONS = ["timeline", "memory", "explanation", "changes", "stages", "costs", "run"]


def hostile_plan() -> Plan:
    """Every name that may be any text is an attack; devices' and switches' may not be."""
    rows = [layer(f"{HOSTILE}{i}", parameters=["w"]) for i in range(2)]
    kind = f"type {HOSTILE}"
    machines = cluster({"d0": kind, "d1": kind}, [link("d0", "d1")], types={kind: device_type()})
    machines = machines.model_copy(update={"name": HOSTILE})
    the_graph = graph(
        rows,
        [boundary(rows[0]["name"], rows[1]["name"])],
        [parameter("w")],
        name=HOSTILE,
        uncounted_operators=[HOSTILE],
        flop_coverage=0.5,
    )
    stages = [([rows[0]["name"]], ["d0"]), ([rows[1]["name"]], ["d1"])]
    placed = pipeline(the_graph, machines, stages)
    plan = plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))
    data = plan.model_dump(mode="json")
    data["model"]["factory"] = f"models.{HOSTILE}"
    for name in ("pipeplan", "limit", "solver"):
        data["provenance"][name] = HOSTILE
    data["provenance"]["bound_covers"]["reason"] = HOSTILE
    return Plan.parse(data, "hostile")


def test_it_is_well_formed_and_every_id_is_unique(timeline):
    page = page_of(timeline)
    names = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(names) == len(set(names))
    assert set(SECTIONS) <= set(names)


def test_every_reference_within_the_page_leads_somewhere(timeline):
    page = page_of(timeline)
    names = {node.attributes.get("id") for node in page.all()}
    for node in page.all():
        for attribute in ("aria-labelledby", "aria-describedby", "for"):
            if attribute in node.attributes:
                assert node.attributes[attribute] in names
        if node.tag == "a":
            assert node.attributes["href"].removeprefix("#") in names


def test_the_navigation_names_all_sections_in_order(timeline):
    page = page_of(timeline)
    (nav,) = page.all("nav")
    targets = [link.attributes["href"].removeprefix("#") for link in nav.all("a")]
    assert targets == [node.attributes["id"] for node in page.all("section")] == SECTIONS


def test_headings_and_tables_are_labelled(timeline):
    page = page_of(timeline)
    levels = [int(node.tag[1]) for node in page.all() if re.fullmatch("h[1-6]", node.tag)]
    assert levels == [1, *[2] * len(SECTIONS)]
    for table in page.all("table"):
        assert table.all("caption")[0].text
        assert all(cell.attributes.get("scope") in ("col", "row") for cell in table.all("th"))
    for image in page.all("img"):
        assert image.attributes["alt"]


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(timeline):
    page = page_of(timeline)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {
        node.tag for node in page.all()
    }
    for node in page.all():
        assert not {"srcset", "action", "ping", "style"} & set(node.attributes)
        assert not any(name.startswith("on") for name in node.attributes)
        assert node.attributes.get("src", "data:").startswith("data:")
    (style,) = page.all("style")
    assert not re.search(r"https?:|@import|url\(", "".join(style.texts))
    (policy,) = [
        node.attributes["content"]
        for node in page.all("meta")
        if node.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert set(rules) == {"default-src", "img-src", "style-src", "base-uri", "form-action"}


def test_names_are_text_wherever_they_stand():
    page = parsed(report_html(hostile_plan(), plan_path=f"{HOSTILE}.json"))
    harmless = parsed(report_html(a_plain_plan()))
    assert {node.tag for node in page.all()} == {node.tag for node in harmless.all()}
    assert len(page.all("img")) == 2
    shown = re.sub(r"\s+", " ", HOSTILE)
    assert shown in page.all("title")[0].text
    assert shown in page.all("h1")[0].text
    assert shown in page.by_id("stages").text
    assert shown in page.by_id("costs").text
    assert page.by_id("run").all("code")[0].text.count("torchrun") == 1


def a_plain_plan() -> Plan:
    rows = [layer("a", parameters=["w"]), layer("b")]
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    the_graph = graph(rows, [boundary("a", "b")], [parameter("w")])
    placed = pipeline(the_graph, machines, [(["a"], ["d0"]), (["b"], ["d1"])])
    plan = plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))
    data = plan.model_dump(mode="json")
    data["model"]["factory"] = "models.gpt:gpt_tiny"
    return Plan.parse(data, "plain")


def test_device_names_cannot_hold_markup():
    with pytest.raises(PipeplanError, match="devices"):
        cluster(["<b>"], [])


def test_the_same_plan_gives_the_same_bytes_in_one_file_and_nothing_else(timeline_of, tmp_path):
    plan = plan_of(timeline_of("replicated"))
    for name in ("one.html", "two.html"):
        save_report(plan, tmp_path / name, measured=run_of(plan))
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.html", "two.html"]


def test_a_file_that_cannot_be_written_stays_as_it_was(timeline_of, tmp_path):
    plan = plan_of(timeline_of("one_device"))
    with pytest.raises(PipeplanError, match="no folder"):
        save_report(plan, tmp_path / "missing" / "plan.html")
    assert list(tmp_path.iterdir()) == []


def test_the_figures_are_the_simulations(timeline):
    page = page_of(timeline)
    (figures,) = [node for node in page.all("dl") if node.attributes.get("class") == "figures"]
    told = {row.all("dt")[0].text: row.all("dd")[0].text for row in figures.all("div")}
    assert told["Iteration"] == format_seconds(timeline.iteration_time_s)
    assert told["Bubble"] == f"{timeline.bubble:.1%}"
    assert told["Lower bound"] == "none"
    lines = [line.text for line in page.by_id("explanation").all("p")]
    for line in explanation_lines(explain(timeline)):
        assert re.sub(r"\s+", " ", line) in lines


def test_each_stage_and_each_device_is_in_the_tables(timeline):
    page = page_of(timeline).by_id("stages")
    stages, devices = page.all("table")
    assert len(stages.all("tbody")[0].all("tr")) == len(timeline.pipeline.stages)
    rows = [row.all("th")[0].text for row in devices.all("tbody")[0].all("tr")]
    assert rows == list(timeline.pipeline.devices)


def test_a_plan_that_does_not_hold_says_so_and_shows_no_bound(timeline_of):
    plan = plan_of(timeline_of("interleaved"))
    data = json.loads(plan.model_dump_json())
    data["predicted"]["iteration_time_s"] *= 2
    data["predicted"]["lower_bound_s"] = 1.0
    page = parsed(report_html(Plan.parse(data, "edited")))
    assert "is not valid" in page.all("header")[0].text
    assert "predicted.iteration_time_s" in page.all("header")[0].text
    assert "Lower bound none" in page.all("header")[0].text


def test_a_measurement_is_shown_beneath_and_in_figures(timeline_of):
    timeline = timeline_of("replicated")
    plan = plan_of(timeline)
    page = page_of(timeline, measured=run_of(plan, [timeline] * 3))
    assert page.all("header")[0].text.count("Measured") == 1
    assert "measured (median of 2 steps from step 2), error +0.0%" in page.by_id("measured").text
    with pytest.raises(PipeplanError, match="plan_digest"):
        report_html(plan_of(timeline_of("interleaved")), measured=run_of(plan))


def test_the_command_to_run_it_is_the_plan_commands(timeline_of):
    text = page_of(timeline_of("replicated"), plan_path="my plan.json").by_id("run").text
    assert "no model to run" in text
    page = parsed(report_html(a_plain_plan(), plan_path="my plan.json"))
    assert page.by_id("run").all("code")[0].text == (
        "torchrun --nproc-per-node 2 -m executor 'my plan.json'"
    )


def test_a_plans_file_may_have_any_bytes_for_a_name(tmp_path):
    name = os.fsdecode(b"caf\xe9.json")
    save_report(a_plain_plan(), tmp_path / "plan.html", plan_path=name)
    assert "caf?.json" in (tmp_path / "plan.html").read_text()
