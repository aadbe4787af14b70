"""The rules of runtimes: sequences worked out by hand, in both replays.

A forward takes 1 s, a backward 2 s, a message 1 s. ``m`` is a message of activations, ``g`` one of
gradients; the comments give begin and end.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import GIGA, boundary, checked, graph, layer, orders, parameter, pipeline, star
from hypothesis import given
from strategies import Scheduled, runtimes, scheduled

from planner import Job, Problem, adopt, verify
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place
from planner.errors import DeadlockError
from planner.plan.operations import Orders
from planner.plan.runtime_rules import RULES, RuntimeBehaviour, RuntimeRules
from planner.search.orders.bound import StagesBound
from planner.simulation.critical_path import critical_path
from planner.simulation.noise import Noise, sample_times_s
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.verification.costs import PlanCosts
from planner.verification.tasks import PlanTasks

TWO = orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1")
THREE = orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1F1 1B0 1B1", d2="2F0 2B0 2F1 2B1")
BLOCKING = {"send": "blocking", "receive": "blocking"}


def chain(stages: int, **rules: object) -> PlacedPipeline:
    """One layer a stage, one stage a device, under a runtime."""
    names = [f"l{number}" for number in range(stages)]
    rows = [((name,), (f"d{number}",)) for number, name in enumerate(names)]
    return under(pipeline(graph([layer(name) for name in names]), star(stages), rows), **rules)


def under(placed: PlacedPipeline, **rules: object) -> PlacedPipeline:
    runtime = RuntimeRules(name="by hand", behaviour=RuntimeBehaviour.model_validate(rules))
    problem = replace(placed.problem, runtime=runtime)
    return place(problem, [stage.spec for stage in placed.stages])


def replayed(placed: PlacedPipeline, the_orders: Orders) -> Timeline:
    """The timeline, whose times the verifier finds right."""
    checked(plan_by_hand(placed, the_orders))
    return simulate(placed, the_orders)


def starts(timeline: Timeline) -> dict[str, float]:
    return {str(event.operation): event.start_s for event in timeline.operations}


@pytest.mark.parametrize(
    ("rules", "time_s"),
    [
        # d0: F 0-1, 1-2; m 1-2, 2-3; d1: F 2-3, B 3-5, F 5-6, B 6-8; g 5-6, 8-9; B 6-8, 9-11.
        ({}, 11),
        # d0: F 0-1, m 1-2, F 2-3, m 3-4; d1: F 2-3, B 3-5, g 5-6, F 6-7, B 7-9, g 9-10; B 10-12.
        ({"send": "blocking"}, 12),
        # d1 comes to its second forward at 5: m 5-6, F 6-7, B 7-9; d0 to its second backward at 8:
        # g 9-10, B 10-12.
        ({"receive": "blocking"}, 12),
        # The second m and the first g go at 5, when d1 has its backward; then as above.
        ({**BLOCKING, "exchange": "neighbour"}, 12),
        ({**BLOCKING, "exchange": "together"}, 12),
        # g 5-6 first, which d1 posts first, then m 6-7; F 7-8, B 8-10, g 10-11, B 11-13.
        ({**BLOCKING, "exchange": "neighbour", "streams": "one"}, 13),
        # No pairs on d0, where both forwards come first; on d1 each F B is one.
        ({**BLOCKING, "exchange": "pairs"}, 12),
        # F 2 s, B 3 s: d0: F 0-2, 2-4; d1: F 3-5, B 5-8, F 8-10, B 10-13; g 13-14, B 14-17.
        ({"computation_us": 1e6}, 17),
        # m 1-3, 3-5; d1: F 3-4, B 4-6, F 6-7, B 7-9; g 9-11, B 11-13.
        ({"message_us": 1e6}, 13),
        # A message has 10^9 bytes, so that copying them takes another second: the same.
        ({"message_copy_gb_per_s": 1}, 13),
    ],
    ids=str,
)
def test_a_pipeline_of_two(rules: dict[str, object], time_s: float) -> None:
    assert replayed(chain(2, **rules), TWO).iteration_time_s == time_s


def test_a_pair_waits_for_what_both_need() -> None:
    """d0 needs g for F1 B0 (6-9), then for F2 B1 (14-17); d1 runs pairs at 2, 10 and 18."""
    found = orders(d0="0F0 0F1 0B0 0F2 0B1 0B2", d1="1F0 1B0 1F1 1B1 1F2 1B2")
    names = ["l0", "l1"]
    rows = [((name,), (f"d{number}",)) for number, name in enumerate(names)]
    plain = pipeline(graph([layer(name) for name in names]), star(2), rows, microbatches=3)
    placed = under(plain, **BLOCKING, exchange="pairs")
    assert replayed(placed, found).iteration_time_s == 24


@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaved_1f1b_runs_in_megatron_whose_messages_block(ranks: int) -> None:
    """With as many microbatches as ranks, the first ranks run all forwards first."""
    stages = [[f"l{number}"] for number in range(3 * ranks)]
    the_graph = graph([layer(name) for (name,) in stages])
    job = Job(microbatches=ranks, max_stages_per_device=3)
    told = Problem(the_graph, star(ranks), job, runtime=RULES["megatron-blocking"])
    plan = adopt(told, stages, schedule="interleaved-1f1b", pipeline_size=ranks)
    assert verify(plan) == []


def test_devices_that_send_before_they_receive_wait_for_each_other() -> None:
    """After its second forward d0 sends m, while d1 sends g after its first backward."""
    placed = chain(2, **BLOCKING)
    plan = plan_by_hand(chain(2), TWO)
    plan = plan.model_copy(update={"runtime": placed.problem.runtime})
    for run in (
        lambda: simulate(placed, TWO),
        lambda: PlanTasks(plan, plan.parsed_orders(), PlanCosts(plan)),
    ):
        with pytest.raises(DeadlockError, match="d0 waits at 0B0, d1 waits at 1F1"):
            run()


@pytest.mark.parametrize(("exchange", "start_s"), [("neighbour", 5), ("together", 4)])
def test_messages_of_two_neighbours(exchange: str, start_s: float) -> None:
    """At 3 the middle device has m for d2 (3-4) and waits for m of d0: from 3 on, or from 4 on."""
    timeline = replayed(chain(3, **BLOCKING, exchange=exchange), THREE)
    found = starts(timeline)
    assert (found["1F1"], found["1B0"], found["0B1"]) == (start_s, 8, 15)
    assert timeline.iteration_time_s == 17


@pytest.mark.parametrize(("streams", "start_s"), [("several", 11), ("one", 12)])
def test_one_stream_carries_one_message_at_a_time(streams: str, start_s: float) -> None:
    """At 10 d1 has g for d0, and d2 has g for d1: 10-11 both, or one after the other."""
    timeline = replayed(chain(3, streams=streams), THREE)
    assert starts(timeline)["1B1"] == start_s
    assert timeline.iteration_time_s == start_s + 5


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        # Backwards of stage 1 end at 5. Then g shares the way out of d2 and d3 with its reduction,
        # half a GB/s each: both take 5-7 instead of 5-6, and stage 0's backwards 7-9.
        ({}, [5, 9]),
        ({"reduction": "stage"}, [5, 9]),
        ({"reduction": "device"}, [5, 9]),
        # With g sent at 6, backwards of stage 0 end at 8.
        ({"reduction": "device", "send": "blocking"}, [6, 8]),
        ({"reduction": "flush"}, [8, 8]),
    ],
    ids=str,
)
def test_gradients_are_reduced_when_the_runtime_does(
    rules: dict[str, object], expected: list[float]
) -> None:
    held = [parameter(name, 250 * 10**6) for name in ("p", "q")]
    rows = [layer("a", parameters=["p"]), layer("b", parameters=["q"])]
    placed = under(
        pipeline(
            graph(rows, parameters=held),
            star(4),
            [(("a",), ("d0", "d1")), (("b",), ("d2", "d3"))],
            overlap_reduction=False,
        ),
        **rules,
    )
    texts = {"d0": "0F0 0B0", "d1": "0F1 0B1", "d2": "1F0 1B0", "d3": "1F1 1B1"}
    timeline = replayed(placed, orders(**texts))
    assert [event.start_s for event in timeline.synchronisations] == expected
    assert timeline.iteration_time_s == pytest.approx(expected[-1] + 1.003)


def test_a_bound_counts_the_ways_before_and_behind_a_device() -> None:
    """The way of the first to d1, its work, and the way of the last back."""
    many = replace(chain(2), microbatches=8)
    assert StagesBound(many, splits=False).seconds == pytest.approx(29)


@pytest.mark.parametrize("shards", [False, True])
def test_tied_gradients_are_reduced_in_turn(shards: bool) -> None:
    """4 GB among the 2 replicas of each stage in 4 s, then replica by replica among the stages.

    Shared state takes half of the first of these before the optimizer's step, half behind it.
    """
    told = graph(
        [layer("a", parameters=["w"]), layer("b", parameters=["w"])],
        [boundary("a", "b", bytes_=0)],
        [parameter("w", elements=GIGA)],
    )
    placed = pipeline(
        told,
        star(4),
        [(["a"], ["d0", "d1"]), (["b"], ["d2", "d3"])],
        microbatches=2,
        overlap_reduction=False,
        shard_optimizer=shards,
    )
    problem = replace(placed.problem, runtime=RuntimeRules(tied="in_turn"))
    placed = place(problem, [stage.spec for stage in placed.stages])
    texts = {"d0": "0F0 0B0", "d1": "0F1 0B1", "d2": "1F0 1B0", "d3": "1F1 1B1"}
    timeline = replayed(placed, orders(**texts))
    first_s = 2 if shards else 4
    assert [(e.synchronisation.devices, e.start_s, e.end_s) for e in timeline.synchronisations] == [
        (("d2", "d3"), 4, 4 + first_s),
        (("d0", "d1"), 6, 6 + first_s),
        (("d0", "d2"), 6 + first_s, 10 + first_s),
        (("d1", "d3"), 6 + first_s, 10 + first_s),
    ]
    assert [event.synchronisation.devices for event in timeline.gathers] == (
        [("d0", "d1"), ("d2", "d3")] if shards else []
    )
    # Whatever may be reduced among all four at once takes 6 steps of a GB.
    once = place(replace(problem, runtime=RuntimeRules()), [s.spec for s in placed.stages])
    assert [row.seconds for row in once.synchronisations] == [3 if shards else 6]


def test_no_buckets_where_gradients_are_reduced_later() -> None:
    rows = [layer("a", parameters=["p"]), layer("b", parameters=["q"])]
    placed = pipeline(
        graph(rows, parameters=[parameter("p", 10**7), parameter("q", 10**7)]),
        star(2),
        [(("a", "b"), ("d0", "d1"))],
    )
    assert len(placed.synchronisations) == 2
    assert len(under(placed, reduction="stage").synchronisations) == 1


def test_rules_of_interleaved_plans() -> None:
    rules = RuntimeRules(
        behaviour=RuntimeBehaviour(send="blocking"), interleaved=RuntimeBehaviour()
    )
    assert rules.behaviour_on([("d0",), ("d1",)]).send == "blocking"
    assert rules.behaviour_on([("d0",), ("d1",), ("d0",)]).send == "overlapped"
    assert RuntimeRules().behaviour_on([("d0",), ("d0",)]) == RuntimeBehaviour()


@given(scheduled(slowed=True), runtimes())
def test_critical_path_noise_and_bounds_follow_the_rules(
    case: Scheduled, rules: RuntimeRules
) -> None:
    problem = replace(case.pipeline.problem, runtime=rules)
    specs = [stage.spec for stage in case.pipeline.stages]
    placed = place(problem, specs, case.pipeline.sync)
    try:
        timeline = simulate(placed, case.orders)
    except DeadlockError:
        return
    time_s = timeline.iteration_time_s
    assert sum(step.seconds for step in critical_path(timeline)) == pytest.approx(time_s, rel=1e-9)
    noise = Noise(jitter=0.0, samples=20)
    assert np.allclose(sample_times_s(timeline, noise), time_s, rtol=1e-9)
    if all(row.operation.kind in "FB" for row in timeline.operations):
        assert StagesBound(placed, splits=False).seconds <= time_s * (1 + 1e-9)
