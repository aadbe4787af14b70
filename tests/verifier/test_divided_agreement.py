"""Replicas that divide weights: both replays alike, and what the verifier refuses."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from builders import GIGA, graph, layer, orders, parameter, pipeline, star
from hypothesis import given
from strategies import Scheduled, divided
from test_agreement import assert_they_agree

from planner.assembly import plan_by_hand
from planner.plan.plan import Plan
from planner.simulation.simulator import simulate
from planner.verification import verify


@given(divided())
def test_both_replays_start_replicas_together_alike(case: Scheduled) -> None:
    plan = plan_by_hand(case.pipeline, case.orders)
    assert_they_agree(plan)
    assert verify(plan) == []


@given(divided())
def test_operations_start_together_as_soon_as_the_last_replica_can(case: Scheduled) -> None:
    """A device can when its operation before has ended and what it needs has arrived."""
    timeline = simulate(case.pipeline, case.orders)
    last = len(case.pipeline.stages) - 1
    ends = {event.operation: event.end_s for event in timeline.operations}
    arrived = {event.consumer: event.end_s for event in timeline.transfers}
    before_s: dict[str, float] = defaultdict(float)
    rows: dict[tuple[int, str, int], list[tuple[float, float]]] = defaultdict(list)
    counts: dict[tuple[int, str, str], int] = defaultdict(int)
    for event in timeline.operations:
        stage, kind, _ = event.operation
        needed = arrived.get(event.operation, 0.0)
        if kind == "B" and stage == last:
            needed = ends[event.operation._replace(kind="F")]
        number = counts[stage, kind, event.device]
        counts[stage, kind, event.device] += 1
        rows[stage, kind, number].append((event.start_s, max(needed, before_s[event.device])))
        before_s[event.device] = event.end_s
    for (stage, _, _), found in rows.items():
        starts, able = zip(*found, strict=True)
        if case.pipeline.stages[stage].collective_s:
            assert set(starts) == {max(able)}
        else:
            assert starts == able


def divided_plan() -> Plan:
    """Two pipelines of one stage, with 0.4 GB of weights."""
    the_graph = graph([layer("a", parameters=["w"])], [], [parameter("w", elements=GIGA // 10)])
    fields = {"shard_parameters": True, "equal_pipelines": True, "microbatches": 4}
    placed = pipeline(the_graph, star(2), [(["a"], ["d0", "d1"])], **fields)
    return plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2 0F3 0B3"))


def test_the_plan_whose_mutations_are_refused_holds() -> None:
    plan = divided_plan()
    assert verify(plan) == []
    assert verify(Plan.parse(plan.model_dump(mode="json"))) == []


MUTATIONS = {
    "whole": (("job", "shard_parameters"), False, "predicted.iteration_time_s"),
    "not decided": (("job", "shard_parameters"), "if_needed", 'job.shard_parameters: "if_needed"'),
    "another order": (("orders", "d1"), "0F2 0F3 0B2 0B3", "form equal pipelines"),
    "another strategy": (("sync", "strategy"), "fused", "job.shard_parameters is true"),
    "another time": (("predicted", "iteration_time_s"), 1.0, "predicted.iteration_time_s"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_plan_that_is_not_so_is_refused(name: str) -> None:
    path, value, message = MUTATIONS[name]
    data: Any = divided_plan().model_dump(mode="json")
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    problems = verify(Plan.parse(data))
    assert any(message in problem for problem in problems), problems
