"""Replicas that divide weights and stashes on the host: their times hold, wrong plans do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from builders import (
    GIGA,
    boundary,
    cluster,
    device_type,
    graph,
    layer,
    orders,
    parameter,
    pipeline,
    star,
)
from chains import GIB
from hypothesis import given
from hypothesis import strategies as st
from offloading import offloading
from strategies import Scheduled, divided, scheduled
from test_agreement import assert_they_agree

from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.plan.plan import Plan
from planner.verification import verify


@given(divided())
def test_both_start_replicas_together(case: Scheduled) -> None:
    plan = plan_by_hand(case.pipeline, case.orders)
    assert_they_agree(plan)
    assert verify(plan) == []


@given(
    scheduled(slowed=True, shards=True),
    st.randoms(use_true_random=False),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_both_copy_stashes_alike(case: Scheduled, rng: random.Random, share: float) -> None:
    assert_they_agree(plan_by_hand(offloading(case.pipeline, rng, share), case.orders))


def dividing() -> Plan:
    """Two pipelines of one stage, with 0.4 GB of weights."""
    the_graph = graph([layer("a", parameters=["w"])], [], [parameter("w", elements=GIGA // 10)])
    fields = {"shard_parameters": True, "equal_pipelines": True, "microbatches": 4}
    placed = pipeline(the_graph, star(2), [(["a"], ["d0", "d1"])], **fields)
    return plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2 0F3 0B3"))


def offloads() -> Plan:
    """One device whose memory holds two of three stashes, of which one is on the host at a time."""
    rows = [layer("a", 0.5, 1.0, stash_bytes=GIB), layer("b", 0.5, 1.0)]
    types = {"unit": device_type(memory_gib=2.5, host_link_gb_per_s=2.0)}
    the_graph = graph(rows, [boundary("a", "b", bytes_=0)])
    fields = {"microbatches": 3, "offload": True}
    machines = cluster(["d0"], [], types=types)
    problem = pipeline(the_graph, machines, [(["a", "b"], ["d0"])], **fields).problem
    placed = place(problem, [StageSpec(("a", "b"), ("d0",), (), ("a",))])
    return plan_by_hand(placed, orders(d0="0F0 0F1 0F2 0B0 0B1 0B2"))


UNIT = ("cluster", "device_types", "unit")
REFUSED = [
    (dividing, ("job", "shard_parameters"), False, "predicted.iteration_time_s"),
    (dividing, ("job", "shard_parameters"), "if_needed", 'job.shard_parameters: "if_needed"'),
    (dividing, ("orders", "d1"), "0F2 0F3 0B2 0B3", "form equal pipelines"),
    (dividing, ("sync", "strategy"), "fused", "job.shard_parameters is true"),
    (dividing, ("predicted", "iteration_time_s"), 1.0, "predicted.iteration_time_s"),
    (offloads, ("stages", 0, "offload"), ["b"], "memory of 'd0'"),
    (offloads, ("stages", 0, "offload"), [], "memory of 'd0'"),
    (offloads, ("stages", 0, "offload"), ["a", "c"], "offload: layer 'c' is not in"),
    (offloads, ("stages", 0, "recompute"), ["a"], "layer 'a' is recomputed too"),
    (offloads, ("job", "offload"), False, "offload: 1 layer, but job.offload is false"),
    (offloads, ("job", "offload"), "if_needed", 'job.offload: "if_needed", but in a plan'),
    (offloads, (*UNIT, "host_link_gb_per_s"), None, "has no host_link_gb_per_s; set it, or keep"),
    (offloads, (*UNIT, "host_link_gb_per_s"), 0.5, "predicted.iteration_time_s"),
    (offloads, (*UNIT, "memory_gib"), 1.5, "memory of 'd0'"),
]


@pytest.mark.parametrize(("made", "path", "value", "message"), REFUSED)
def test_a_changed_plan_is_refused(
    made: Callable[[], Plan], path: tuple[str | int, ...], value: object, message: str
) -> None:
    data: Any = made().model_dump(mode="json")
    assert verify(Plan.parse(data)) == []
    place_ = data
    for step in path[:-1]:
        place_ = place_[step]
    assert place_[path[-1]] != value
    place_[path[-1]] = value
    problems = verify(Plan.parse(data))
    assert any(message in problem for problem in problems), problems
