"""Claimed times are checked one by one: whatever is changed in them is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from builders import checked
from many_sided import many_sided_plans

from planner.errors import PipeplanError
from planner.verification import verify
from planner.verification.speeds import Span
from planner.verification.tasks import Key
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


@pytest.mark.parametrize("what", ["plan.json", None, {"format": "pipeplan/8"}])
def test_what_is_no_plan_is_named(what: Any) -> None:
    with pytest.raises(PipeplanError, match=r"verify\(plan\): .* is no plan; read the file first"):
        verify(what)
