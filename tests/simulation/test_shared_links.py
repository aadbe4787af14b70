"""Links that share: rates are max-min fair, and alone everything takes its time."""

from __future__ import annotations

from collections import defaultdict

import pytest
from builders import (
    GIGA,
    boundary,
    checked,
    cluster,
    graph,
    layer,
    link,
    orders,
    parameter,
    pipeline,
    star,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import Scheduled, scheduled

from planner.assembly import plan_by_hand
from planner.costs.network_table import NetworkTable
from planner.costs.placed_pipeline import PlacedPipeline
from planner.search.orders.bound import StagesBound
from planner.simulation.fair_rates import Link, fair_rates
from planner.simulation.simulator import simulate
from planner.verification import verify

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
    shared = simulate(two_pairs(1), BOTH)
    assert [(e.start_s, e.end_s) for e in shared.transfers[:2]] == [(1, 3), (1, 3)]
    # Forward and backward, there and back, where the first has to itself what the other waits for.
    assert shared.iteration_time_s == pytest.approx(1 + 2 + 1 + 2 + 2 + 2)


def test_messages_of_one_pair_go_one_after_the_other() -> None:
    """Those of two pairs have half of the uplink each; the third waits for its pair's first."""
    late = orders(d0="0F0 0B0", d1="0F1 0F2 0B1 0B2", d2="1F0 1B0", d3="1F1 1F2 1B1 1B2")
    timeline = simulate(two_pairs(0.5), late)
    arrivals = {str(e.operation): e.end_s for e in timeline.transfers if e.operation.kind == "F"}
    assert arrivals == {"0F0": 1 + 4, "0F1": 1 + 4, "0F2": 5 + 2}


def test_who_comes_later_takes_a_share_of_what_is_left() -> None:
    """The first sends alone for a second; then both have half until it has sent the rest."""
    timeline = simulate(two_pairs(0.5, later_s=1), BOTH)
    arrivals = {str(e.operation): e.end_s for e in timeline.transfers if e.operation.kind == "F"}
    assert arrivals == {"0F0": pytest.approx(1 + 1 + 2), "0F1": pytest.approx(4 + 1)}


def reducing(overlap: bool, **rules: object) -> PlacedPipeline:
    """Stage x on d0 and d1, with 1 GB of gradients; y on d2. All around one switch, half duplex.

    A forward takes 1 s, a backward 2 s, a message 1 s.
    """
    the_graph = graph(
        [layer("x", parameters=["w"]), layer("y")],
        [boundary("x", "y", bytes_=GIGA)],
        parameters=[parameter("w", elements=GIGA // 4)],
    )
    stages = [(["x"], ["d0", "d1"]), (["y"], ["d2"])]
    return pipeline(
        the_graph, star(3, duplex="half"), stages, microbatches=2, overlap_reduction=overlap
    )


def test_a_reduction_shares_links_with_messages() -> None:
    """Two pairs of 2 replicas; the second group's messages cross the links of a reduction.

    Stage 0 is on d0 and d1, stage 1 on d2. 0F0 arrives at 2, 0F1 at 3: at 1 both set off over d2's
    link, half a GB/s each, so both arrive at 3. 1F0 3-4, 1F1 4-5, 1B0 5-7, 1B1 7-9; the gradients
    arrive at 8 and 10; 0B0 8-10, 0B1 10-12. Nothing else is on its way when the reduction starts.
    Each half duplex link carries both directions of both edges of the ring: 2 steps of half a GB
    at half a GB/s, 2 s.
    """
    the_orders = orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1F1 1B0 1B1")
    timeline = simulate(reducing(overlap=False), the_orders)
    (reduction,) = timeline.synchronisations
    assert (reduction.start_s, reduction.end_s) == (12, 14)


def test_two_reductions_and_a_message_share_an_uplink() -> None:
    """Stages x and y have replicas on both sides of an uplink of 1 GB/s, full duplex.

    x is on a0 and b0, y on a1 and b1; gradients of 1 GB each; nothing passes between the stages
    (a boundary without bytes). A forward takes 1 s, a backward 2 s: a's microbatch and b's are
    through at 1 + 1 + 2 + 2 = 6, y's reduction begins at 4 and x's at 6. Alone each takes 2 steps
    of half a GB: 1 s; y's is over when x's begins.
    With backwards of x that take no time both begin at 4 and share the uplink in both directions:
    2 s each.
    """

    def ends(backward_s: float) -> list[tuple[float, float]]:
        the_graph = graph(
            [layer("x", 1, backward_s, parameters=["v"]), layer("y", parameters=["w"])],
            [boundary("x", "y", bytes_=0)],
            parameters=[parameter(name, elements=GIGA // 4) for name in "vw"],
        )
        names = ["a0", "a1", "b0", "b1"]
        links = [link(name, name[0], 10) for name in names]
        the_cluster = cluster(names, [*links, link("a", "b", 1)], ["a", "b"])
        stages = [(["x"], ["a0", "b0"]), (["y"], ["a1", "b1"])]
        placed = pipeline(the_graph, the_cluster, stages, microbatches=2, overlap_reduction=False)
        both = orders(a0="0F0 0B0", b0="0F1 0B1", a1="1F0 1B0", b1="1F1 1B1")
        return [(e.start_s, e.end_s) for e in simulate(placed, both).synchronisations]

    assert ends(2) == [(4, 5), (6, 7)]
    assert ends(0) == [(4, 6), (4, 6)]


@given(scheduled(slowed=True))
def test_no_message_is_faster_than_alone_and_no_link_than_full(case: Scheduled) -> None:
    """Messages and reductions: over any span of time a link carries no more than its bandwidth."""
    timeline = simulate(case.pipeline, case.orders)
    carried, links = defaultdict(list), NetworkTable.of(case.pipeline.problem.cluster).links
    for event in timeline.transfers:
        alone_s = event.transfer.seconds
        assert event.end_s - event.start_s >= alone_s * (1 - CLOSE)
        moved = (alone_s - event.transfer.latency_s) * event.transfer.gb_per_s
        for used in event.links:
            carried[used].append((event.start_s, event.end_s, moved))
    for event in timeline.synchronisations:
        alone_s, load = event.synchronisation.seconds, event.synchronisation.load
        assert event.end_s - event.start_s >= alone_s * (1 - CLOSE)
        for used in (links[number] for number in load.links):
            moved = (alone_s - load.latency_s) * load.gb_per_s
            carried[used].append((event.start_s, event.end_s, moved))
    for used, rows in carried.items():
        width = case.pipeline.problem.cluster.links[used[0]].bandwidth_gb_per_s
        for begin in {row[0] for row in rows}:
            for end in {row[1] for row in rows}:
                within = sum(row[2] for row in rows if begin <= row[0] and row[1] <= end)
                assert within <= max(0.0, end - begin) * width * (1 + CLOSE) + CLOSE


@given(scheduled())
def test_bounds_on_schedules_hold_where_links_are_shared(case: Scheduled) -> None:
    fair, placed = simulate(case.pipeline, case.orders), case.pipeline
    bound_s = StagesBound(placed, splits=True).seconds
    assert bound_s <= fair.iteration_time_s * (1 + CLOSE)


def test_verify_shares_links_too() -> None:
    """Two messages on one uplink: 10 s."""
    plan = plan_by_hand(two_pairs(1), BOTH)
    assert checked(plan).iteration_time_s == 10
    assert verify(plan) == []


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[tuple[tuple[Link, ...], float]], dict[Link, float]]:
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
