"""The data embedded in the page is the timeline, read back here as its scripts read it."""

from collections import Counter
from itertools import accumulate, pairwise

import pytest
from html_pages import data_of, page_of, parsed, plan_of
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import run_of

from planner.analysis.explain import explain
from planner.report.html.markup import data_blocks, field_words, markup, value_text
from planner.report.html.timeline_data import Ticks, typical_step


def spans(columns: dict) -> list[tuple[str, int, int]]:
    """Name, start and end in ticks."""
    found, time = [], 0
    names = zip(columns["stage"], columns["kind"], columns["microbatch"], strict=True)
    for (stage, kind, microbatch), gap, length in zip(
        names, columns["gap"], columns["length"], strict=True
    ):
        start = time + gap
        time = start + length
        found.append((f"{stage}{kind}{microbatch}", start, time))
    return found


def test_every_operation_is_where_the_simulation_has_it(timeline):
    data = data_of(page_of(timeline))
    tick = data["tick_s"]
    found = {
        (device["name"], name): (start * tick, end * tick)
        for device, columns in zip(data["devices"], data["operations"], strict=True)
        for name, start, end in spans(columns)
    }
    expected = {(e.device, str(e.operation)): (e.start_s, e.end_s) for e in timeline.operations}
    assert set(found) == set(expected)
    for key, span in expected.items():
        assert found[key] == pytest.approx(span, rel=1e-7, abs=tick)
    assert data["end"] * tick == pytest.approx(timeline.iteration_time_s, rel=1e-7)


def test_transfers_are_on_each_link_they_hold_and_never_overlap_there(timeline):
    data = data_of(page_of(timeline))
    columns, tick = data["transfers"], data["tick_s"]
    names = [device["name"] for device in data["devices"]]
    rows = list(zip(spans(columns), columns["source"], columns["target"], strict=True))
    found = Counter((name, names[source], names[target]) for (name, *_), source, target in rows)
    moving = [event for event in timeline.transfers if event.end_s > event.start_s]
    assert found == Counter((str(e.operation), e.source, e.target) for e in moving)
    busy: dict[int, list[tuple[int, int]]] = {}
    for ((_, start, end), *_), route in zip(rows, columns["route"], strict=True):
        assert columns["routes"][route]
        for row in columns["routes"][route]:
            busy.setdefault(row, []).append((start, end))
    assert set(busy) == set(range(len(data["links"])))
    for ends in busy.values():
        ends.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
    held = sum(len(event.links) or 1 for event in moving)
    assert sum(map(len, busy.values())) == held
    carried = sum(end - start for ends in busy.values() for start, end in ends) * tick
    took = sum((e.end_s - e.start_s) * (len(e.links) or 1) for e in moving)
    assert carried == pytest.approx(took, rel=1e-6)


def test_memory_is_the_simulations(timeline):
    data = data_of(page_of(timeline))
    for device, columns in zip(data["devices"], data["memory"], strict=True):
        steps = timeline.memory[device["name"]]
        changes = (columns["changes"][number] for number in columns["change"])
        assert list(accumulate(changes)) == [bytes_ for _, bytes_ in steps]
        times = [time * data["tick_s"] for time in accumulate(columns["gap"])]
        assert times == pytest.approx([time for time, _ in steps], abs=data["tick_s"])
        assert device["peak_bytes"] == timeline.peak_memory_bytes[device["name"]]
        assert device["capacity_bytes"] == timeline.pipeline.capacity_bytes(device["name"])


def test_the_critical_path_covers_the_iteration_without_a_gap(timeline):
    data = data_of(page_of(timeline))
    time = 0
    for (kind, device, index, waited), step in zip(
        data["path"], with_length(timeline), strict=True
    ):
        assert waited == step.waited_for
        if kind == "operation":
            _, start, end = spans(data["operations"][device])[index]
        elif kind == "transfer":
            _, start, end = spans(data["transfers"])[index]
        else:
            reduction = kind == "reduction"
            span = (
                data["reductions"][index]["span"]
                if reduction
                else data["devices"][device]["optimizer"]
            )
            start, end = span[0], sum(span)
        assert abs(start - time) <= 1
        time = end
    assert time == data["end"]


def with_length(timeline) -> list:
    """Steps of the path, without transfers that take no time."""
    steps = explain(timeline).critical_path
    return [s for s in steps if s.seconds > 0 or not hasattr(s.event, "links")]


