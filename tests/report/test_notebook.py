"""Public records in notebooks: short in words, and tables and a chart as HTML."""

from html.parser import HTMLParser

import pytest
from builders import cluster, graph, layer, link, orders, pipeline

from planner import Result, compare, moves, solve
from planner.assembly import plan_by_hand
from planner.plan.plan import Plan

HOSTILE = "<script>\x1b[2J"
MOST_CHARACTERS = 400


@pytest.fixture(scope="module")
def plan() -> Plan:
    rows = [layer(HOSTILE), *(layer(f"l{number}") for number in range(60))]
    names = [row["name"] for row in rows]
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    placed = pipeline(graph(rows), machines, [(names[:30], ["d0"]), (names[30:], ["d1"])])
    return plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))


@pytest.fixture(scope="module")
def result(plan: Plan) -> Result:
    return solve(plan.problem, time_limit_s=0.2, deterministic=True)


class Tags(HTMLParser):
    """The tags of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


def test_reprs_are_short_and_say_what_it_is(plan: Plan, result: Result) -> None:
    assert repr(plan).startswith("<Plan: by-hand on by-hand, 2 stages, 2 devices, 2 microbatches, ")
    assert repr(plan.cluster) == "<Cluster: by-hand, 2 devices, 0 switches, 1 link>"
    assert repr(result).startswith(f"<Result: {result.status}, ")
    assert repr(plan.problem.graph) == "<LayerGraph: by-hand, 61 layers, 60 tensors between them>"
    for shown in (plan, plan.cluster, result):
        assert len(repr(shown)) < MOST_CHARACTERS


def test_changes_of_a_plan_are_counted_and_the_best_is_named(plan: Plan) -> None:
    found = moves(plan)
    assert found.best is not None
    assert repr(found) == (
        f"<MovesFound: {len(found.fitting)} fit, 0 exceed memory; best '{found.best.move}', "
        f"-{100 * found.best.gain:.1f}%>"
    )


def test_long_fields_of_other_records_are_cut(plan: Plan) -> None:
    assert len(repr(plan.stages[0])) < MOST_CHARACTERS
    assert len(repr(plan.model.graph)) < 2 * MOST_CHARACTERS
    assert repr(plan.stages[1]).startswith("Stage(index=1, layers=('l29', ")


def test_plans_and_results_have_tables_and_a_chart(plan: Plan, result: Result) -> None:
    for shown in (plan, result):
        html = shown._repr_html_()
        assert set(Tags(html).found) == {"pre", "img"}
        assert "data:image/png;base64," in html
        assert "iteration" in html
        assert "\x1b" not in html


def test_a_plan_that_does_not_run_says_why(plan: Plan) -> None:
    broken = plan.model_copy(update={"orders": {"d0": "0B0 0F0", "d1": "1F0 1B0"}})
    assert Tags(broken._repr_html_()).found == ["pre"]


def test_a_comparison_of_planners_has_a_table_and_two_schedules(plan: Plan) -> None:
    compared = compare(plan.problem, ["even"], time_limit_s=0.1, deterministic=True)
    assert repr(compared).startswith("<PlannerComparison: pipeplan ")
    assert [row.planner for row in compared] == ["pipeplan", "even"]
    html = compared._repr_html_()
    assert Tags(html).found == ["pre", "img"]
    assert "even" in html
    assert "\x1b" not in html


def test_clusters_and_comparisons_have_tables(plan: Plan) -> None:
    assert "unit" in plan.cluster._repr_html_()
    assert Tags(plan.cluster._repr_html_()).found == ["pre"]
