"""Whether the figures that a plan predicts are those that follow from its checked times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planner.plan.plan import Plan
from planner.verification.claims import claimed_by_length
from planner.verification.costs import PlanCosts
from planner.verification.layer_costs import at_lengths
from planner.verification.lowering import PlanTasks
from planner.verification.memory import HeldBytes, peak_bytes
from planner.verification.time_shares import time_shares
from planner.verification.times import CheckedTimes

RELATIVE_TOLERANCE = 1e-6
REMEDY = "run `pipeplan simulate PLAN -o PLAN` to write fresh figures"


def predicted_problems(plan: Plan, checked: CheckedTimes, held: HeldBytes) -> Iterator[str]:
    """Yield the figures of a plan that are wrong.

    Args:
        plan: with its groups as devices.
        checked: its times, which hold.
        held: bytes by device at these times.
    """
    said, time_s = plan.predicted, checked.iteration_time_s
    bound_s = min(said.lower_bound_s, time_s)
    if not _is_close(said.lower_bound_s, bound_s):
        yield (
            f"predicted.lower_bound_s: {said.lower_bound_s} s cannot be a bound, this "
            f"plan itself takes {time_s} s; plan again to have one proved"
        )
    found: dict[str, Any] = {
        "iteration_time_s": time_s,
        "gap": _gap(time_s, bound_s),
        "bubble": checked.bubble,
        "devices": {
            device: {"busy_s": busy_s, "peak_memory_bytes": peak_bytes(held[device])}
            for device, busy_s in checked.busy_s.items()
        },
    }
    if said.time_provenance is not None:  # It is left out where nothing takes time.
        found["time_provenance"] = time_shares(checked, said.time_provenance.model_dump())
    iterations = [] if plan.job.lengths is None else list(_iterations(plan, checked))
    for iteration in {id(row): row for row in iterations}.values():
        yield from (f"times of an iteration of lengths: {row}" for row in iteration.problems())
    times_s = [row.iteration_time_s for row in iterations]
    found["lengths"] = _of_iterations(times_s) if times_s else None
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


def _gap(time_s: float, bound_s: float) -> float | None:
    quotient = time_s / bound_s if bound_s > 0 else math.inf
    return max(0.0, quotient - 1) if math.isfinite(quotient) else None


def _is_close(said: Any, found: Any) -> bool:
    if not isinstance(said, int | float) or not isinstance(found, int | float):
        return said is found
    return abs(said - found) <= RELATIVE_TOLERANCE * max(abs(said), abs(found)) + 1e-12


# --- microbatches of several lengths --------------------------------------------------------------


def _iterations(plan: Plan, mean: CheckedTimes) -> Iterator[CheckedTimes]:
    """Yield the first iterations with the times and messages of their own microbatches."""
    assert plan.job.lengths is not None
    rows = list(plan.job.lengths.of_iterations(plan.microbatches))
    by_length = [PlanCosts(_of_length(plan, k)) for k in range(len(plan.job.lengths.tokens))]
    different = list(dict.fromkeys(rows))  # Iterations of sorted microbatches are often equal.
    known = {}
    for row, times in zip(different, claimed_by_length(plan, different), strict=True):
        costs = [by_length[k] for k in row]
        tasks = PlanTasks(plan, mean.plan_tasks.orders, mean.plan_tasks.costs, costs)
        known[row] = CheckedTimes(tasks, times)
    yield from (known[row] for row in rows)


def _of_length(plan: Plan, place: int) -> Plan:
    """Return the plan as if every microbatch had one of the lengths."""
    graph = plan.model.graph
    layers = tuple(at_lengths(layer)[place] for layer in graph.layers)
    tensors = tuple(
        row.model_copy(update={"bytes": row.lengths[place].bytes, "lengths": ()})
        for row in graph.boundaries
    )
    record = graph.model_copy(update={"layers": layers, "boundaries": tensors})
    return plan.model_copy(update={"model": plan.model.model_copy(update={"graph": record})})


def _of_iterations(times_s: Sequence[float]) -> dict[str, float]:
    """Return what a plan says of iterations; the percentile is linear between two of them."""
    return {
        "iterations": len(times_s),
        "expected_s": float(np.mean(times_s)),
        "percentile_95_s": float(np.percentile(times_s, 95)),
        "worst_s": max(times_s),
    }
