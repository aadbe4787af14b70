"""Gantt charts show every event in its device's row, and are written as promised."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from builders import boundary, graph, layer, pipeline, star
from matplotlib import rc_context
from matplotlib.figure import Figure

from planner.errors import PipeplanError
from planner.plan.operations import KIND_LABELS
from planner.report import gantt
from planner.report.figures import chart_rows
from planner.report.gantt import plot_gantt, save_gantts
from planner.report.memory_plot import save_memory
from planner.schedules.assignment import balanced_assignment
from planner.schedules.whole import one_forward_one_backward
from planner.simulation.simulator import simulate

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def boxes(axes, *labels: str) -> list[tuple[int, float, float]]:
    """Row, start and end, in axis units, of the boxes drawn under the given labels."""
    found = []
    for collection in axes.collections:
        if collection.get_gid() in labels:
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((round((box.y0 + box.y1) / 2), box.x0, box.x1))
    return sorted(found)


def row_labels(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_of_many_devices_the_replicas_of_a_stage_share_a_row(many_replicas):
    """The last of 16 replicas of the second stage is of another type."""
    axes, rows = plot_gantt(many_replicas), chart_rows(many_replicas)
    assert rows == {"d0": "d0 and 15 more", "d16": "d16 and 14 more", "d31": "d31"}
    assert [label.split("  ")[0] for label in row_labels(axes)] == list(rows.values())
    found = boxes(axes, *KIND_LABELS.values())
    assert len(found) == sum(event.device in rows for event in many_replicas.operations)
    assert "share a row" in axes.get_title(loc="left")


def test_short_messages_are_drawn_wide_enough_to_be_seen(timeline_of):
    axes = plot_gantt(timeline_of("replicated"))
    per_pixel = axes.get_xlim()[1] / axes.get_window_extent().width
    for label in ("activations sent", "gradients sent", "all-reduce"):
        for _, begin, end in boxes(axes, label):
            assert end - begin >= 1.4 * per_pixel


def test_a_row_names_all_stages_of_its_device(timeline_of):
    assert row_labels(plot_gantt(timeline_of("interleaved"))) == [
        "d0  stages 0, 2",
        "d1  stages 1, 3",
    ]


def test_every_event_is_a_box_in_its_devices_row(timeline):
    axes = plot_gantt(timeline)
    assert axes.get_xlabel() == "time (s)"
    rows = timeline.pipeline.devices
    assert [label.split()[0] for label in row_labels(axes)] == list(rows)
    for kind, label in KIND_LABELS.items():
        events = [event for event in timeline.operations if event.operation.kind == kind]
        expected = sorted((rows.index(e.device), e.start_s, e.end_s) for e in events)
        found = boxes(axes, label)
        assert [row for row, _, _ in found] == [row for row, _, _ in expected]
        assert [x for _, *xs in found for x in xs] == pytest.approx(
            [x for _, *xs in expected for x in xs]
        )
    moving = [event for event in timeline.transfers if event.end_s > event.start_s]
    sent = boxes(axes, "activations sent", "gradients sent")
    assert [row for row, _, _ in sent] == sorted(rows.index(event.source) for event in moving)
    steps = boxes(axes, "optimizer step")
    assert [row for row, _, _ in steps] == list(range(len(timeline.end_s)))
    assert [end for _, _, end in steps] == pytest.approx([timeline.end_s[name] for name in rows])


def test_all_reduces_are_in_the_rows_of_the_replicas(timeline_of):
    timeline = timeline_of("replicated")
    found = boxes(plot_gantt(timeline), "all-reduce")
    each = len(timeline.synchronisations)
    assert [row for row, _, _ in found] == [0] * each + [1] * each


def test_stages_of_one_device_differ_in_shade(timeline_of):
    axes = plot_gantt(timeline_of("interleaved"))
    shades = {
        tuple(collection.get_facecolor()[0])
        for collection in axes.collections
        if collection.get_gid() == "forward"
    }
    assert len(shades) == 2


def test_wide_boxes_bear_their_microbatchs_number(timeline_of):
    timeline = timeline_of("one_device")
    assert [text.get_text() for text in plot_gantt(timeline).texts] == [
        str(event.operation.microbatch) for event in timeline.operations
    ]


def test_the_title_gives_iteration_time_and_bubble(timeline_of):
    timeline = timeline_of("one_device")
    title = plot_gantt(timeline, title="Mine").get_title(loc="left")
    assert title == "Mine\niteration 60 s, bubble 0.0%"
    assert (
        plot_gantt(timeline)
        .get_title(loc="left")
        .startswith("by-hand on by-hand: 1 stage, 1 device, 2 microbatches\n")
    )


def svg_text(path) -> str:
    """What an SVG says to a reader, with its text kept as text."""
    return " ".join(text.strip() for text in ElementTree.parse(path).getroot().itertext())


def save_gantt(timeline, path, title=None):
    save_gantts([(title, timeline)], path)


@pytest.mark.parametrize("save", [save_gantt, save_memory])
def test_names_with_dollars_are_shown_as_they_are(timeline_of_dollars, tmp_path, save):
    with rc_context({"svg.fonttype": "none"}):
        save(timeline_of_dollars, tmp_path / "default.svg")
        save(timeline_of_dollars, tmp_path / "given.svg", title="$E=mc^{$")
    assert r"a$x_{$ \$ on $\frac{$: 1 stage" in svg_text(tmp_path / "default.svg")
    assert "$E=mc^{$" in svg_text(tmp_path / "given.svg")


def test_short_iterations_are_shown_in_milliseconds():
    placed = pipeline(graph([layer("only", 0.01, 0.02)]), star(1), [(("only",), ("d0",))])
    timeline = simulate(placed, one_forward_one_backward(placed, balanced_assignment(placed)))
    axes = plot_gantt(timeline)
    assert axes.get_xlabel() == "time (ms)"
    assert boxes(axes, "forward")[0] == (0, 0.0, pytest.approx(10))


def test_given_axes_are_drawn_on():
    placed = pipeline(graph([layer("only")]), star(1), [(("only",), ("d0",))])
    timeline = simulate(placed, one_forward_one_backward(placed, balanced_assignment(placed)))
    left, right = Figure().subplots(1, 2)
    assert plot_gantt(timeline, right) is right
    assert boxes(right, "forward")
    assert not left.collections


def test_charts_below_each_other_share_a_scale_of_time(timeline_of, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(gantt, "save_figure", lambda axes, path: shown.append(axes.figure))
    charts = [("long", timeline_of("one_device")), ("short", timeline_of("interleaved"))]
    save_gantts(charts, tmp_path / "charts.svg")
    upper, lower = shown[0].axes
    assert upper.get_xlim() == lower.get_xlim() == (0, max(t.iteration_time_s for _, t in charts))
    assert upper.get_title(loc="left").startswith("long\n")
    assert lower.get_title(loc="left").startswith("short\n")
    assert boxes(upper, "forward")
    assert boxes(lower, "forward")


@pytest.mark.parametrize(("suffix", "begin"), [("png", PNG_SIGNATURE), ("svg", b"<?xml")])
def test_the_same_timeline_gives_the_same_bytes(timeline_of, tmp_path, suffix, begin):
    for name in ("first", "second"):
        save_gantt(timeline_of("interleaved"), tmp_path / f"{name}.{suffix}")
    first, second = (tmp_path / f"{name}.{suffix}" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(begin)
    assert b"<dc:date>" not in first.read_bytes()


@pytest.mark.parametrize("name", ["chart.pdf", "chart"])
def test_another_suffix_is_a_user_error(timeline_of, tmp_path, name):
    with pytest.raises(PipeplanError, match=r"suffix '(\.pdf)?'; name the file \.png or \.svg"):
        save_gantt(timeline_of("one_device"), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def many_microbatches():
    count = 16
    names = [f"layer{index}" for index in range(count)]
    tensors = [boundary(u, v, bytes_=10**6) for u, v in pairwise(names)]
    placed = pipeline(
        graph([layer(name) for name in names], tensors),
        star(count),
        [((name,), (f"d{index}",)) for index, name in enumerate(names)],
        microbatches=256,
    )
    return simulate(placed, one_forward_one_backward(placed, balanced_assignment(placed)))


def test_of_many_microbatches_the_start_and_the_end_are_shown():
    """Beside each other, at the same scale, with the times of the axis as they are."""
    timeline = many_microbatches()
    axes = plot_gantt(timeline)
    assert "of the steady state are left out" in axes.get_title(loc="left")
    first_row = [(start, end) for row, start, end in boxes(axes, "forward", "backward") if not row]
    assert len(first_row) in range(gantt.MOST_OPERATIONS, gantt.MOST_OPERATIONS + 4)
    events = [event for event in timeline.operations if event.device == "d0"]
    assert first_row[0] == pytest.approx((events[0].start_s, events[0].end_s))
    ticks = dict(zip(axes.get_xticks(), map(float, axis_labels(axes)), strict=True))
    late = min(place for place, time in ticks.items() if place != time)
    last = max(ticks)
    assert last - late == pytest.approx(ticks[last] - ticks[late])
    lost_s = ticks[last] - last
    assert first_row[-1][1] + lost_s == pytest.approx(events[-1].end_s)


def axis_labels(axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]