def test_all_reduces_and_optimizer_steps_are_the_simulations(timeline):
    data = data_of(page_of(timeline))
    tick = data["tick_s"]
    for row, event in zip(data["reductions"], timeline.synchronisations, strict=True):
        members = tuple(data["devices"][place]["name"] for place in row["devices"])
        assert members == event.synchronisation.devices
        assert row["span"][0] * tick == pytest.approx(event.start_s, abs=tick)
        assert sum(row["span"]) * tick == pytest.approx(event.end_s, abs=tick)
    for device in data["devices"]:
        end_s = timeline.end_s[device["name"]]
        assert sum(device["optimizer"]) * tick == pytest.approx(end_s, abs=tick)


def test_a_measured_step_is_shown_as_it_was_measured(timeline):
    plan = plan_of(timeline)
    measured = run_of(plan)
    data = data_of(page_of(timeline, measured=measured))
    shown, tick = data["measured"], data["tick_s"]
    found = {
        (device["name"], name): (start * tick, end * tick)
        for device, columns in zip(data["devices"], shown["operations"], strict=True)
        for name, start, end in spans(columns)
    }
    expected = {(e.device, e.operation): (e.start_s, e.end_s) for e in measured.operations}
    assert found.keys() == expected.keys()
    for key, span in expected.items():
        assert found[key] == pytest.approx(span, abs=tick + 1e-9)
    assert sum(len(spans(columns)) for columns in shown["sends"]) == len(measured.transfers)
    assert sum(map(len, shown["reductions"])) == len(measured.reductions)
    assert sum(map(len, shown["optimizer"])) == len(measured.optimizer_steps)


@pytest.mark.parametrize(
    ("times", "step"),
    [([3.0], 1), ([5.0, 1.0], 2), ([9.0, 4.0, 2.0, 3.0], 4), ([9, 1, 2, 3, 4], 3)],
)
def test_the_step_shown_is_of_median_length_without_the_first(timeline_of, times, step):
    measured = run_of(plan_of(timeline_of("one_device")), [timeline_of("one_device")] * len(times))
    steps = [
        row.model_copy(update={"iteration_time_s": float(time)})
        for row, time in zip(measured.steps, times, strict=True)
    ]
    assert typical_step(measured.model_copy(update={"steps": tuple(steps)})) == step


@given(st.floats(1e-300, 1e15), st.floats(0, 1), st.floats(0, 1))
def test_ticks_keep_eight_digits_and_what_meets_still_meets(span_s, first, second):
    ticks = Ticks.for_span(span_s)
    start_s, end_s = sorted((first * span_s, second * span_s))
    start, length = ticks.span(start_s, end_s)
    assert start + length == ticks.of(end_s)
    assert ticks.span(end_s, span_s)[0] == start + length
    assert abs(start * ticks.tick_s - start_s) <= 0.51 * ticks.tick_s
    if span_s > 1e-290:
        assert 0.9e8 <= span_s / ticks.tick_s <= 1.1e9


def test_an_iteration_without_length_has_ticks_too():
    assert Ticks.for_span(0.0).of(0.0) == 0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("iteration_time_s", 0.2, "200 ms"),
        ("saved_s", -0.2, "-200 ms"),
        ("peak_bytes", 2**30, "1 GiB"),
        ("share", 0.25, "25.0%"),
        ("count", 12345, "12,345"),
        ("factor", 1.23456, "1.235"),
        ("binds", True, "yes"),
        ("within_s", None, "-"),
        ("stages", [0, 1, 2, 5], "0-2, 5"),
        ("full_devices", [], "-"),
        ("name", "<b>", "<b>"),
        ("ratio", {"a": [1]}, '{"a": [1]}'),
        (
            "waited_for",
            [
                {"cause": "transfer", "on": ["a -> b"], "stages": [], "seconds": 0.002},
                {"cause": "compute", "on": ["c"], "stages": [3], "seconds": 1.5},
            ],
            "transfer a -> b 2 ms; compute c stages 3 1500 ms",
        ),
    ],
)
def test_plain_data_is_told_in_the_unit_of_its_name(name, value, text):
    assert value_text(name, value) == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_any_plain_data_becomes_well_formed_tables(data):
    found = parsed(markup(*data_blocks(data)))
    for table in found.all("table"):
        (head, *rows) = table.all("tr")
        assert all(len(row.children) == len(head.children) for row in rows)
    shown = found.text
    for value in data.values():
        if isinstance(value, str) and value.isalnum():
            assert value in shown


def test_words_of_a_field_leave_out_its_unit():
    assert field_words("iteration_time_s") == "iteration time"
    assert field_words("peak_bytes") == "peak"
