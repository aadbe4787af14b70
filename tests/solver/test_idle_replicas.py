"""Replicas that run no microbatch are left out of plans, unless memory needs them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from planner import Problem, solve, verify
from planner.errors import InfeasibleError
from planner.plan.plan import Plan


def idle(plan: Plan) -> list[tuple[int, str]]:
    runs = {(row.stage, name) for name, rows in plan.parsed_orders().items() for row in rows}
    held = ((k, name) for k, stage in enumerate(plan.stages) for name in stage.devices)
    return [row for row in held if row not in runs]


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
