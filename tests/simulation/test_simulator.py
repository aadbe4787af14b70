"""A replay keeps every rule of the machine, starts nothing late and counts every byte."""

from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import pairwise

import networkx as nx
import pytest
from builders import GIGA, boundary, graph, layer, orders, parameter, pipeline, star
from hypothesis import assume, given
from hypothesis import strategies as st
from replay_oracle import held_intervals, inputs_of, lag_s, owner_of, seconds, waiting_graph
from strategies import Scheduled, scheduled

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.errors import DeadlockError
from planner.simulator import Timeline, simulate


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
def test_operations_take_their_time(case: Scheduled) -> None:
    for event in replay(case).operations:
        duration = seconds(case.pipeline, event.operation, event.device)
        assert event.end_s == event.start_s + duration


@given(scheduled())
def test_a_device_runs_its_order_one_operation_at_a_time(case: Scheduled) -> None:
    timeline = replay(case)
    begin, end = starts(timeline), ends(timeline)
    for order in case.orders.values():
        for first, second in pairwise(order):
            assert begin[second] >= end[first]


@given(scheduled())
def test_no_two_transfers_overlap_on_a_link(case: Scheduled) -> None:
    on_link = defaultdict(list)
    for move in replay(case).transfers:
        for resource in move.links:
            on_link[resource].append((move.start_s, move.end_s))
    for rows in on_link.values():
        for (_, end), (start, _) in pairwise(sorted(rows)):
            assert start >= end


@given(scheduled())
def test_a_transfer_takes_latency_and_bytes_over_the_narrowest_link(case: Scheduled) -> None:
    for move in replay(case).transfers:
        stage = case.pipeline.stages[move.operation.stage]
        forward = move.operation.kind == "F"
        size = stage.output_bytes if forward else stage.input_gradient_bytes
        assert move.end_s == move.start_s + lag_s(case.pipeline, size, move.source, move.target)


@given(scheduled())
def test_no_operation_starts_before_its_inputs_are_there(case: Scheduled) -> None:
    timeline = replay(case)
    begin, end = starts(timeline), ends(timeline)
    for operation, start in begin.items():
        for producer, lag in inputs_of(case.pipeline, case.orders, operation):
            assert start >= end[producer] + lag


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


@given(scheduled())
def test_an_operation_starts_as_soon_as_it_can(case: Scheduled) -> None:
    timeline = replay(case)
    begin, end = starts(timeline), ends(timeline)
    arrival = {}
    for move in timeline.transfers:
        stage, kind, microbatch = move.operation
        arrival[stage + (1 if kind == "F" else -1), kind, microbatch] = move.end_s
    for order in case.orders.values():
        free = 0.0
        for operation in order:
            stage, kind, microbatch = operation
            if kind == "W":
                ready = end[Operation(stage, "I", microbatch)]
            elif kind == "F":
                ready = arrival.get((stage, "F", microbatch), 0.0)
            else:
                own = end[Operation(stage, "F", microbatch)]
                ready = max(own, arrival.get((stage, "B", microbatch), 0.0))
            assert begin[operation] == max(free, ready)
            free = end[operation]


@given(scheduled())
def test_a_link_serves_requests_in_their_order_and_without_rest(case: Scheduled) -> None:
    timeline = replay(case)
    end = ends(timeline)

    def requested(move: object) -> float:
        whole, split = (move.operation._replace(kind=kind) for kind in "BI")
        return end.get(move.operation, end.get(whole if whole in end else split))

    for move in timeline.transfers:
        rivals = [u for u in timeline.transfers if u is not move and {*u.links} & {*move.links}]
        before = [u.end_s for u in rivals if u.end_s <= move.start_s]
        assert move.start_s == max([requested(move), *before])
        for other in rivals:
            if requested(other) < requested(move):
                assert other.end_s <= move.start_s


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
            traffic[resource] += move.end_s - move.start_s
    for busy in traffic.values():
        assert timeline.iteration_time_s >= busy * (1 - 1e-9)


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
def test_gradients_are_reduced_after_the_last_backward_one_by_one(case: Scheduled) -> None:
    timeline = replay(case)
    events = timeline.synchronisations
    assert Counter(e.synchronisation for e in events) == Counter(case.pipeline.synchronisations)
    ready = {}
    for event in events:
        members = event.synchronisation
        mine = [
            e.end_s
            for e in timeline.operations
            if e.operation.stage in members.stages and e.operation.kind in "BW"
        ]
        ready[event] = max(mine)
        assert event.start_s >= ready[event]
        assert event.end_s == event.start_s + members.seconds
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
        static = sum(
            stage.static_bytes for stage in case.pipeline.stages if device in stage.spec.devices
        )
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
        assert steps[-1][1] == case.pipeline.static_bytes(device)
        assert min(bytes_ for _, bytes_ in steps) == case.pipeline.static_bytes(device)


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


