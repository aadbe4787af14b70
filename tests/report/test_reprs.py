"""Public records are short in words."""

import pytest
from builders import cluster, graph, layer, link, orders, pipeline

from planner import Result, solve
from planner.assembly import plan_by_hand
from planner.plan.plan import Plan

HOSTILE = "<script>\x1b[2J"
MOST_CHARACTERS = 400


@pytest.fixture(scope="module")
def plan() -> Plan:
    rows = [layer(HOSTILE), *(layer(f"l{number}") for number in range(60))]
    names = [row["name"] for row in rows]
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    placed = pipeline(graph(rows), machines, [(names[:30], ["d0"]), (names[30:], ["d1"])])
    return plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))


@pytest.fixture(scope="module")
def result(plan: Plan) -> Result:
    return solve(plan.problem, time_limit_s=0.2, deterministic=True)


def test_reprs_are_short_and_say_what_it_is(plan: Plan, result: Result) -> None:
    assert repr(plan).startswith("<Plan: by-hand on by-hand, 2 stages, 2 devices, 2 microbatches, ")
    assert repr(plan.cluster) == "<Cluster: by-hand, 2 devices, 0 switches, 1 link>"
    assert repr(result).startswith(f"<Result: {result.status}, ")
    assert repr(plan.problem.graph) == "<LayerGraph: by-hand, 61 layers, 60 tensors between them>"
    for shown in (plan, plan.cluster, result):
        assert len(repr(shown)) < MOST_CHARACTERS
