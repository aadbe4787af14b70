"""The memory plot's lines are the timeline's memory."""

import pytest
from builders import cluster, device_type, graph, layer, parameter, pipeline

from planner.errors import PipeplanError
from planner.report.memory_plot import plot_memory, save_memory
from planner.schedules.best import best_schedule

GIB = 2**30


def dashed(axes) -> list[float]:
    return [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"]


def with_memory(gib: float):
    """One device of so many GiB that holds 4 GB of weights and as much of gradients."""
    placed = pipeline(
        graph(
            [layer("only", parameters=["weight"], peak_bytes=0)], None, [parameter("weight", 10**9)]
        ),
        cluster(["d0"], [], types={"unit": device_type(memory_gib=gib)}),
        [(("only",), ("d0",))],
    )
    return best_schedule(placed, backward="whole").timeline


def test_the_highest_point_of_each_line_is_the_devices_peak(timeline):
    lines = plot_memory(timeline).lines[: len(timeline.memory)]
    peaks = [max(line.get_ydata()) for line in lines]
    expected = [timeline.peak_memory_bytes[device] / GIB for device in timeline.pipeline.devices]
    assert peaks == pytest.approx(expected)


def test_lines_are_steps_named_by_device_up_to_the_end_of_the_iteration(timeline):
    for device, line in zip(timeline.memory, plot_memory(timeline).lines, strict=False):
        assert line.get_label().split()[0] == device
        assert line.get_drawstyle() == "steps-post"
        assert line.get_xdata()[-1] == pytest.approx(timeline.iteration_time_s)


def test_capacity_is_a_dashed_line():
    axes = plot_memory(with_memory(10))
    assert dashed(axes) == [10]
    assert axes.get_ylim()[1] > 10


def test_a_capacity_far_above_every_peak_is_told_in_words():
    axes = plot_memory(with_memory(1000))
    assert dashed(axes) == []
    assert "unit 1000 GiB" in axes.texts[0].get_text()


def test_the_title_names_the_fullest_device():
    title = plot_memory(with_memory(10), title="Mine").get_title(loc="left")
    assert title == "Mine\nfullest is d0: 7.451 GiB of 10 GiB, 75%"


def test_memory_far_below_a_gib_has_a_unit_that_fits():
    placed = pipeline(
        graph(
            [layer("only", parameters=["weight"], peak_bytes=0)], None, [parameter("weight", 2**18)]
        ),
        cluster(["d0"], []),
        [(("only",), ("d0",))],
    )
    axes = plot_memory(best_schedule(placed, backward="whole").timeline)
    assert axes.get_ylabel() == "memory in use (MiB)"
    assert max(axes.lines[0].get_ydata()) == pytest.approx(2)


def test_png_and_svg_are_written_and_nothing_else(timeline_of, tmp_path):
    timeline = timeline_of("interleaved")
    save_memory(timeline, tmp_path / "memory.png")
    save_memory(timeline, tmp_path / "memory.svg")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert b"<svg" in (tmp_path / "memory.svg").read_bytes()
    with pytest.raises(PipeplanError, match=r"'\.jpg'; name the file \.png or \.svg"):
        save_memory(timeline, tmp_path / "memory.jpg")
