"""Replicas that run no microbatch are left out of plans, unless memory needs them."""

from __future__ import annotations

import pytest
from builders import boundary, cluster, device_type, graph, layer, link, parameter, pipeline
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from planner import Problem, solve, verify
from planner.errors import InfeasibleError
from planner.plan.operations import parse_order
from planner.plan.plan import Plan
from planner.search.idle_replicas import without_idle_replicas
from planner.search.schedule.heuristic import Schedule
from planner.simulation.simulator import simulate

GRAPH = graph(
    [layer("a", parameters=["w"]), layer("b")],
    [boundary("a", "b", bytes_=0)],
    [parameter("w", 10**9)],
)


def idle(plan: Plan) -> list[tuple[int, str]]:
    runs = {(row.stage, name) for name, rows in plan.parsed_orders().items() for row in rows}
    held = ((k, name) for k, stage in enumerate(plan.stages) for name in stage.devices)
    return [row for row in held if row not in runs]


def on_one_of_two(memory_gb: float = 1000, **job: object) -> Schedule:
    """Two replicas of a stage, of which one runs both microbatches."""
    types = {"unit": device_type(memory_gib=memory_gb * 1e9 / 2**30)}
    two = cluster(["d0", "d1"], [link("d0", "d1")], types=types)
    placed = pipeline(GRAPH, two, [(["a", "b"], ["d0", "d1"])], **job)
    orders = {"d0": parse_order("0F0 0B0 0F1 0B1", "d0"), "d1": ()}
    return Schedule(orders, simulate(placed, orders), "by hand")


def test_without_an_idle_replica_nothing_is_reduced() -> None:
    """Two microbatches of 2 + 4 s; half of 4 GB went to and fro at 1 GB/s, twice, before."""
    before = on_one_of_two()
    after = without_idle_replicas(before)
    [stage] = after.timeline.pipeline.stages
    assert stage.spec.devices == ("d0",)
    assert set(after.orders) == {"d0"}
    step_s = before.timeline.pipeline.optimizer_s["d0"]
    assert after.iteration_time_s == pytest.approx(12 + step_s)
    assert before.iteration_time_s == pytest.approx(16 + step_s)


def test_a_replica_that_memory_needs_stays() -> None:
    """Weights, gradients, new gradients of 4 GB each; 8 GB of moments, whole or half."""
    for memory_gb, held in ((17, ("d0", "d1")), (21, ("d0",))):
        before = on_one_of_two(memory_gb, optimizer="adamw", shard_optimizer=True)
        [stage] = without_idle_replicas(before).timeline.pipeline.stages
        assert stage.spec.devices == held


@given(problems(min_devices=2), st.sampled_from([1e-3, 0.1]))
def test_however_short_a_search_every_replica_runs_a_microbatch(
    problem: Problem, limit_s: float
) -> None:
    try:
        result = solve(problem, time_limit_s=limit_s, deterministic=True)
    except InfeasibleError:
        return
    assert idle(result.plan) == []
    assert verify(result.plan) == []
    assert result.lower_bound_s <= result.iteration_time_s * (1 + 1e-9)
