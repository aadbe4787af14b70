"""Limits of stages were worked out by hand; the effect of their speed is replayed."""

from dataclasses import replace

import networkx as nx
import pytest
from builders import GIGA, orders
from chains import ALTERNATING, ONE_F_ONE_B, chain, crowded
from event_graph import event_graph, longest_path_s
from hypothesis import given
from hypothesis import strategies as st
from strategies import Scheduled, scheduled

from planner.analysis.explain import explain
from planner.analysis.explain.stage_limits import StageLimit, Trial, trial_times_s
from planner.costs.placed_pipeline import PlacedPipeline
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

pytestmark = pytest.mark.extensive


def slowed(waits: nx.DiGraph, stage: int, part: str, factor: float) -> float:
    """The longest path of a timeline's events with those of a stage stretched."""
    stretched = nx.DiGraph(waits)
    for name, data in waits.nodes(data=True):
        kind, what = name[0], name[1]
        if part == "compute" and kind == "operation" and what.stage == stage:
            stretched.add_node(name, seconds=data["seconds"] * factor)
            # What is left of a backward when its gradients are there is stretched with it.
            for _, after, edge in waits.out_edges(name, data=True):
                stretched.add_edge(name, after, ahead=edge.get("ahead", 0.0) * factor)
        if part == "transfers" and kind == "transfer":
            ends = (what.stage, what.stage + (1 if what.kind == "F" else -1))
            if stage in ends:
                stretched.add_node(name, seconds=data["seconds"] * factor)
    return longest_path_s(stretched)


def scaled(placed: PlacedPipeline, stage: int, factor: float) -> PlacedPipeline:
    """A pipeline with one stage slower, placed by hand."""
    rows = list(placed.stages)
    times = {
        device: type(each)(*(seconds * factor for seconds in each))
        for device, each in rows[stage].times.items()
    }
    rows[stage] = replace(rows[stage], times=times)
    return replace(placed, stages=tuple(rows))


def limits(timeline: Timeline) -> tuple[StageLimit, ...]:
    return explain(timeline).stages


@given(scheduled(), st.sampled_from(["compute", "transfers"]), st.floats(0.5, 3))
def test_a_trial_is_the_longest_path_of_stretched_events(
    case: Scheduled, part: str, factor: float
) -> None:
    timeline = simulate(case.pipeline, case.orders)
    waits = event_graph(timeline)
    stages = range(len(case.pipeline.stages))
    found = trial_times_s(timeline, [Trial(stage, part, factor) for stage in stages])
    expected = [slowed(waits, stage, part, factor) for stage in stages]
    assert list(found) == pytest.approx(expected, rel=1e-9)


@given(scheduled(shared=True, replicas=False))
def test_a_slower_stage_takes_as_long_in_the_simulator_itself(case: Scheduled) -> None:
    """Where links are shared, nothing but the devices' orders is kept."""
    timeline = simulate(case.pipeline, case.orders)
    for row in limits(timeline):
        tenth = simulate(scaled(case.pipeline, row.stage, 1.1), case.orders)
        assert tenth.iteration_time_s == pytest.approx(
            timeline.iteration_time_s * (1 + row.slower_10_percent)
        )


def test_a_slow_stage_is_limited_by_its_computation() -> None:
    """1 s of fill, 4 * 12 s, 2 s of drain: the other stage is there to fill and drain only."""
    timeline = simulate(chain((1, 2), (4, 8), microbatches=4), ONE_F_ONE_B)
    first, second = limits(timeline)
    assert (first.limited_by, second.limited_by) == ("nothing", "compute")
    assert first.compute_s == pytest.approx(3)
    assert second.compute_s == pytest.approx(48)
    assert second.slower_10_percent == pytest.approx(4.8 / 51)
    assert second.faster_10_percent == pytest.approx(-4.8 / 51)


def test_a_stage_beside_the_critical_path_limits_nothing() -> None:
    """d0 never idles: 3 * 12 s. 1B0 has to end at 12 s and can start its forward at 4 s."""
    timeline = simulate(
        chain((4, 8), (1, 2), microbatches=3),
        orders(d0="0F0 0F1 0F2 0B0 0B1 0B2", d1="1F0 1B0 1F1 1B1 1F2 1B2"),
    )
    assert timeline.iteration_time_s == 36
    first, second = limits(timeline)
    assert (first.limited_by, second.limited_by) == ("compute", "nothing")
    assert second.compute_s == 0
    assert second.slower_10_percent == 0


def test_slow_transfers_limit_both_stages_they_join() -> None:
    """Three transfers of 8 s follow each other; the last gradient takes as long again."""
    placed = chain((1, 2), (1, 2), bytes_=8 * GIGA, microbatches=3)
    timeline = simulate(placed, orders(d0="0F0 0F1 0F2 0B0 0B1 0B2", d1="1F0 1B0 1F1 1B1 1F2 1B2"))
    assert timeline.iteration_time_s == 38
    for row in limits(timeline):
        assert row.limited_by == "transfers"
        assert row.transfers_s == pytest.approx(32)


def test_a_full_device_limits_its_stage_where_memory_binds() -> None:
    timeline = simulate(crowded(), ALTERNATING)
    assert [row.limited_by for row in limits(timeline)] == ["memory", "compute"]


def test_stages_without_any_time_limit_nothing() -> None:
    timeline = simulate(chain((0, 0), (0, 0)), orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1F1 1B0 1B1"))
    for row in limits(timeline):
        assert (row.limited_by, row.slower_10_percent) == ("nothing", 0)
