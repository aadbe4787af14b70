"""All planners on one problem, scored alike."""

import json
from dataclasses import replace

import pytest
from builders import graph, layer, parameter, star
from tiny_problems import tiny_problem

from planner import Job, PipeplanError, Problem, compare, solve
from planner.analysis.comparison import OURS
from planner.baselines import BASELINES
from planner.costs.placement import place
from planner.report.comparison import comparison_data, comparison_table
from planner.schedules.best import best_schedule


@pytest.mark.parametrize("seed", range(1, 2))
def test_ours_comes_first_and_is_never_slower(seed: int) -> None:
    problem = tiny_problem(seed, layers=8, devices=4, microbatches=6, types=2)
    rows = compare(problem, time_limit_s=0.3, deterministic=True)
    assert [row.planner for row in rows] == [OURS, *BASELINES]
    for row in rows:
        assert row.figures is not None
        assert row.reason is None
        assert row.ratio >= 1 - 1e-9
        assert row.ratio == row.figures.iteration_time_s / rows[0].figures.iteration_time_s
    assert rows[0].ratio == 1


def test_figures_are_those_of_the_best_classic_schedule_and_of_our_plan() -> None:
    problem = tiny_problem(4, layers=6, devices=3, microbatches=5)
    ours, spp = compare(problem, ["spp"], time_limit_s=0.3, deterministic=True)
    result = solve(problem, time_limit_s=0.3, deterministic=True)
    predicted = result.plan.predicted
    assert ours.figures.iteration_time_s == predicted.iteration_time_s
    assert ours.figures.bubble == predicted.bubble
    assert ours.gap == predicted.gap
    schedule = best_schedule(place(problem, spp.stages))
    assert schedule is not None
    assert spp.figures.iteration_time_s == schedule.iteration_time_s
    assert spp.schedule == schedule.method
    assert spp.figures.peak_memory_bytes == max(schedule.timeline.peak_memory_bytes.values())
    assert spp.gap == pytest.approx(schedule.iteration_time_s / predicted.lower_bound_s - 1)
    assert spp.devices == len({d for stage in spp.stages for d in stage.devices})


def test_rows_come_in_the_order_asked_for_each_once_and_as_they_are_known() -> None:
    problem = tiny_problem(1, layers=3, devices=2, microbatches=2)
    seen = []
    names = ["spp", "even", "spp"]
    rows = compare(problem, names, time_limit_s=0.2, deterministic=True, progress=seen.append)
    assert [row.planner for row in rows] == [OURS, "spp", "even"]
    assert seen == list(rows)


@pytest.mark.parametrize("names", [["spp", "no-such", "nor-this"], []])
def test_unknown_planners_are_refused_with_the_known_ones(names: list[str]) -> None:
    with pytest.raises(PipeplanError, match="autopipe, dapple, pipedream, spp") as error:
        compare(tiny_problem(1, layers=3, devices=2, microbatches=2), names)
    assert all(repr(name) in str(error.value) for name in names if name not in BASELINES)


def heavy_first_layer() -> Problem:
    """Three light layers and a heavy one on two devices: an even split puts two layers together."""
    rows = [layer(name, parameters=[f"p{name}"], peak_bytes=0) for name in "abcd"]
    sizes = {"a": 100, "b": 100, "c": 1, "d": 1}
    model = graph(rows, parameters=[parameter(f"p{n}", sizes[n] * 10**9) for n in "abcd"])
    return Problem(model, star(2), Job(microbatches=2, optimizer="sgd"))


def test_a_plan_that_does_not_fit_says_which_device_lacks_what() -> None:
    """Weights and gradients of 200 * 10**9 elements are 1490 GiB, a device has 1024."""
    ours, even, replicated = compare(
        heavy_first_layer(), ["even", "even-replicated"], time_limit_s=0.5, deterministic=True
    )
    assert ours.figures is not None
    assert even.figures is even.ratio is even.gap is even.schedule is None
    assert [len(stage.layers) for stage in even.stages] == [2, 2]
    assert even.reason.startswith("does not fit: stage 0 needs 1")
    assert "'d0'" in even.reason
    assert "it has 1 TiB" in even.reason
    assert replicated.stages is None
    assert replicated.reason.startswith("even-replicated: none of")


def test_where_nothing_fits_every_row_says_so() -> None:
    problem = heavy_first_layer()
    tight = replace(problem, job=problem.job.model_copy(update={"max_stages": 1}))
    rows = compare(tight, time_limit_s=0.5, deterministic=True)
    assert all(row.figures is None and row.reason for row in rows)
    assert all(row.ratio is row.gap is None for row in rows)


def test_rows_as_text_and_data_hold_the_same_figures() -> None:
    rows = compare(heavy_first_layer(), ["even", "spp"], time_limit_s=0.5, deterministic=True)
    table = comparison_table(rows, "heavy on two")
    lines = table.markdown().splitlines()
    assert len(lines) == 2 + len(rows)
    for line, row, cells in zip(lines[2:], rows, table.rows, strict=True):
        assert [cell.strip() for cell in line.strip("|").split(" | ")] == list(cells)
        assert cells[0] == row.planner
    data = json.loads(json.dumps(comparison_data(rows)))
    assert [row["planner"] for row in data] == [OURS, "even", "spp"]
    assert data[1]["iteration_time_s"] is None
    assert data[1]["reason"] == rows[1].reason
    assert data[2]["iteration_time_s"] == rows[2].figures.iteration_time_s
    assert len({frozenset(row) for row in data}) == 1
