"""Small pipelines whose timelines were worked out by hand."""

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

from planner.analysis.explain.explanation import explain
from planner.cluster.cluster_file import Host
from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError, PipeplanError
from planner.simulation.critical_path import critical_path
from planner.simulation.simulator import simulate
from planner.simulation.timeline import OperationEvent, Timeline


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
    assert moves(timeline) == {"0F0": (1, 1.5), "0F1": (2, 2.5), "1B0": (4.5, 5), "1B1": (7.5, 8)}
    assert timeline.iteration_time_s == 10
    assert timeline.busy_s == {"d0": 6, "d1": 6}
    assert timeline.bubble == pytest.approx(8 / 20)


def test_devices_of_one_host_slow_each_other_by_hand() -> None:
    """While both compute each takes twice as long: 0F1 beside 1F0, 0B0 beside 1F1, then 1B1."""
    the_graph = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=0)])
    shared = star(2).model_copy(update={"hosts": (Host(devices=("d0", "d1"), slowdown=(1, 2)),)})
    stages = [(["a"], ["d0"]), (["b"], ["d1"])]
    timeline = simulate(pipeline(the_graph, shared, stages), ONE_F_ONE_B)
    assert times(timeline) == {
        "0F0": (0, 1),
        "0F1": (1, 3),
        "1F0": (1, 3),
        "1B0": (3, 5),
        "0B0": (5, 9),
        "1F1": (5, 7),
        "1B1": (7, 10),
        "0B1": (10, 12),
    }
    assert timeline.busy_s == {"d0": 9, "d1": 9}
    events = [step.event for step in critical_path(timeline)]
    ran = [str(event.operation) for event in events if isinstance(event, OperationEvent)]
    assert ran == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def of_slowed_devices(**factor: float) -> Timeline:
    """Two stages in 1F1B; a message takes a second alone."""
    slow = {"unit": device_type(**factor)}
    machines = cluster(["d0", "d1"], [link("d0", "d1")], types=slow)
    stages = [(["a"], ["d0"]), (["b"], ["d1"])]
    return simulate(pipeline(graph([layer("a"), layer("b")]), machines, stages), ONE_F_ONE_B)


def test_messages_slow_the_computation_of_both_their_devices_by_hand() -> None:
    """Factor 2 while a message moves, which takes 1 s: half a second's work is done beside each.

    0F1 begins with the first activations, 1F0 ends with the second, and 1F1 begins with the
    gradients of 1B0.
    """
    timeline = of_slowed_devices(compute_slowdown_while_communicating=2)
    assert times(timeline) == {
        "0F0": (0, 1),
        "0F1": (1, 2.5),
        "1F0": (2, 3.5),
        "1B0": (3.5, 5.5),
        "1F1": (5.5, 7),
        "0B0": (6.5, 8.5),
        "1B1": (7, 9),
        "0B1": (10, 12),
    }
    assert sum(step.seconds for step in critical_path(timeline)) == timeline.iteration_time_s == 12


def test_computation_slows_the_messages_of_its_device_by_hand() -> None:
    """Factor 2 while either end computes; a message takes 1 s alone.

    The first activations move half of their way beside 0F1, and the rest alone. The second ones
    have 1F0 and 1B0 beside all of their way, the first gradients 1F1 and then 1B1, and the last
    ones 0B0 for a second.
    """
    timeline = of_slowed_devices(communication_slowdown_while_computing=2)
    assert times(timeline) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (2.5, 3.5),
        "1B0": (3.5, 5.5),
        "1F1": (5.5, 6.5),
        "1B1": (6.5, 8.5),
        "0B0": (7.5, 9.5),
        "0B1": (10, 12),
    }
    assert moves(timeline) == {
        "0F0": (1, 2.5),
        "0F1": (2.5, 4.5),
        "1B0": (5.5, 7.5),
        "1B1": (8.5, 10),
    }
    parts = {part.name: part.seconds for part in explain(timeline).parts}
    assert parts["slowed messages"] == 1


