"""The verifier, which shares no code with the simulator, accepts its times and refuses others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from builders import checked, peaks
from hypothesis import given
from hypothesis import strategies as st
from many_sided import many_sided_plans
from strategies import Scheduled, plans, runtimes, scheduled

from planner.assembly import plan_by_hand
from planner.costs.placement import place
from planner.errors import DeadlockError
from planner.model.graph_record import graph_digest
from planner.plan.plan import Plan
from planner.plan.runtime_rules import RuntimeRules
from planner.simulation.simulator import simulate_plan
from planner.verification import verify
from planner.verification.costs import PlanCosts
from planner.verification.speeds import Span
from planner.verification.tasks import PlanTasks
from planner.verification.times import CheckedTimes

RELATIVE = 1e-9


def assert_they_agree(plan: Plan) -> None:
    timeline, found = simulate_plan(plan), checked(plan)
    assert found.iteration_time_s == timeline.iteration_time_s
    assert found.bubble == pytest.approx(timeline.bubble, rel=RELATIVE, abs=RELATIVE)
    assert found.busy_s == pytest.approx(timeline.busy_s, rel=RELATIVE)
    assert peaks(found) == timeline.peak_memory_bytes
    for key in random.Random(0).sample(sorted(found.times, key=str), 2):
        span = found.times[key]
        later = Span(span.start_s, span.end_s + 1e-6 * (found.iteration_time_s or 1.0))
        again = CheckedTimes(found.plan_tasks, {**found.times, key: later})
        assert list(again.problems()), f"{key} may end later"


@given(plans(shards=True))
def test_both_replays_give_the_same_figures(plan: Plan) -> None:
    assert_they_agree(plan)


@given(scheduled(slowed=True, shards=True), runtimes())
def test_both_replays_run_any_runtime_alike(case: Scheduled, rules: RuntimeRules) -> None:
    """Orders that run where messages overlap may wait in a circle where they block: in both."""
    plan = plan_by_hand(case.pipeline, case.orders).model_copy(update={"runtime": rules})
    problem = replace(case.pipeline.problem, runtime=rules)
    specs = [stage.spec for stage in case.pipeline.stages]
    try:
        plan = plan_by_hand(place(problem, specs, case.pipeline.sync), case.orders)
    except DeadlockError:
        with pytest.raises(DeadlockError):
            PlanTasks(plan, plan.parsed_orders(), PlanCosts(plan))
    else:
        assert_they_agree(plan)


@given(plans(shards=True), st.randoms(use_true_random=False))
def test_the_order_in_which_a_file_lists_things_changes_nothing(
    plan: Plan, rng: random.Random
) -> None:
    """Layers, recomputed ones and devices of a stage, links, switches, parameters and tensors."""
    data = plan.model_dump(mode="json")
    lists = [data["cluster"]["links"], data["cluster"]["switches"]]
    lists += [data["model"]["graph"][name] for name in ("boundaries", "parameters")]
    for stage in data["stages"]:
        lists += [stage["layers"], stage["devices"], stage["recompute"]]
    for rows in lists:
        rng.shuffle(rows)
    shuffled = Plan.parse(data)
    assert_they_agree(shuffled)
    # The digests of graph and cluster are others; all else that verify compares is the same.
    problems = verify(with_digest(shuffled))
    assert problems == []


def with_digest(plan: Plan) -> Plan:
    model = plan.model.model_copy(update={"graph_digest": graph_digest(plan.model.graph)})
    return plan.model_copy(update={"model": model})


def test_both_replays_give_plans_of_every_feature_the_same_figures() -> None:
    for plan in many_sided_plans():
        assert verify(plan) == []
        assert_they_agree(plan)
