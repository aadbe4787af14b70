"""An explanation's critical path has no gap, its bounds hold, its verdicts were worked out by hand.

By hand: forward 1 s and backward 2 s unless told otherwise, 10**9 bytes take a second.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from builders import (
    GIGA,
    boundary,
    cluster,
    device_type,
    graph,
    layer,
    link,
    orders,
    parameter,
    pipeline,
    star,
)
from chains import ALTERNATING, GIB, ONE_F_ONE_B, chain, crowded
from event_graph import event_graph, longest_path_s, name_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import Scheduled, partitions, problems, runtimes, scheduled

from planner.analysis.explain import Explanation, explain
from planner.analysis.explain.path_shares import Spent
from planner.costs.placement import place
from planner.errors import DeadlockError
from planner.plan.runtime_rules import RuntimeRules
from planner.schedules.best import best_schedule
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


def replay(case: Scheduled) -> Timeline:
    return simulate(case.pipeline, case.orders)


def spent(explanation: Explanation) -> dict[Spent, float]:
    return {share.spent: share.seconds for share in explanation.shares}


# --- the critical path ----------------------------------------------------------------------------


@given(scheduled())
def test_the_path_runs_from_zero_to_the_end_without_a_gap(case: Scheduled) -> None:
    timeline = replay(case)
    path = explain(timeline).critical_path
    assert path[0].event.start_s == 0
    for first, second in pairwise(path):
        assert second.event.start_s == pytest.approx(first.event.end_s, rel=1e-9, abs=1e-9)
    assert path[-1].event.end_s == timeline.iteration_time_s
    total = sum(step.seconds for step in path)
    assert total == pytest.approx(timeline.iteration_time_s, rel=1e-9)


@given(scheduled())
def test_every_event_of_the_path_has_to_wait_for_the_one_before(case: Scheduled) -> None:
    timeline = replay(case)
    waits = event_graph(timeline)
    for first, second in pairwise(explain(timeline).critical_path):
        assert waits.has_edge(name_of(first.event), name_of(second.event))


@given(scheduled())
def test_no_chain_of_waiting_events_is_longer_than_the_path(case: Scheduled) -> None:
    timeline = replay(case)
    total = sum(step.seconds for step in explain(timeline).critical_path)
    assert total == pytest.approx(longest_path_s(event_graph(timeline)), rel=1e-9)


@given(scheduled())
def test_what_an_event_waited_for_is_named(case: Scheduled) -> None:
    kinds = {
        ("operation", "operation"): "device",
        ("transfer", "operation"): "tensor",
        ("operation", "transfer"): "producer",
        ("transfer", "transfer"): "link",
        ("operation", "reduction"): "last backward",
        ("reduction", "reduction"): "network",
        ("operation", "optimizer"): "device",
        ("reduction", "optimizer"): "reduction",
    }
    path = explain(replay(case)).critical_path
    assert path[0].waited_for == "nothing"
    for first, second in pairwise(path):
        pair = name_of(first.event)[0], name_of(second.event)[0]
        assert second.waited_for == kinds[pair]


@given(scheduled())
def test_shares_sum_to_the_whole_path_the_largest_first(case: Scheduled) -> None:
    timeline = replay(case)
    explanation = explain(timeline)
    seconds = [share.seconds for share in explanation.shares]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(seconds) == pytest.approx(timeline.iteration_time_s, rel=1e-9)
    if timeline.iteration_time_s > 0:
        assert sum(share.share for share in explanation.shares) == pytest.approx(1)


@given(scheduled(slowed=True), runtimes())
def test_the_parts_of_an_iteration_sum_to_its_whole(case: Scheduled, rules: RuntimeRules) -> None:
    """Under any runtime, and where devices are slowed; alone nothing is slowed or shared."""
    placed = place(
        replace(case.pipeline.problem, runtime=rules),
        [stage.spec for stage in case.pipeline.stages],
        case.pipeline.sync,
    )
    try:
        timeline = simulate(placed, case.orders)
    except DeadlockError:
        return
    explanation = explain(timeline)
    parts = {part.name: part.seconds for part in explanation.parts}
    assert sum(parts.values()) == pytest.approx(timeline.iteration_time_s, rel=1e-9)
    assert all(seconds > 0 for seconds in parts.values())
    alone = all(timeline.stretch(event) < 1 + 1e-9 for event in timeline.operations)
    if alone and not placed.problem.cluster.host_of:
        assert "slowed computation" not in parts
    spent = [share for share in explanation.shares if share.spent.cause == "optimizer"]
    if not placed.problem.cluster.host_of:
        optimizer_s = sum(share.seconds for share in spent)
        assert parts.get("optimizer step", 0.0) == pytest.approx(optimizer_s, abs=1e-9)


def test_the_parts_of_an_iteration_by_hand() -> None:
    """Three forwards, three backwards and two messages on the path; 1 s is lost beside messages."""
    slow = device_type(compute_slowdown_while_communicating=2, host_link_gb_per_s=4)
    machines = cluster(["d0", "d1"], [link("d0", "d1")], types={"unit": slow})
    rows = [layer("a", 0.75, batch_bytes=GIGA), layer("loss")]
    placed = pipeline(graph(rows), machines, [(["a"], ["d0"]), (["loss"], ["d1"])])
    the_orders = orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1")
    explanation = explain(simulate(placed, the_orders))
    assert {part.name: part.seconds for part in explanation.parts} == {
        "loss": 1 + 2 + 1 + 2,
        "forwards": 0.75,
        "copying the batch": 0.25,
        "backwards": 2,
        "messages": 2,
        "slowed computation": 1,
    }


@given(scheduled())
def test_a_computations_share_is_its_stages_on_its_device(case: Scheduled) -> None:
    explanation = explain(replay(case))
    expected = Counter()
    for step in explanation.critical_path:
        if name_of(step.event)[0] == "operation":
            expected[step.event.device, step.event.operation.stage] += step.seconds
    found = {
        (share.spent.on[0], share.spent.stages[0]): share.seconds
        for share in explanation.shares
        if share.spent.cause == "computation"
    }
    assert found == pytest.approx({key: value for key, value in expected.items() if value > 0})


# --- lower bounds ---------------------------------------------------------------------------------


def assert_bounds_hold(timeline: Timeline) -> None:
    for resource in explain(timeline).resources:
        assert min(resource.head_s, resource.load_s, resource.tail_s) >= 0
        assert resource.bound_s <= timeline.iteration_time_s * (1 + 1e-9)


@given(scheduled(slowed=True))
def test_no_device_or_link_has_a_bound_above_the_iteration(case: Scheduled) -> None:
    assert_bounds_hold(replay(case))


@given(st.data(), problems())
def test_bounds_hold_for_good_schedules_whole_and_split(data: st.DataObject, problem) -> None:
    placed = place(problem, data.draw(partitions(problem)))
    best = best_schedule(placed, backward="whole")
    assert best is not None
    assert_bounds_hold(best.timeline)
    split = best_schedule(placed, backward="split")
    assert split is not None
    assert_bounds_hold(split.timeline)


@given(scheduled())
def test_the_highest_bound_comes_first_and_all_devices_have_one(case: Scheduled) -> None:
    explanation = explain(replay(case))
    bounds = [resource.bound_s for resource in explanation.resources]
    assert bounds == sorted(bounds, reverse=True)
    named = [row.name for row in explanation.resources if row.kind == "device"]
    assert sorted(named) == sorted(case.pipeline.devices)


# --- by hand --------------------------------------------------------------------------------------


def test_a_slow_stage_binds() -> None:
    """One forward before stage 1's 4 * 12 s and one backward after them."""
    explanation = explain(simulate(chain((1, 2), (4, 8), microbatches=4), ONE_F_ONE_B))
    assert explanation.iteration_time_s == 51
    assert spent(explanation) == {
        Spent("computation", ("d1",), (1,)): 48,
        Spent("computation", ("d0",), (0,)): 3,
    }
    binding = explanation.binding_resource
    assert (binding.name, binding.head_s, binding.load_s, binding.tail_s) == ("d1", 1, 48, 2)


