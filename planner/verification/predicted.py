"""Whether the figures that a plan predicts are those that follow from its checked times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planner.model.length_graph import record_at
from planner.plan.plan import Plan
from planner.verification.claims import Claims
from planner.verification.costs import PlanCosts
from planner.verification.memory import Held
from planner.verification.tasks import PlanTasks
from planner.verification.times import CheckedTimes

RELATIVE_TOLERANCE = 1e-6
REMEDY = "run `pipeplan simulate PLAN -o PLAN` to write fresh figures"


def predicted_problems(
    plan: Plan, checked: CheckedTimes, held: Mapping[str, Held], claims: Claims
) -> Iterator[str]:
    """Yield the figures of a plan that are wrong.

    Args:
        plan: with its groups as devices.
        checked: its times, which hold.
        held: what devices hold at these times.
        claims: of a simulation. Its shares of the critical path by source are taken as they are.
    """
    said, time_s = plan.predicted, checked.iteration_time_s
    bound_s = min(said.lower_bound_s, time_s)
    quotient = time_s / bound_s if bound_s > 0 else math.inf
    if not _is_close(said.lower_bound_s, bound_s):
        yield (
            f"predicted.lower_bound_s: {said.lower_bound_s} s cannot be a bound, this "
            f"plan itself takes {time_s} s; plan again to have one proved"
        )
    found: dict[str, Any] = {
        "iteration_time_s": time_s,
        "gap": max(0.0, quotient - 1) if math.isfinite(quotient) else None,
        "bubble": checked.bubble,
        "devices": {
            device: {"busy_s": busy_s, "peak_memory_bytes": held[device].peak}
            for device, busy_s in checked.busy_s.items()
        },
    }
    if said.time_provenance is not None:  # It is left out where nothing takes time.
        shares = claims.time_provenance
        found["time_provenance"] = None if shares is None else shares.model_dump()
    iterations = {} if plan.job.lengths is None else _iterations(plan, checked, claims)
    for iteration in iterations.values():
        yield from (f"times of an iteration of lengths: {row}" for row in iteration.problems())
    found["lengths"] = _of_iterations(plan, iterations)
    yield from _differences("predicted", said.model_dump(include=set(found)), found)


def _differences(field: str, said: Any, found: Any) -> Iterator[str]:
    """Yield the figures that are not close, by the names of their fields."""
    if isinstance(said, Mapping) and isinstance(found, Mapping):
        for name in dict.fromkeys((*said, *found)):
            inner = f"{field}[{name!r}]" if field.endswith(".devices") else f"{field}.{name}"
            yield from _differences(inner, said.get(name), found.get(name))
    elif not _is_close(said, found):
        yield f"{field}: the plan says {_word(said)}, a simulation gives {_word(found)}; {REMEDY}"


def _word(figure: Any) -> str:
    return "nothing of it" if figure is None else str(figure)


def _is_close(said: Any, found: Any) -> bool:
    if not isinstance(said, int | float) or not isinstance(found, int | float):
        return said is found
    return abs(said - found) <= RELATIVE_TOLERANCE * max(abs(said), abs(found)) + 1e-12


# --- microbatches of several lengths --------------------------------------------------------------


def _iterations(
    plan: Plan, mean: CheckedTimes, claims: Claims
) -> dict[tuple[int, ...], CheckedTimes]:
    """Return iterations with the times and messages of their own microbatches, by these."""
    assert plan.job.lengths is not None
    by_length = []
    for place in range(len(plan.job.lengths.tokens)):
        model = plan.model.model_copy(update={"graph": record_at(plan.model.graph, place)})
        by_length.append(PlanCosts(plan.model_copy(update={"model": model})))
    different = list(dict.fromkeys(plan.job.lengths.of_iterations(plan.microbatches)))
    found = {}
    for row, times in zip(different, claims.by_length(different), strict=True):
        costs = [by_length[k] for k in row]
        tasks = PlanTasks(plan, mean.plan_tasks.orders, mean.plan_tasks.costs, costs)
        found[row] = CheckedTimes(tasks, times)
    return found


def _of_iterations(
    plan: Plan, iterations: Mapping[tuple[int, ...], CheckedTimes]
) -> dict[str, float] | None:
    """Return what a plan says of iterations; the percentile is linear between two of them."""
    if plan.job.lengths is None:
        return None
    rows: Sequence[tuple[int, ...]] = list(plan.job.lengths.of_iterations(plan.microbatches))
    times_s = [iterations[row].iteration_time_s for row in rows]
    return {
        "iterations": len(times_s),
        "expected_s": float(np.mean(times_s)),
        "percentile_95_s": float(np.percentile(times_s, 95)),
        "worst_s": max(times_s),
    }
