"""The page of a plan: one file, well formed, without a way out, and no name becomes markup."""

import base64
import hashlib
import itertools
import json
import os
import re
from pathlib import Path

import pytest
from builders import (
    boundary,
    cluster,
    device_type,
    graph,
    layer,
    link,
    orders,
    parameter,
    pipeline,
    star,
)
from html_pages import Node, data_of, page_of, parsed, plan_of
from measured_runs import run_of

from planner.analysis.comparison import GIVEN, compare_plan
from planner.analysis.explain import explain
from planner.assembly import plan_by_hand
from planner.baselines import BASELINES
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.report.comparison import row_cells
from planner.report.explanation import explanation_lines
from planner.report.html.page import SCRIPTS, report_html, save_report
from planner.schedules.best import best_schedule
from planner.units import format_seconds

HOSTILE = (
    "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;<!--\u202e${title}"
)
SECTIONS = ["timeline", "memory", "explanation", "what-if", "stages", "topology", "costs", "run"]


def static(name: str) -> str:
    import planner.report.html

    return (Path(planner.report.html.__file__).parent / "static" / name).read_text()


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


def test_headings_leave_out_no_level_and_everything_interactive_has_a_name(timeline):
    page = page_of(timeline)
    levels = [int(node.tag[1]) for node in page.all() if re.fullmatch("h[1-6]", node.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    labelled = {node.attributes["for"] for node in page.all("label") if "for" in node.attributes}
    wrapped = {id(inner) for node in page.all("label") for inner in node.all("input")}
    for node in page.all():
        if node.tag in ("button", "a", "summary"):
            assert node.attributes.get("aria-label") or node.text
        if node.tag in ("input", "select"):
            assert id(node) in wrapped or node.attributes.get("id") in labelled
        if "tabindex" in node.attributes:
            assert node.attributes["tabindex"] == "0"
            assert node.attributes["role"] in ("region", "application")
            assert node.attributes["aria-label"]
    for table in page.all("table"):
        assert table.all("caption")[0].text
        assert all(cell.attributes.get("scope") in ("col", "row") for cell in table.all("th"))


def test_nothing_is_loaded_from_elsewhere_and_the_policy_forbids_it(timeline):
    text = report_html(plan_of(timeline))
    page = parsed(text)
    for node in page.all():
        assert not {"src", "srcset", "action", "ping", "style"} & set(node.attributes)
        assert not any(name.startswith("on") for name in node.attributes)
        assert node.tag not in ("link", "iframe", "object", "embed", "base")
    for name in ("page.css", *(f"{script}.js" for script in SCRIPTS)):
        assert not re.search(
            r"https?:|@import|url\(|\beval\b|innerHTML|insertAdjacent", static(name)
        )
    (policy,) = [
        node.attributes["content"]
        for node in page.all("meta")
        if node.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    script = next(node for node in page.all("script") if node.attributes["type"] == "module")
    (style,) = page.all("style")
    for node, rule in ((script, "script-src"), (style, "style-src")):
        digest = hashlib.sha256("".join(node.texts).encode()).digest()
        assert rules[rule] == f"'sha256-{base64.b64encode(digest).decode()}'"


def test_names_are_text_wherever_they_stand():
    plan, harmless = hostile_plan(), report_html(a_plain_plan())
    text = report_html(plan, plan_path=f"{HOSTILE}.json")
    page = parsed(text)

    def tags(node: Node) -> list[str]:
        return sorted(found.tag for found in node.all() if found.tag != "li")

    assert set(tags(page)) == set(tags(parsed(harmless)))
    assert len(page.all("script")) == 2
    assert not page.all("img")
    shown = re.sub(r"\s+", " ", HOSTILE)
    assert shown in page.all("title")[0].text
    assert shown in page.all("h1")[0].text
    assert shown in page.by_id("stages").text
    assert shown in page.by_id("costs").text
    assert page.by_id("run").all("code")[0].text.count("torchrun") == 1
    assert "<!--" not in "".join(page.by_id("data").texts)
    assert "$title" not in text.replace("${title}", "")


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
        save_report(plan, tmp_path / name, measured=run_of(plan), comparison=compare_plan(plan))
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
    lines = [line.text for line in page.by_id("explanation").all("ul")[0].all("li")]
    assert lines == [re.sub(r"\s+", " ", line) for line in explanation_lines(explain(timeline))]


def test_each_stage_and_each_of_its_layers_is_in_the_tables(timeline):
    page = page_of(timeline).by_id("stages")
    stages, *layers, devices = page.all("table")
    assert len(stages.all("tbody")[0].all("tr")) == len(timeline.pipeline.stages)
    for stage, table in zip(timeline.pipeline.stages, layers, strict=True):
        heads = [row.all("th")[0].text for row in table.all("tbody")[0].all("tr")]
        assert heads == list(stage.spec.layers)
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
    assert data_of(page)["measured"]["step"] == 2
    assert "measured (median of 2 steps from step 2), error +0.0%" in page.by_id("measured").text
    with pytest.raises(PipeplanError, match="plan_digest"):
        report_html(plan_of(timeline_of("interleaved")), measured=run_of(plan))


def test_the_comparison_has_the_plan_and_every_classic_planner(timeline_of):
    timeline = timeline_of("replicated")
    rows = compare_plan(plan_of(timeline))
    page = page_of(timeline, comparison=rows).by_id("comparison")
    cells = [[cell.text for cell in row.children] for row in page.all("tbody")[0].all("tr")]
    assert cells == [row_cells(row) for row in rows]
    assert [row[0] for row in cells] == [GIVEN, *BASELINES]


def test_the_command_to_run_it_is_the_plan_commands(timeline_of):
    text = page_of(timeline_of("replicated"), plan_path="my plan.json").by_id("run").text
    assert "there is no model to run" in text
    page = parsed(report_html(a_plain_plan(), plan_path="my plan.json"))
    assert page.by_id("run").all("code")[0].text == (
        "torchrun --nproc-per-node 2 -m executor 'my plan.json'"
    )


def test_a_plans_file_may_have_any_bytes_for_a_name(tmp_path):
    name = os.fsdecode(b"caf\xe9.json")
    save_report(a_plain_plan(), tmp_path / "plan.html", plan_path=name)
    assert "caf?.json" in (tmp_path / "plan.html").read_text()


def test_a_page_has_few_bytes_an_operation():
    count, microbatches = 8, 400
    names = [f"l{index}" for index in range(count)]
    chain = graph([layer(name, 0.0013, 0.0029, stash_bytes=2**20) for name in names])
    machines = star(count, 1000)
    stages = [((name,), (f"d{index}",)) for index, name in enumerate(names)]
    placed = pipeline(chain, machines, stages, microbatches=microbatches)
    classic = best_schedule(placed, backward="whole")
    assert classic is not None
    size = len(report_html(plan_of(classic.timeline)))
    fixed = len(report_html(a_plain_plan()))
    assert size - fixed < 90 * 2 * count * microbatches


def test_styles_have_no_colour_of_their_own():
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b|\brgb|\bhsl", static("page.css"))
    for script in SCRIPTS:
        assert not re.search(r"[\"'`]#[0-9a-fA-F]{3,8}[\"'`]", static(f"{script}.js"))