def test_a_slow_link_binds() -> None:
    """Three transfers of 8 s one after the other; the last gradient takes as long again."""
    placed = chain((1, 2), (1, 2), bytes_=8 * GIGA, microbatches=3)
    explanation = explain(
        simulate(placed, orders(d0="0F0 0F1 0F2 0B0 0B1 0B2", d1="1F0 1B0 1F1 1B1 1F2 1B2"))
    )
    assert explanation.iteration_time_s == 38
    assert spent(explanation) == {
        Spent("transfers", ("d0>hub",)): 24,
        Spent("transfers", ("d1>hub",)): 8,
        Spent("computation", ("d0",), (0,)): 3,
        Spent("computation", ("d1",), (1,)): 3,
    }
    waits = [step.waited_for for step in explanation.critical_path]
    assert waits == [
        *("nothing", "producer", "link", "link", "tensor", "device", "producer", "tensor"),
        "device",
    ]
    binding = explanation.binding_resource
    assert (binding.kind, binding.name) == ("link", "d0>hub")
    assert (binding.head_s, binding.load_s, binding.tail_s) == (1, 24, 13)


def test_the_link_that_transfers_queue_for_is_named_among_links_as_narrow() -> None:
    """Two replicas send to d2 at the same time: hub>d2 is what the second waits for."""
    the_graph = graph([layer("a"), layer("b", 0, 0)], [boundary("a", "b", bytes_=8 * GIGA)])
    placed = pipeline(the_graph, star(3), [(["a"], ["d0", "d1"]), (["b"], ["d2"])])
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1F1 1B0 1B1"))
    found = spent(explain(timeline))
    assert found[Spent("transfers", ("hub>d2",))] == 16
    # The gradients' way back: d2 sends both.
    assert found[Spent("transfers", ("d2>hub",))] == 16