@pytest.mark.parametrize(("factor", "end_s"), [(1, 6), (2, 7)])
def test_a_bucket_slows_the_rest_of_its_backward_by_hand(factor: float, end_s: float) -> None:
    """Two replicas: w's gradients are made in the middle of the backward, and reduced for 4 s.

    Of the backward of 2 s the last second, that of the first layer, takes 2 s beside the reduction
    that begins as it does. If that is slowed by half in turn, a second's work of it is done by
    then, in place of two.
    """
    slow = {
        "unit": device_type(
            compute_slowdown_while_communicating=2, communication_slowdown_while_computing=factor
        )
    }
    machines = cluster(["d0", "d1"], [link("d0", "d1")], types=slow)
    rows = [layer("a", 0.5, 1), layer("b", 0.5, 1, parameters=["w"])]
    the_graph = graph(rows, parameters=[parameter("w", GIGA)])
    placed = pipeline(the_graph, machines, [(["a", "b"], ["d0", "d1"])])
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="0F1 0B1"))
    assert times(timeline) == {name: (0, 1) if "F" in name else (1, 4) for name in times(timeline)}
    (reduction,) = timeline.synchronisations
    assert (reduction.start_s, reduction.end_s) == (2, end_s)


def test_optimizer_steps_of_one_host_slow_each_other_by_hand() -> None:
    """Two replicas that step at once take twice as long as one alone."""
    the_graph = graph([layer("a", parameters=["w"])], parameters=[parameter("w", 10**9)])
    host = Host(devices=("d0", "d1"), slowdown=(1, 2))
    one = pipeline(the_graph, star(2), [(["a"], ["d0"])], microbatches=1)
    alone_s = one.optimizer_s["d0"]
    shared = star(2).model_copy(update={"hosts": (host,)})
    both = pipeline(the_graph, shared, [(["a"], ["d0", "d1"])], microbatches=2)
    timeline = simulate(both, orders(d0="0F0 0B0", d1="0F1 0B1"))
    assert times(timeline) == {name: (0, 2) if "F" in name else (2, 6) for name in times(timeline)}
    assert timeline.optimizer_s == pytest.approx({"d0": 2 * alone_s, "d1": 2 * alone_s})