def test_a_deadlock_names_every_device_that_waits() -> None:
    with pytest.raises(DeadlockError, match="d0 waits at 0B0, d1 waits at 1F0"):
        simulate(two_stages(), orders(d0="0B0 0F0 0F1 0B1", d1="1F0 1B0 1F1 1B1"))


# --- examples worked out by hand ------------------------------------------------------------------


def two_stages(bytes_: int = GIGA // 2, duplex: str = "full", **job: object) -> PlacedPipeline:
    """Forward 1 s, backward 2 s; 10**9 bytes over the one link take 2 s, as two hops of one."""
    the_graph = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=bytes_)])
    return pipeline(the_graph, star(2, duplex=duplex), [(["a"], ["d0"]), (["b"], ["d1"])], **job)


ONE_F_ONE_B = orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1")


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(e.operation): (e.start_s, e.end_s) for e in timeline.operations}


def moves(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(e.operation): (e.start_s, e.end_s) for e in timeline.transfers}


def held_at(timeline: Timeline, device: str, moment: float) -> int:
    return [bytes_ for time, bytes_ in timeline.memory[device] if time <= moment][-1]


def test_two_stages_and_two_microbatches_by_hand() -> None:
    timeline = simulate(two_stages(), ONE_F_ONE_B)
    assert times(timeline) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1.5, 2.5),
        "1B0": (2.5, 4.5),
        "1F1": (4.5, 5.5),
        "1B1": (5.5, 7.5),
        "0B0": (5, 7),
        "0B1": (8, 10),
    }
    assert moves(timeline) == {
        "0F0": (1, 1.5),
        "0F1": (2, 2.5),
        "1B0": (4.5, 5),
        "1B1": (7.5, 8),
    }
    assert timeline.iteration_time_s == 10
    assert timeline.busy_s == {"d0": 6, "d1": 6}
    assert timeline.bubble == pytest.approx(8 / 20)


def test_memory_of_two_stages_by_hand() -> None:
    """Workspace: twice the largest tensor a stage makes. All else is stash and messages."""
    the_graph = graph(
        [layer("a", stash_bytes=100), layer("b", stash_bytes=10)],
        [boundary("a", "b", bytes_=GIGA // 2, saved_by=None)],
    )
    placed = pipeline(the_graph, star(2), [(["a"], ["d0"]), (["b"], ["d1"])])
    timeline = simulate(placed, ONE_F_ONE_B)
    half = GIGA // 2
    assert [held_at(timeline, "d0", moment) for moment in (0.5, 1.2, 1.8, 3, 4.7, 6)] == [
        2 * half + half + 100,  # The first output is being made.
        2 * half + 2 * half + 200,  # It leaves while the second is being made.
        2 * half + half + 200,  # It has left.
        2 * half + 200,  # Both have.
        2 * half + half + 200,  # The first gradient arrives,
        2 * half + half + 200,  # is used,
    ]
    assert [held_at(timeline, "d0", moment) for moment in (7.2, 7.7, 9, 10)] == [
        2 * half + 100,  # and goes together with the stash.
        2 * half + half + 100,
        2 * half + half + 100,
        2 * half,
    ]
    assert [held_at(timeline, "d1", moment) for moment in (0.5, 1.2, 1.8, 2.2, 3, 4.7)] == [
        0,
        half,  # The first input is on its way,
        half + 10,  # has become part of the stash,
        2 * half + 10,  # the second is on its way.
        3 * half + 10,  # The gradient of the first is made.
        2 * half + 10,  # It leaves; the first stash is gone.
    ]
    assert [held_at(timeline, "d1", moment) for moment in (5.2, 6, 7.7, 9)] == [
        half + 10,
        2 * half + 10,
        half,
        0,
    ]
    assert timeline.peak_memory_bytes == {"d0": 4 * half + 200, "d1": 3 * half + 10}


def test_a_split_backward_sends_its_gradient_earlier() -> None:
    timeline = simulate(
        two_stages(), orders(d0="0F0 0F1 0I0 0I1 0W0 0W1", d1="1F0 1I0 1F1 1I1 1W0 1W1")
    )
    assert times(timeline) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1.5, 2.5),
        "1I0": (2.5, 3.5),
        "1F1": (3.5, 4.5),
        "1I1": (4.5, 5.5),
        "1W0": (5.5, 6.5),
        "1W1": (6.5, 7.5),
        "0I0": (4, 5),
        "0I1": (6, 7),
        "0W0": (7, 8),
        "0W1": (8, 9),
    }
    assert moves(timeline)["1B0"] == (3.5, 4)


