"""The tables say what the plan and its simulation say."""

import io

import pytest
from builders import graph, layer, orders, parameter, pipeline, star
from rich.console import Console

from planner.assembly import plan_by_hand
from planner.plan.plan import Plan
from planner.report.summary import figures_line, plan_view, stage_table
from planner.report.tables import common_prefix
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.units import format_bytes


def shown(plan: Plan, timeline: Timeline) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(*plan_view(plan, timeline), sep="\n")
    return console.file.getvalue()


def rows(plan: Plan, timeline: Timeline) -> list[list[str]]:
    """The cells of every line, without those of the title and the rules."""
    lines = shown(plan, timeline).splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def by_hand(timeline: Timeline) -> Plan:
    return plan_by_hand(timeline.pipeline, timeline.orders)


def test_every_stage_has_a_row_with_its_layers_and_times(timeline_of):
    timeline = timeline_of("replicated")
    table = rows(by_hand(timeline), timeline)
    # Two layers a stage; 10**8 parameters of 4 bytes a layer, once as weights, once as gradients.
    state = format_bytes(2 * 2 * 4 * 10**8)
    first = ["0", "d0-1", "embed … block0 (2)", "3000.00", "6000.00", "512 MiB", state]
    assert first in table
    assert any(row[:5] == ["1", "d2", "block1 … head (2)", "7000.00", "14000.00"] for row in table)


def test_the_halves_of_a_backward_stand_where_they_run():
    layers = [layer("a", 1, 4), layer("b", 1, 4)]
    placed = pipeline(graph(layers, []), star(2), [(("a",), ("d0",)), (("b",), ("d1",))])
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1", d1="1F0 1I0 1W0 1F1 1I1 1W1"))
    table = stage_table(by_hand(timeline), timeline)
    assert table.headings[3:7] == [
        *("forward ms", "backward ms", "input gradient ms", "weight gradient ms")
    ]
    first, second = (row[3:7] for row in table.rows)
    assert first == ("1000.00", "4000.00", "-", "-")
    assert second == ("1000.00", "-", "2000.00", "2000.00")


def test_every_device_has_a_row_with_its_peak_memory(timeline):
    table = {row[0]: row for row in rows(by_hand(timeline), timeline) if row}
    for device in timeline.pipeline.devices:
        row = table[device]
        assert row[1] == "unit"
        assert float(row[3]) == round(timeline.busy_s[device] * 1e3, 2)
        peak = format_bytes(timeline.peak_memory_bytes[device])
        assert row[5].startswith(f"{peak} of 1 TiB (")


def test_the_last_line_gives_time_bound_gap_and_bubble(timeline_of):
    timeline = timeline_of("one_device")
    bound_s = timeline.iteration_time_s / 1.25
    assert figures_line(timeline, bound_s) == (
        "iteration 60 s, lower bound 48 s, gap 25.00%, bubble 0.0%"
    )
    assert shown(by_hand(timeline), timeline).rstrip().endswith(figures_line(timeline, 0.0))


def test_a_missing_bound_is_said(timeline_of):
    line = figures_line(timeline_of("one_device"), 0.0)
    assert line == "iteration 60 s, no lower bound, bubble 0.0%"


def test_recomputed_layers_are_counted_where_there_are_any():
    layers = [layer("a"), layer("b")]
    placed = pipeline(graph(layers, []), star(1), [(("a", "b"), ("d0",), ("a",))])
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1"))
    assert stage_table(by_hand(timeline), timeline).rows[0][2] == "a … b (2, 1 recomputed)"


def test_a_prefix_that_most_layers_share_is_named_once():
    names = [f"model.layers.{number}" for number in range(4)]
    layers = [layer(name) for name in ("model.embed_tokens", *names, "lm_head")]
    stages = [(("model.embed_tokens", *names[:2]), ("d0",)), ((*names[2:], "lm_head"), ("d1",))]
    placed = pipeline(graph(layers, []), star(2), stages)
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1", d1="1F0 1B0 1F1 1B1"))
    table = stage_table(by_hand(timeline), timeline)
    assert table.words[2] == "layers of model"
    assert [row[2] for row in table.rows] == [
        "embed_tokens … layers.1 (3)",
        "layers.2 … lm_head (3)",
    ]


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["a.x", "a.y", "b"], "a."),
        (["a.x", "x"], ""),
        (["a.x", "a.y", "x"], ""),
        (["h.0", "h.1"], ""),
        ([], ""),
    ],
)
def test_names_stay_apart_without_their_prefix(names, prefix):
    assert common_prefix(names) == prefix


def test_brackets_in_names_are_not_markup():
    weights = [parameter("weight")]
    layers = [layer("blocks[bold]", parameters=["weight"])]
    placed = pipeline(graph(layers, [], weights), star(1), [(("blocks[bold]",), ("d0",))])
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1"))
    assert "blocks[bold]" in shown(by_hand(timeline), timeline)
