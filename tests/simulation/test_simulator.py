"""A replay keeps every rule of the machine, starts nothing late and counts every byte.

``verify`` checks each time of a replay; ``tests/verifier/test_agreement.py`` has it do so.
"""

from bisect import bisect_right
from collections import Counter
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from replay_oracle import held_intervals, inputs_of, lag_s, owner_of, seconds, waiting_graph
from strategies import Scheduled, scheduled

from planner.errors import DeadlockError
from planner.plan.operations import Operation
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

ROUNDING = 1e-9


def replay(case: Scheduled) -> Timeline:
    return simulate(case.pipeline, case.orders)


def ends(timeline: Timeline) -> dict[Operation, float]:
    return {event.operation: event.end_s for event in timeline.operations}


def starts(timeline: Timeline) -> dict[Operation, float]:
    return {event.operation: event.start_s for event in timeline.operations}


# --- the rules ------------------------------------------------------------------------------------


@given(scheduled())
def test_every_operation_runs_once_on_the_device_that_lists_it(case: Scheduled) -> None:
    listed = Counter((device, op) for device, order in case.orders.items() for op in order)
    assert Counter((e.device, e.operation) for e in replay(case).operations) == listed


@given(scheduled())
def test_no_operation_starts_before_its_inputs_are_there(case: Scheduled) -> None:
    timeline = replay(case)
    begin, end = starts(timeline), ends(timeline)
    for operation, start in begin.items():
        for producer, lag in inputs_of(case.pipeline, case.orders, operation):
            assert start >= (end[producer] + lag) * (1 - ROUNDING)


@given(scheduled())
def test_every_result_for_another_stage_is_sent_once(case: Scheduled) -> None:
    """And by the links of its route: none within a device, none of what has no bytes."""
    owner = owner_of(case.orders)
    last = len(case.pipeline.stages) - 1
    wanted = Counter()
    for (stage, microbatch), source in owner.items():
        if stage < last:
            target = owner[stage + 1, microbatch]
            wanted[Operation(stage, "F", microbatch), source, target] += 1
        if stage > 0:
            target = owner[stage - 1, microbatch]
            wanted[Operation(stage, "B", microbatch), source, target] += 1
    transfers = replay(case).transfers
    assert Counter((t.operation, t.source, t.target) for t in transfers) == wanted
    for move in transfers:
        if move.end_s > move.start_s:
            route = case.pipeline.problem.cluster.route(move.source, move.target)
            assert move.links == route.links
        else:
            assert move.source == move.target or not move.links


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


@given(scheduled(shared=True, replicas=False))
def test_without_contention_the_makespan_is_the_longest_path(case: Scheduled) -> None:
    assume(not case.pipeline.synchronisations)
    waits = waiting_graph(case.pipeline, case.orders)
    for device, order in case.orders.items():
        for operation in order:
            last = seconds(case.pipeline, operation, device)
            step = f"optimizer of {device}"
            waits.add_edge(operation, step, weight=last)
            waits.add_edge(step, "end", weight=case.pipeline.optimizer_s[device])
    path = nx.dag_longest_path(waits, weight="weight")
    length = sum(waits[u][v]["weight"] for u, v in pairwise(path))
    assert replay(case).iteration_time_s == pytest.approx(length, rel=1e-9)


# --- bounds ---------------------------------------------------------------------------------------


@given(scheduled())
def test_no_iteration_is_shorter_than_a_devices_work(case: Scheduled) -> None:
    timeline = replay(case)
    for device, order in case.orders.items():
        work = sum(seconds(case.pipeline, op, device) for op in order)
        work += case.pipeline.optimizer_s[device]
        assert timeline.busy_s[device] == pytest.approx(work)
        assert timeline.iteration_time_s >= work * (1 - 1e-9)