def test_transfers_over_shared_links_are_named_by_their_ends() -> None:
    the_graph = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=4 * GIGA)])
    stages = [(["a"], ["d0"]), (["b"], ["d1"])]
    placed = pipeline(the_graph, star(2, shared=True), stages, microbatches=1)
    explanation = explain(simulate(placed, orders(d0="0F0 0B0", d1="1F0 1B0")))
    found = spent(explanation)
    assert found[Spent("transfers", ("d0>d1",))] == 4
    assert found[Spent("transfers", ("d1>d0",))] == 4
    assert {row.kind for row in explanation.resources} == {"device"}


def test_one_microbatch_is_bound_by_its_way_there_and_back() -> None:
    """d3 has three forwards before its own 3 s and three backwards after them."""
    placed = chain(*[(1, 2)] * 4, microbatches=1)
    explanation = explain(simulate(placed, orders(**{f"d{i}": f"{i}F0 {i}B0" for i in range(4)})))
    assert explanation.iteration_time_s == 12
    bounds = [(row.head_s, row.load_s, row.tail_s) for row in explanation.resources]
    assert bounds == [(3, 3, 6), (2, 3, 4), (1, 3, 2), (0, 3, 0)]


def test_a_long_all_reduce_binds() -> None:
    """40 GB of gradients on two replicas take 40 s; SGD moves 120 GB at 1000 GB/s."""
    the_graph = graph(
        [layer("a", parameters=["w"])], parameters=[parameter("w", 10 * GIGA)], boundaries=[]
    )
    placed = pipeline(the_graph, star(2), [(["a"], ["d0", "d1"])], microbatches=3)
    explanation = explain(simulate(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2")))
    assert spent(explanation) == pytest.approx(
        {
            Spent("all-reduce", ("d0", "d1"), (0,)): 40,
            Spent("computation", ("d0",), (0,)): 6,
            Spent("optimizer", ("d0",)): 0.12,
        }
    )
    binding = explanation.binding_resource
    assert (binding.name, binding.load_s) == ("d0", pytest.approx(6))
    assert binding.tail_s == pytest.approx(40.12)


def test_weight_gradients_put_off_are_no_tail() -> None:
    """d1: 1 s until its first microbatch, 4 s of forwards and input gradients, one 0I1 and 0W1."""
    placed = chain((1, 2), (1, 2), microbatches=2)
    timeline = simulate(placed, orders(d0="0F0 0F1 0I0 0I1 0W0 0W1", d1="1F0 1I0 1F1 1I1 1W0 1W1"))
    rows = {row.name: row for row in explain(timeline).resources}
    assert (rows["d1"].head_s, rows["d1"].load_s, rows["d1"].tail_s) == (1, 6, 0)
    assert rows["d0"].bound_s == 6


# --- memory ---------------------------------------------------------------------------------------


def test_memory_binds_where_more_of_it_makes_the_schedule_faster() -> None:
    """With two microbatches in flight stage 1 never waits: 1 + 4 * 3 + 2 s.

    Split backwards alone make 16 s of 24: stage 0 goes on while stage 1's weights are left.
    """
    timeline = simulate(crowded(1.5), ALTERNATING)
    memory = explain(timeline).memory
    assert memory.full == ("d0",)
    assert timeline.iteration_time_s == 24
    assert (memory.within_s, memory.unlimited_s) == (16, 15)
    assert memory.binds
    assert memory.gain == pytest.approx(1 - 15 / 16)


def test_memory_does_not_bind_where_there_is_room_whatever_the_order() -> None:
    memory = explain(simulate(crowded(4.5), ALTERNATING)).memory
    assert memory.rooms[0].more_microbatches == 3
    assert memory.rooms[1].more_microbatches is None
    assert (memory.full, memory.unlimited_s, memory.binds) == ((), None, False)


def test_a_full_device_that_gains_nothing_does_not_bind() -> None:
    the_graph = graph([layer("a", stash_bytes=GIB)], [])
    small = cluster({"d0": "small"}, [], types={"small": device_type(memory_gib=1.5)})
    placed = pipeline(the_graph, small, [(["a"], ["d0"])])
    memory = explain(simulate(placed, orders(d0="0F0 0B0 0F1 0B1"))).memory
    assert memory.full == ("d0",)
    assert (memory.within_s, memory.unlimited_s, memory.binds) == (6, 6, False)


def test_recomputation_is_counted_as_what_memory_costs() -> None:
    """Its backward runs the forward again: 4 s instead of 3 for each of two microbatches."""
    the_graph = graph([layer("a", stash_bytes=GIB)], [])
    small = cluster({"d0": "small"}, [], types={"small": device_type(memory_gib=0.9)})
    placed = pipeline(the_graph, small, [(["a"], ["d0"], ["a"])])
    memory = explain(simulate(placed, orders(d0="0F0 0B0 0F1 0B1"))).memory
    assert memory.recomputes
    assert (memory.within_s, memory.unlimited_s, memory.binds) == (8, 6, True)


@given(scheduled())
def test_room_is_what_the_peak_leaves(case: Scheduled) -> None:
    timeline = replay(case)
    for room in explain(timeline).memory.rooms:
        assert room.peak_bytes == timeline.peak_memory_bytes[room.device]
        stages = case.pipeline.stages_on[room.device]
        stash = max(case.pipeline.stages[stage].stash_bytes for stage in stages)
        more = room.more_microbatches
        if more is None:
            assert stash == 0
        else:
            assert room.peak_bytes + more * stash <= room.capacity_bytes
            assert room.peak_bytes + (more + 1) * stash > room.capacity_bytes