@pytest.mark.parametrize(("duplex", "gradient"), [("full", (8, 12)), ("half", (9, 13))])
def test_a_half_duplex_link_takes_one_direction_at_a_time(
    duplex: str, gradient: tuple[float, float]
) -> None:
    timeline = simulate(two_stages(4 * GIGA, duplex), ONE_F_ONE_B)
    assert moves(timeline)["0F0"] == (1, 5)
    assert moves(timeline)["0F1"] == (5, 9)
    assert times(timeline)["1B0"] == (6, 8)
    assert moves(timeline)["1B0"] == gradient


def test_a_shared_link_takes_all_transfers_at_once() -> None:
    the_graph = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=4 * GIGA)])
    stages = [(["a"], ["d0"]), (["b"], ["d1"])]
    timeline = simulate(pipeline(the_graph, star(2, shared=True), stages), ONE_F_ONE_B)
    assert moves(timeline)["0F0"] == (1, 5)
    assert moves(timeline)["0F1"] == (2, 6)


def test_the_iteration_ends_with_all_reduce_and_optimizer_step_by_hand() -> None:
    """4 GB of gradients on two replicas: a ring sends half of them twice, 4 s at 1 GB/s.

    Plain SGD reads weights and gradients and writes weights: 12 GB at 1000 GB/s.
    """
    the_graph = graph(
        [layer("a", parameters=["w"])], parameters=[parameter("w", elements=GIGA)], boundaries=[]
    )
    placed = pipeline(the_graph, star(2), [(["a"], ["d0", "d1"])], microbatches=3)
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2"))
    (event,) = timeline.synchronisations
    assert (event.start_s, event.end_s) == (6, 10)
    assert timeline.end_s == pytest.approx({"d0": 10.012, "d1": 10.012})
    assert timeline.busy_s == pytest.approx({"d0": 6.012, "d1": 3.012})


def test_adamw_moves_its_two_moments_as_well() -> None:
    the_graph = graph(
        [layer("a", parameters=["w"])], parameters=[parameter("w", elements=GIGA)], boundaries=[]
    )
    placed = pipeline(the_graph, star(1), [(["a"], ["d0"])], optimizer="adamw", microbatches=1)
    timeline = simulate(placed, orders(d0="0F0 0B0"))
    assert timeline.iteration_time_s == pytest.approx(3 + 0.012 + 0.016)


def test_tied_parameters_are_reduced_between_their_stages() -> None:
    the_graph = graph(
        [layer("a", parameters=["w"]), layer("b", parameters=["w"])],
        [boundary("a", "b", bytes_=0)],
        [parameter("w", elements=GIGA)],
    )
    placed = pipeline(the_graph, star(2), [(["a"], ["d0"]), (["b"], ["d1"])], microbatches=1)
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="1F0 1B0"))
    (event,) = timeline.synchronisations
    assert event.synchronisation.stages == (0, 1)
    assert (event.start_s, event.end_s) == (6, 10)


def test_a_reduction_that_waits_for_another_is_listed_after_one_that_does_not() -> None:
    """c-d and d-e share device d3; a-b is ready last and yet starts before c-d can."""
    tied = {"a": ["ab"], "b": ["ab"], "c": ["cd"], "d": ["cd", "de"], "e": ["de"]}
    the_graph = graph(
        [layer(name, parameters=names) for name, names in tied.items()],
        [boundary(u, v, bytes_=0) for u, v in pairwise(tied)],
        [parameter("ab", GIGA), parameter("cd", GIGA), parameter("de", 100 * GIGA)],
    )
    stages = [([name], [f"d{index}"]) for index, name in enumerate(tied)]
    placed = pipeline(the_graph, star(5), stages, microbatches=1)
    timeline = simulate(placed, orders(**{f"d{i}": f"{i}F0 {i}B0" for i in range(5)}))
    found = [(e.synchronisation.stages, e.start_s, e.end_s) for e in timeline.synchronisations]
    assert found == [((3, 4), 9, 409), ((0, 1), 15, 19), ((2, 3), 409, 413)]


def test_two_stages_on_a_device_hand_over_without_a_transfer() -> None:
    placed = pipeline(
        graph([layer("a"), layer("b")]),
        star(1),
        [(["a"], ["d0"]), (["b"], ["d0"])],
        microbatches=1,
    )
    timeline = simulate(placed, orders(d0="0F0 1F0 1B0 0B0"))
    assert timeline.iteration_time_s == 6
    assert [(t.source, t.target, t.start_s, t.end_s) for t in timeline.transfers] == [
        ("d0", "d0", 1, 1),
        ("d0", "d0", 4, 4),
    ]