@given(scheduled())
def test_no_iteration_is_shorter_than_the_way_of_a_microbatch(case: Scheduled) -> None:
    owner = owner_of(case.orders)
    count = len(case.pipeline.stages)
    for microbatch in range(case.pipeline.microbatches):
        way = [owner[stage, microbatch] for stage in range(count)]
        length = 0.0
        for stage, device in enumerate(way):
            length += seconds(case.pipeline, Operation(stage, "F", microbatch), device)
            length += seconds(case.pipeline, Operation(stage, "I", microbatch), device)
        for stage, (u, v) in enumerate(pairwise(way)):
            length += lag_s(case.pipeline, case.pipeline.stages[stage].output_bytes, u, v)
            length += lag_s(case.pipeline, case.pipeline.stages[stage].output_gradient_bytes, v, u)
        length += seconds(case.pipeline, Operation(0, "W", microbatch), way[0])
        length += case.pipeline.optimizer_s[way[0]]
        assert replay(case).iteration_time_s >= length * (1 - 1e-9)


@given(scheduled())
def test_no_iteration_is_shorter_than_the_traffic_of_a_link(case: Scheduled) -> None:
    timeline = replay(case)
    traffic = Counter()
    for move in timeline.transfers:
        for resource in move.links:
            traffic[resource] += (
                move.transfer.seconds - move.transfer.latency_s
            ) * move.transfer.gb_per_s
    links = case.pipeline.problem.cluster.links
    for (number, _), gigabytes in traffic.items():
        least_s = gigabytes / links[number].bandwidth_gb_per_s
        assert timeline.iteration_time_s >= least_s * (1 - 1e-9)


@given(scheduled())
def test_the_bubble_is_the_idle_share(case: Scheduled) -> None:
    timeline = replay(case)
    span = timeline.iteration_time_s
    assume(span > 0)
    idle = sum(span - busy for busy in timeline.busy_s.values())
    assert timeline.bubble == pytest.approx(idle / (span * len(case.orders)), abs=1e-9)
    assert 0 <= timeline.bubble <= 1


# --- the end of the iteration ---------------------------------------------------------------------


@given(scheduled())
def test_gradients_are_reduced_once_the_last_backwards_have_made_them(case: Scheduled) -> None:
    timeline = replay(case)
    events = timeline.synchronisations
    assert Counter(e.synchronisation for e in events) == Counter(case.pipeline.synchronisations)
    ready = {}
    for event in events:
        members = event.synchronisation
        last = {
            (e.operation.stage, e.device): e
            for e in timeline.operations
            if e.operation.stage in members.stages and e.operation.kind in "BW"
        }
        ready[event] = max(
            max(e.start_s, e.end_s - members.ahead_s(e.operation.kind, e.operation.stage, e.device))
            for e in last.values()
        )
        assert event.start_s >= ready[event]
        alone_s = event.start_s + members.seconds
        # Messages may share its links meanwhile.
        assert event.end_s == alone_s if event.slowed_by is None else event.end_s > alone_s
    for event in events:
        rivals = [
            other.end_s
            for other in events
            if {*other.synchronisation.devices} & {*event.synchronisation.devices}
            and other is not event
            and other.end_s <= event.start_s
        ]
        assert event.start_s == max([ready[event], *rivals])


@given(scheduled())
def test_the_optimizer_step_follows_everything_else(case: Scheduled) -> None:
    timeline = replay(case)
    for device in case.pipeline.devices:
        computed = [e.end_s for e in timeline.operations if e.device == device]
        reduced = [
            e.end_s for e in timeline.synchronisations if device in e.synchronisation.devices
        ]
        step = case.pipeline.optimizer_s[device]
        assert timeline.end_s[device] == max([0.0, *computed, *reduced]) + step
    assert timeline.iteration_time_s == max(timeline.end_s.values())


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


@given(scheduled())
def test_all_memory_is_given_back_in_the_end(case: Scheduled) -> None:
    timeline = replay(case)
    for device, steps in timeline.memory.items():
        static = case.pipeline.static_bytes(device)
        assert steps[-1][1] == static
        assert min(bytes_ for _, bytes_ in steps) >= static


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
