"""Tables of the bubble, of stages and of changes are readable, and the lines say what they mean."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from builders import GIGA
from chains import PAIR, chain
from rich.console import Console

from planner.analysis.explain import explain
from planner.analysis.what_if import WhatIf, parse_change, what_if
from planner.analysis.what_if.values import Value
from planner.assembly import plan_by_hand
from planner.report.bubble import bubble_line, idle_table, stages_table
from planner.report.what_if import what_if_data, what_if_lines, what_if_table
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


def shown(table: Any, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def two_stages(bytes_: int = GIGA // 2) -> Timeline:
    """1 s of fill, 24 s on d1, 2 s of drain and a second of transfers: 28 s."""
    return simulate(chain((1, 2), (4, 8), bytes_=bytes_), PAIR)


def a_value(change: str, **fields: object) -> Value:
    row = Value(
        change=change,
        iteration_time_s=0.5,
        found_by="same plan replayed",
        compared_with_s=1.0,
        gain=0.5,
        replay_s=0.5,
        stages_bound_s=0.4,
        lower_bound_s=None,
        bound_covers=None,
        useless=None,
        assumes=None,
        why_not=None,
    )
    return replace(row, **fields)


def all_of(*values: Value, **fields: object) -> WhatIf:
    found = WhatIf(
        plan_s=1.0,
        base_s=1.0,
        base_found_by="same plan replayed",
        values=values,
        solved_anew=False,
        left_out=0,
        interrupted=False,
    )
    return replace(found, **fields)


def test_the_bubbles_causes_are_named_the_largest_first() -> None:
    """Of 2 * 28 s d0 has 18 s less to do; both wait 3 s to fill and drain and 1 s for transfers."""
    assert bubble_line(explain(two_stages()).bubble) == (
        "bubble 46.4%: imbalance 32.1%, fill and drain 10.7%, transfers 3.6%; imbalance: work that "
        "devices have less than the busiest, d1; the other causes are what d1 waits for"
    )


def test_every_device_has_its_idle_time_and_what_it_waited_for() -> None:
    """d0 idles 22 of 28 s, 18 of them for want of work; 20.5 s d1 computes, 1.5 s data moves."""
    rows = shown(idle_table(explain(two_stages()).bubble))
    assert rows[5].split() == ["d0", "78.6%", "64.3%", "75.0%", "3.6%", "0.0%"]
    assert rows[6].split() == ["d1", "14.3%", "0.0%", "10.7%", "3.6%", "0.0%"]


def test_of_many_devices_the_idlest_are_shown() -> None:
    bubble = explain(two_stages()).bubble
    many = replace(
        bubble, devices=tuple(replace(bubble.devices[0], device=f"n{i}") for i in range(20))
    )
    rows = shown(idle_table(many))
    assert "; 4 less idle devices not shown" in f"{rows[0]} {rows[1].strip()}"
    assert sum("78.6%" in row for row in rows) == 16


@pytest.mark.parametrize(
    "name", ["n0/gpu0", "a-very-long-name-of-a-machine-in-a-rack/accelerator7"]
)
def test_tables_fit_eighty_columns_whole(name: str) -> None:
    explanation = explain(two_stages())
    bubble = replace(
        explanation.bubble,
        devices=tuple(replace(row, device=name) for row in explanation.bubble.devices),
    )
    stages = [
        replace(row, devices=(name, "d1"), limited_by="transfers") for row in explanation.stages
    ]
    values = all_of(a_value(f"link {name}-{name} bandwidth x1.2"))
    for table in (idle_table(bubble), stages_table(stages), what_if_table(values)):
        rows = shown(table)
        assert max(map(len, rows)) <= 80
        assert not any("…" in row for row in rows)


def test_a_value_says_how_it_was_found_and_what_is_proved() -> None:
    found = all_of(
        a_value("device d0 speed x2", lower_bound_s=0.3),
        a_value("device d1 speed x2", found_by="solved anew"),
        a_value("link a-b bandwidth x2", iteration_time_s=1.0, gain=0.0, found_by="as it is"),
        a_value("recompute h", iteration_time_s=1.25, gain=-0.25, stages_bound_s=1.2),
        a_value("keep h", iteration_time_s=None, gain=None, found_by=None, why_not="too large"),
        solved_anew=True,
    )
    rows = [row.split() for row in shown(what_if_table(found))[4:] if row]
    assert rows[0][4:] == ["replay", "500", "ms", "-50.0%", "-70.0%"]
    assert rows[1][4:] == ["solving", "500", "ms", "-50.0%", "-60.0%*"]
    assert rows[2][4:] == ["-", "1000", "ms", "0", "-60.0%*"]
    assert rows[3][2:] == ["replay", "1250", "ms", "+25.0%", "0*"]
    assert rows[4][2:] == ["-", "does", "not", "fit", "-", "-60.0%*"]


def test_lines_tell_proofs_assumptions_and_what_is_missing() -> None:
    found = all_of(
        a_value("link a-b bandwidth x2", useless="any plan"),
        a_value("link b-c bandwidth x2", useless="any plan"),
        a_value("device d1 memory x2", useless="same stages"),
        a_value("microbatches x2", assumes="much"),
        plan_s=1.25,
        base_found_by="solved anew",
        left_out=2,
        interrupted=True,
    )
    said = what_if_lines(found)
    assert said[0] == (
        "the unchanged plan can take 1000 ms, 20.0% less than its 1250 ms (solved anew); gains are "
        "counted from 1000 ms"
    )
    assert (
        "proved to save at most 0.1% with any plan: link a-b bandwidth x2; link b-c bandwidth x2"
    ) in said
    assert "proved to save at most 0.1% with these stages: device d1 memory x2" in said
    assert "microbatches x2 assumes much" in said
    assert "2 changes skipped to save time; --what-if includes them" in said
    assert said[-1].startswith("interrupted: ")


def test_the_data_of_values_is_json_and_complete() -> None:
    timeline = two_stages()
    orders_ = {
        d: tuple(e.operation for e in timeline.operations if e.device == d) for d in ("d0", "d1")
    }
    plan = plan_by_hand(timeline.pipeline, orders_)
    found = what_if(plan, [parse_change("device d1 speed x2")])
    data = json.loads(json.dumps(what_if_data(found), allow_nan=False))
    (row,) = data["values"]
    assert row["change"] == "device d1 speed x2"
    assert row["iteration_time_s"] == 16
    assert row["most_gain_of_stages"] == found.values[0].most_gain_of_stages
    assert data["plan_s"] == 28


def test_nothing_to_value_says_nothing() -> None:
    assert what_if_lines(all_of()) == []
