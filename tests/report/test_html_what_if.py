"""The page tells what changes would give: the values of ``explain``, or those that it is given."""

from chains import ALTERNATING, ONE_F_ONE_B, chain, crowded
from html_pages import Node, page_of, plan_of

from planner.analysis.what_if import parse_change, what_if
from planner.report.what_if import value_cells, what_if_lines
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


def rows_of(page: Node) -> list[Node]:
    """Of the table of values, the first of its section."""
    return page.by_id("what-if").all("tbody")[0].all("tr")


def cells(page: Node) -> list[list[str]]:
    """Text of the table of values, without the bars."""
    return [[cell.text for cell in row.children[:-1]] for row in rows_of(page)]


def lengths(page: Node) -> list[dict[str, float]]:
    """How long the bars of each row are, by what they stand for."""
    return [
        {
            str(box.attributes["class"]): float(box.attributes["width"] or 0)
            for box in row.all("rect")
        }
        for row in rows_of(page)
    ]


def slow_second_stage() -> Timeline:
    """1 s of fill, 4 * 12 s on d1, 2 s of drain: 51 s."""
    return simulate(chain((1, 2), (4, 8), microbatches=4), ONE_F_ONE_B)


def test_the_usual_changes_are_valued_without_an_option(timeline):
    found = what_if(plan_of(timeline))
    page = page_of(timeline)
    assert found.values
    assert cells(page) == [value_cells(value) for value in found.values]
    notes = [line.text for line in page.by_id("what-if").all("ul")[0].all("li")]
    assert notes == what_if_lines(found)


def test_values_that_are_given_stand_in_their_place():
    timeline = slow_second_stage()
    found = what_if(plan_of(timeline), [parse_change("device d1 speed x2")])
    # d1 takes 24 s then, fill and drain 3 s as before: 27 s, 47.1 % less than 51 s.
    assert cells(page_of(timeline, values=found)) == [
        ["device d1 speed x2", "replay", "27 s", "-47.1%", "-47.1%*"]
    ]


def test_every_figure_is_there_to_open_in_its_unit():
    timeline = slow_second_stage()
    found = what_if(plan_of(timeline), [parse_change("device d1 speed x2")])
    (opened,) = page_of(timeline, values=found).by_id("what-if").all("details")
    (heads, row) = opened.all("tr")
    told = {a.text: b.text for a, b in zip(heads.children, row.children, strict=True)}
    assert told["stages bound"] == told["replay"] == "27 s"
    assert told["gain"] == told["most gain of stages"] == "47.1%"


def test_bars_are_as_long_as_the_shares_they_stand_for():
    """Of 51 s a d1 twice as fast saves 24 s and a d0 twice as fast 1.5 s, and no order more."""
    timeline = slow_second_stage()
    changes = ("device d1 speed x2", "device d0 speed x2", "link d0-hub bandwidth x2")
    found = what_if(plan_of(timeline), [parse_change(text) for text in changes])
    faster, other, useless = lengths(page_of(timeline, values=found))
    assert faster["saved"] == faster["at-best"]
    assert other["saved"] == round(faster["saved"] * 1.5 / 24, 2)
    assert useless == {}


def test_a_change_that_costs_has_no_bar_of_what_it_saves():
    """Recomputing b takes 4 s longer for each microbatch."""
    timeline = slow_second_stage()
    found = what_if(plan_of(timeline), [parse_change("recompute b")])
    page = page_of(timeline, values=found)
    assert cells(page)[0][3] == "+31.4%"
    assert lengths(page) == [{}]


def test_a_plan_beyond_memory_has_nothing_to_compare_with():
    section = page_of(simulate(crowded(0.5), ALTERNATING)).by_id("what-if")
    assert "overflows memory, so no change can be compared" in section.text
    assert not section.all("table")


def test_no_change_is_no_table():
    timeline = slow_second_stage()
    section = page_of(timeline, values=what_if(plan_of(timeline), [])).by_id("what-if")
    assert section.text == "What changes would give There are no changes to evaluate."