def test_memory_of_two_stages_by_hand() -> None:
    """As a runs it holds a giga beside its stash. All else is stash and messages."""
    the_graph = graph(
        [
            layer("a", stash_bytes=100, peak_bytes=GIGA + 100),
            layer("b", stash_bytes=10, peak_bytes=10),
        ],
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


@pytest.mark.parametrize(
    ("duplex", "activation", "gradient"), [("full", (5, 9), (8, 12)), ("half", (5, 10), (8, 13))]
)
def test_the_two_directions_of_a_half_duplex_link_share_it(
    duplex: str, activation: tuple[float, float], gradient: tuple[float, float]
) -> None:
    """At 8 a fourth of 0F1 is left: 2 s at half the rate; then 1B0 has sent a fourth."""
    timeline = simulate(two_stages(4 * GIGA, duplex), ONE_F_ONE_B)
    assert moves(timeline)["0F0"] == (1, 5)
    assert moves(timeline)["0F1"] == activation
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


def test_parameters_are_gathered_after_a_step_on_shared_state_by_hand() -> None:
    """Half of 4 GB goes one way in 2 s, each replica steps on half of them, and back in 2 s.

    AdamW reads and writes 12 GB of weights and gradients, and 8 GB of state twice, each a half.
    """
    the_graph = graph(
        [layer("a", parameters=["w"])], parameters=[parameter("w", elements=GIGA)], boundaries=[]
    )
    placed = pipeline(
        the_graph,
        star(2),
        [(["a"], ["d0", "d1"])],
        microbatches=3,
        optimizer="adamw",
        shard_optimizer=True,
    )
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2"))
    (reduced,), (gathered,) = timeline.synchronisations, timeline.gathers
    assert (reduced.start_s, reduced.end_s, reduced.kind) == (6, 8, "reduce-scatter")
    assert timeline.end_s == pytest.approx({"d0": 8.014, "d1": 8.014})
    assert (gathered.start_s, gathered.end_s) == pytest.approx((8.014, 10.014))
    assert timeline.iteration_time_s == pytest.approx(10.014)
    assert timeline.busy_s == pytest.approx({"d0": 6.014, "d1": 3.014})
    assert placed.stages[0].static_bytes == 4 * GIGA + 4 * GIGA + 8 * GIGA // 2
    names = [type(step.event).__name__ for step in critical_path(timeline)[-3:]]
    assert names == ["SynchronisationEvent", "OptimizerEvent", "SynchronisationEvent"]


def test_all_gathers_of_stages_share_a_link_by_hand() -> None:
    """Two stages end at once, with 2 GB for each way of a switch that carries 1 GB/s."""
    rows = [layer(name, parameters=[f"w{name}"]) for name in "ab"]
    parameters = [parameter(f"w{name}", elements=GIGA) for name in "ab"]
    links = [link(name, "left") for name in ("d0", "d2")] + [link("left", "right")]
    links += [link(name, "right") for name in ("d1", "d3")]
    placed = pipeline(
        graph(rows, [boundary("a", "b", bytes_=0)], parameters),
        cluster(["d0", "d1", "d2", "d3"], links, ["left", "right"]),
        [(["a"], ["d0", "d1"]), (["b"], ["d2", "d3"])],
        shard_optimizer=True,
        overlap_reduction=False,
    )
    rows_of = orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1B0", d3="1F1 1B1")
    timeline = simulate(placed, rows_of)
    alone_s = [event.synchronisation.seconds for event in timeline.gathers]
    assert alone_s == [2, 2]
    # Stage 1 reduces first, alone for 2 s; stage 0 follows 2 s later and steps 6 ms after that.
    spans = [(event.start_s, event.end_s) for event in timeline.gathers]
    assert spans[1] == pytest.approx((6.006, 8.006))
    assert spans[0] == pytest.approx((8.006, 10.006))


def two_large_layers(**job: object) -> PlacedPipeline:
    """Forwards of 1 s, input and weight gradients of 1 s each; 4 GB of gradients a layer."""
    names = ("a", "b")
    the_graph = graph(
        [layer(name, parameters=[f"w{name}"]) for name in names],
        [boundary("a", "b", bytes_=0)],
        [parameter(f"w{name}", elements=GIGA) for name in names],
    )
    return pipeline(the_graph, star(2), [(names, ["d0", "d1"])], microbatches=3, **job)


@pytest.mark.parametrize(
    ("first", "second", "spans", "at_once"),
    [
        # d0 is the last: its backward has run b 2 s before its end at 12.
        ("0F0 0B0 0F1 0B1", "0F2 0B2", [(10, 14), (14, 18)], (12, 20)),
        # Its last weight gradient has run b 1 s before its end.
        ("0F0 0I0 0W0 0F1 0I1 0W1", "0F2 0B2", [(11, 15), (15, 19)], (12, 20)),
        # Only the last operation counts: a weight gradient here, on d1 a whole backward.
        ("0F0 0F1 0I1 0B0 0W1", "0F2 0B2", [(11, 15), (15, 19)], (12, 20)),
        ("0F0 0B0 0F1 0B1 0F2 0B2", "", [(16, 20), (20, 24)], (18, 26)),
    ],
)
def test_buckets_are_reduced_while_the_last_backward_runs_by_hand(
    first: str, second: str, spans: list[tuple[float, float]], at_once: tuple[float, float]
) -> None:
    """A bucket of 4 GB takes 4 s; each layer is one, since it is larger than 25 MiB."""
    rows = orders(d0=first, **({"d1": second} if second else {}))
    rows.setdefault("d1", ())
    timeline = simulate(two_large_layers(), rows)
    assert [(e.start_s, e.end_s) for e in timeline.synchronisations] == spans
    assert timeline.iteration_time_s == pytest.approx(spans[-1][1] + 0.024)
    path = critical_path(timeline)
    assert sum(step.seconds for step in path) == pytest.approx(timeline.iteration_time_s)
    partly = [step.event.end_s for step in path if isinstance(step.event, OperationEvent)]
    assert max(partly) == spans[0][0]
    (event,) = simulate(two_large_layers(overlap_reduction=False), rows).synchronisations
    assert (event.start_s, event.end_s) == at_once


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
        graph([layer("a"), layer("b")]), star(1), [(["a"], ["d0"]), (["b"], ["d0"])], microbatches=1
    )
    timeline = simulate(placed, orders(d0="0F0 1F0 1B0 0B0"))
    assert timeline.iteration_time_s == 6
    assert [(t.source, t.target, t.start_s, t.end_s) for t in timeline.transfers] == [
        ("d0", "d0", 1, 1),
        ("d0", "d0", 4, 4),
    ]


def test_a_deadlock_names_every_device_that_waits() -> None:
    with pytest.raises(DeadlockError, match="d0 waits at 0B0, d1 waits at 1F0"):
        simulate(two_stages(), orders(d0="0B0 0F0 0F1 0B1", d1="1F0 1B0 1F1 1B1"))


def test_a_reduction_without_its_gradients_is_refused() -> None:
    """An order that lacks a backward, as an edit may leave it."""
    the_graph = graph([layer("a", parameters=["p"])], (), [parameter("p", 1000)])
    replicas = pipeline(the_graph, star(2), [(["a"], ["d0", "d1"])])
    with pytest.raises(PipeplanError, match="waits for gradients that no operation makes"):
        simulate(replicas, orders(d0="0F0", d1="0F1 0B1"))
