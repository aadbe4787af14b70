"""Claimed times are checked one by one: whatever is changed in them is refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
from builders import checked, orders
from many_sided import many_sided_plans
from test_divided_and_offloaded import dividing, offloads

from planner.errors import DeadlockError, PipeplanError
from planner.plan.operations import Operation
from planner.verification import verify
from planner.verification.costs import PlanCosts
from planner.verification.speeds import Span
from planner.verification.tasks import Key, PlanTasks
from planner.verification.times import CheckedTimes

CHANGES: dict[str, Callable[[Span, float], Span | None]] = {
    "earlier": lambda span, by: Span(span.start_s - by, span.end_s - by),
    "later": lambda span, by: Span(span.start_s + by, span.end_s + by),
    "shorter": lambda span, by: span._replace(end_s=span.end_s - by),
    "longer": lambda span, by: span._replace(end_s=span.end_s + by),
    "begun before": lambda span, by: span._replace(start_s=span.start_s - by),
    "begun behind": lambda span, by: span._replace(start_s=span.start_s + by),
    "endless": lambda span, by: span._replace(end_s=float("inf")),
    "left out": lambda span, by: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_single_time_is_refused(change: str) -> None:
    rng = random.Random(change)
    for plan in many_sided_plans():
        found = checked(plan)
        by_s = 1e-6 * found.iteration_time_s
        for key in rng.sample(sorted(found.times, key=str), 12):
            span = CHANGES[change](found.times[key], by_s)
            times = {**found.times, key: span}
            if span is None:
                del times[key]
            again = CheckedTimes(found.plan_tasks, times)
            assert list(again.problems()), f"{key} is {change}"


def test_a_task_that_the_plan_does_not_have_is_refused() -> None:
    found = checked(next(many_sided_plans()))
    times = {**found.times, Key("gather", 0): Span(0.0, 1.0)}
    assert list(CheckedTimes(found.plan_tasks, times).problems()) == [
        "gather 0 has a time, but the plan has no such task"
    ]


def test_of_two_stashes_asked_for_at_once_the_one_that_leaves_goes_first() -> None:
    """As the second forward ends and the third begins, before which the first stash is to come."""
    found = checked(offloads())
    leaving, coming = (Key("copy", Operation(0, *row)) for row in (("F", 1), ("B", 0)))
    first, second = found.times[leaving], found.times[coming]
    ran, runs = (Key("operation", Operation(0, "F", number)) for number in (1, 2))
    assert found.times[ran].end_s == found.times[runs].start_s
    assert first.end_s == second.start_s
    times = {**found.times, leaving: second, coming: first}
    assert f"{leaving} came before {coming}, but goes after it" in list(
        CheckedTimes(found.plan_tasks, times).problems()
    )


def test_replicas_that_start_together_need_equally_many_microbatches() -> None:
    plan = dividing()
    with pytest.raises(DeadlockError, match="the orders deadlock: d0 waits at 0F1"):
        PlanTasks(plan, orders(d0="0F0 0B0 0F1 0B1 0F2 0B2", d1="0F3 0B3"), PlanCosts(plan))


@pytest.mark.parametrize("what", ["plan.json", None, {"format": "pipeplan/8"}])
def test_what_is_no_plan_is_named(what: Any) -> None:
    with pytest.raises(PipeplanError, match=r"verify\(plan\): .* is no plan; read the file first"):
        verify(what)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_of_circles_is_as_it_was_before(is_enabled: bool) -> None:
    plan = dividing()
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        assert verify(plan) == []
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
