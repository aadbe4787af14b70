"""Stashes that travel to the host: both replays alike, and what the verifier refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
from builders import boundary, cluster, device_type, graph, layer, orders, pipeline
from chains import GIB
from hypothesis import given
from hypothesis import strategies as st
from offloading import offloading
from strategies import Scheduled, scheduled
from test_agreement import assert_they_agree

from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.plan.plan import Plan
from planner.verification import verify


@given(
    scheduled(slowed=True, shards=True),
    st.randoms(use_true_random=False),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_both_replays_copy_stashes_alike(case: Scheduled, rng: random.Random, share: float) -> None:
    assert_they_agree(plan_by_hand(offloading(case.pipeline, rng, share), case.orders))


def offloading_plan() -> Plan:
    """One device whose memory holds two of three stashes, of which one is on the host at a time."""
    rows = [layer("a", 0.5, 1.0, stash_bytes=GIB), layer("b", 0.5, 1.0)]
    types = {"unit": device_type(memory_gib=2.5, host_link_gb_per_s=2.0)}
    machines = cluster(["d0"], [], types=types)
    the_graph = graph(rows, [boundary("a", "b", bytes_=0)])
    stages = [(["a", "b"], ["d0"])]
    fields = {"microbatches": 3, "offload": True}
    problem = pipeline(the_graph, machines, stages, **fields).problem
    placed = place(problem, [StageSpec(("a", "b"), ("d0",), (), ("a",))])
    return plan_by_hand(placed, orders(d0="0F0 0F1 0F2 0B0 0B1 0B2"))


def test_the_plan_whose_mutations_are_refused_holds() -> None:
    plan = offloading_plan()
    assert verify(plan) == []
    assert verify(Plan.parse(plan.model_dump(mode="json"))) == []


MUTATIONS = {
    "another layer": (("stages", 0, "offload"), ["b"], "memory of 'd0'"),
    "nothing": (("stages", 0, "offload"), [], "memory of 'd0'"),
    "a layer elsewhere": (("stages", 0, "offload"), ["a", "c"], "offload: layer 'c' is not in"),
    "recomputed as well": (("stages", 0, "recompute"), ["a"], "layer 'a' is recomputed too"),
    "against the job": (("job", "offload"), False, "offload: 1 layer, but job.offload is false"),
    "not decided": (("job", "offload"), "if_needed", 'job.offload: "if_needed", but in a plan'),
    "no host link": (
        ("cluster", "device_types", "unit", "host_link_gb_per_s"),
        None,
        "has no host_link_gb_per_s; set it, or keep the stashes",
    ),
    "a slower host link": (
        ("cluster", "device_types", "unit", "host_link_gb_per_s"),
        0.5,
        "predicted.iteration_time_s",
    ),
    "less memory": (
        ("cluster", "device_types", "unit", "memory_gib"),
        1.5,
        "memory of 'd0'",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_plan_is_refused(name: str) -> None:
    path, value, message = MUTATIONS[name]
    data: Any = offloading_plan().model_dump(mode="json")
    *way, last = path
    place_ = data
    for step in way:
        place_ = place_[step]
    assert place_[last] != value
    place_[last] = value
    assert any(message in problem for problem in verify(Plan.parse(data)))
