"""Links that share: rates are max-min fair, and alone a message takes its time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from builders import GIGA, boundary, cluster, graph, layer, link, orders, pipeline, star
from hypothesis import given
from hypothesis import strategies as st
from replay_oracle import inputs_of
from strategies import Scheduled, scheduled

from planner.costs.placement import PlacedPipeline
from planner.simulation.fair_links import Link, fair_rates, simulate_fair_links
from planner.simulation.simulator import simulate

CLOSE = 1e-9


def two_pairs(uplink_gb_per_s: float, later_s: float = 0) -> PlacedPipeline:
    """Two replicas of each of two stages, with one uplink between; forward 1 s, backward 2 s.

    The second replica's messages arrive by so much later, alone on its link.
    """
    near = [link("d0", "a", 10), link("d1", "a", 10, latency_us=later_s * 1e6)]
    far = [link("d2", "b", 10), link("d3", "b", 10)]
    the_cluster = cluster(
        ["d0", "d1", "d2", "d3"], [*near, *far, link("a", "b", uplink_gb_per_s)], ["a", "b"]
    )
    the_graph = graph([layer("x"), layer("y")], [boundary("x", "y", bytes_=GIGA)])
    stages = [(["x"], ["d0", "d1"]), (["y"], ["d2", "d3"])]
    return pipeline(the_graph, the_cluster, stages, microbatches=2)


BOTH = orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1B0", d3="1F1 1B1")


def test_two_messages_that_meet_are_both_late() -> None:
    in_turn = simulate(two_pairs(1), BOTH)
    assert [event.end_s for event in in_turn.transfers[:2]] == [2, 3]
    shared = simulate_fair_links(two_pairs(1), BOTH)
    assert [(e.start_s, e.end_s) for e in shared.transfers[:2]] == [(1, 3), (1, 3)]
    # Forward and backward, there and back, where the first has to itself what the other waits for.
    assert shared.iteration_time_s == pytest.approx(1 + 2 + 1 + 2 + 2 + 2)
    assert in_turn.iteration_time_s == pytest.approx(1 + 2 + 1 + 2 + 1 + 2)


def test_messages_of_one_pair_go_one_after_the_other() -> None:
    """Those of two pairs have half of the uplink each; the third waits for its pair's first."""
    late = orders(d0="0F0 0B0", d1="0F1 0F2 0B1 0B2", d2="1F0 1B0", d3="1F1 1F2 1B1 1B2")
    timeline = simulate_fair_links(two_pairs(0.5), late)
    arrivals = {str(e.operation): e.end_s for e in timeline.transfers if e.operation.kind == "F"}
    assert arrivals == {"0F0": 1 + 4, "0F1": 1 + 4, "0F2": 5 + 2}


def test_who_comes_later_takes_a_share_of_what_is_left() -> None:
    """The first sends alone for a second; then both have half until it has sent the rest."""
    late = orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1B0", d3="1F1 1B1")
    timeline = simulate_fair_links(two_pairs(0.5, later_s=1), late)
    arrivals = {str(e.operation): e.end_s for e in timeline.transfers if e.operation.kind == "F"}
    assert arrivals == {"0F0": pytest.approx(1 + 1 + 2), "0F1": pytest.approx(4 + 1)}


def test_alone_a_message_takes_what_it_takes_in_turn() -> None:
    the_graph = graph([layer("x"), layer("y")], [boundary("x", "y", bytes_=GIGA)])
    chain = pipeline(the_graph, star(2, latency_us=50), [(["x"], ["d0"]), (["y"], ["d1"])])
    there_and_back = orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1")
    shared, in_turn = (run(chain, there_and_back) for run in (simulate_fair_links, simulate))
    for mine, other in zip(shared.operations, in_turn.operations, strict=True):
        assert mine.operation == other.operation
        assert mine.start_s == pytest.approx(other.start_s)


@given(scheduled())
def test_devices_keep_their_order_and_wait_for_what_they_need(case: Scheduled) -> None:
    timeline = simulate_fair_links(case.pipeline, case.orders)
    ends = {event.operation: event.end_s for event in timeline.operations}
    for device, order in case.orders.items():
        ran = [event for event in timeline.operations if event.device == device]
        assert [event.operation for event in ran] == list(order)
        assert all(a.end_s <= b.start_s for a, b in pairwise(ran))
    for event in timeline.operations:
        for needed, travel_s in inputs_of(case.pipeline, case.orders, event.operation):
            assert event.start_s >= (ends[needed] + travel_s) * (1 - CLOSE)


@given(scheduled())
def test_no_message_is_faster_than_alone_and_no_link_than_full(case: Scheduled) -> None:
    timeline = simulate_fair_links(case.pipeline, case.orders)
    problem = case.pipeline.problem
    bytes_on: dict[Link, float] = {}
    for event in timeline.transfers:
        route = problem.cluster.route(event.source, event.target)
        stage = case.pipeline.stages[event.operation.stage]
        forward = event.operation.kind == "F"
        bytes_ = stage.output_bytes if forward else stage.input_gradient_bytes
        if event.source != event.target and bytes_ > 0:
            assert route is not None
            assert event.end_s - event.start_s >= route.seconds(bytes_) * (1 - CLOSE)
        for resource in event.links:
            bytes_on[resource] = bytes_on.get(resource, 0) + bytes_
    for resource, total in bytes_on.items():
        capacity = problem.cluster.links[resource[0]].bandwidth_gb_per_s * GIGA
        using = [event for event in timeline.transfers if resource in event.links]
        span = max(e.end_s for e in using) - min(e.start_s for e in using)
        assert total <= capacity * span * (1 + CLOSE)


@st.composite
def networks(
    draw: st.DrawFn,
) -> tuple[list[tuple[tuple[Link, ...], float]], dict[Link, float]]:
    speeds = st.integers(1, 20).map(float)
    capacity = {(index, 1): draw(speeds) for index in range(draw(st.integers(1, 5)))}
    chosen = st.sets(st.sampled_from(sorted(capacity)), min_size=1)
    flows = draw(st.lists(st.tuples(chosen.map(tuple), speeds), min_size=1, max_size=6))
    return flows, capacity


@given(networks())
def test_rates_are_max_min_fair(
    network: tuple[list[tuple[tuple[Link, ...], float]], dict[Link, float]],
) -> None:
    """No rate can rise but at the cost of one that is no larger (the definition)."""
    flows, capacity = network
    rates = fair_rates(flows, capacity)
    load = {
        key: sum(r for r, (links, _) in zip(rates, flows, strict=True) if key in links)
        for key in capacity
    }
    assert all(load[key] <= capacity[key] * (1 + CLOSE) for key in capacity)
    for rate, (links, most) in zip(rates, flows, strict=True):
        if rate >= most * (1 - CLOSE):
            assert rate <= most * (1 + CLOSE)
            continue
        bottlenecks = [
            key
            for key in links
            if load[key] >= capacity[key] * (1 - CLOSE)
            and all(
                other <= rate * (1 + CLOSE)
                for other, (theirs, _) in zip(rates, flows, strict=True)
                if key in theirs
            )
        ]
        assert bottlenecks
