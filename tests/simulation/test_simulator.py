"""A replay starts nothing late and counts every byte, and ends unless its orders wait in a circle.

That it keeps every rule of the machine is checked by ``verify``, which has each time of a replay
checked in ``tests/verifier/test_agreement.py``.
"""

from bisect import bisect_right

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_oracle import held_intervals, waiting_graph
from strategies import Scheduled, scheduled

from planner.errors import DeadlockError
from planner.plan.operations import Operation
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


def replay(case: Scheduled) -> Timeline:
    return simulate(case.pipeline, case.orders)


def starts(timeline: Timeline) -> dict[Operation, float]:
    return {event.operation: event.start_s for event in timeline.operations}


# --- the rules ------------------------------------------------------------------------------------


@given(scheduled())
def test_events_are_listed_in_order_of_start(case: Scheduled) -> None:
    timeline = replay(case)
    for events in (timeline.operations, timeline.transfers, timeline.synchronisations):
        times = [event.start_s for event in events]
        assert times == sorted(times)


# --- nothing late ---------------------------------------------------------------------------------


@given(scheduled(shared=True, replicas=False))
def test_without_contention_starts_are_the_longest_paths(case: Scheduled) -> None:
    """Where all links are shared only operations and latencies count."""
    timeline = replay(case)
    waits = waiting_graph(case.pipeline, case.orders)
    distance = dict.fromkeys(waits, 0.0)
    for node in nx.topological_sort(waits):
        for _, later, weight in waits.out_edges(node, data="weight"):
            distance[later] = max(distance[later], distance[node] + weight)
    assert starts(timeline) == pytest.approx(distance, rel=1e-9, abs=1e-12)


# --- memory ---------------------------------------------------------------------------------------


@given(scheduled())
def test_the_memory_profile_is_the_sum_of_what_is_held(case: Scheduled) -> None:
    timeline = replay(case)
    held = list(held_intervals(timeline))
    for device, steps in timeline.memory.items():
        held_here = [s for s in case.pipeline.stages if device in s.spec.devices]
        static = sum(stage.static_bytes for stage in held_here)
        static += max(stage.workspace_bytes for stage in held_here)
        mine = [row[1:] for row in held if row[0] == device]
        times = [time for time, _ in steps]
        assert times[0] == 0
        assert times == sorted(set(times))
        expected = {
            moment: static + sum(b for begin, end, b in mine if begin <= moment < end)
            for moment in {*times, *(t for row in mine for t in row[:2])}
        }
        said = {moment: steps[bisect_right(times, moment) - 1][1] for moment in expected}
        assert said == expected
        assert timeline.peak_memory_bytes[device] == max(expected.values())


# --- deadlock -------------------------------------------------------------------------------------


@given(scheduled(min_devices=2), st.randoms(use_true_random=False))
def test_orders_deadlock_exactly_if_they_wait_in_a_circle(case: Scheduled, random: object) -> None:
    mixed = {device: list(order) for device, order in case.orders.items()}
    for order in mixed.values():
        for _ in range(2):
            if len(order) > 1:
                i, j = random.sample(range(len(order)), 2)
                order[i], order[j] = order[j], order[i]
    waits = waiting_graph(case.pipeline, mixed)
    circles = [group for group in nx.strongly_connected_components(waits) if len(group) > 1]
    never = {later for group in circles for later in nx.descendants(waits, next(iter(group)))}
    never |= {operation for group in circles for operation in group}
    if not never:
        simulate(case.pipeline, mixed)
        return
    with pytest.raises(DeadlockError) as raised:
        simulate(case.pipeline, mixed)
    for device, order in mixed.items():
        stuck = [operation for operation in order if operation in never]
        assert (f"{device} waits at" in str(raised.value)) == bool(stuck)
        if stuck:
            assert f"{device} waits at {stuck[0]}" in str(raised.value)
