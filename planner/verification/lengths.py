"""Iterations of microbatches of several lengths, replayed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.plan.operations import Orders
from planner.plan.plan import LengthPrediction, Plan
from planner.verification.claims import claimed_by_length
from planner.verification.costs import PlanCosts
from planner.verification.layer_costs import at_lengths
from planner.verification.tasks import PlanTasks
from planner.verification.times import CheckedTimes

_REMEDY = "run `pipeplan simulate PLAN -o PLAN` to write fresh figures"
_TOLERANCE = 1e-6


def length_problems(plan: Plan, orders: Orders, costs: PlanCosts) -> Iterator[str]:
    """Yield where the times that a plan says of its first iterations are not theirs.

    Args:
        plan: of a form that holds.
        orders: its orders, parsed.
        costs: of the plan.
    """
    lengths, said = plan.job.lengths, plan.predicted.lengths
    if lengths is None or said is None:
        if (lengths is None) != (said is None):
            asked = "null" if lengths is None else "not null"
            told = "null" if said is None else "not null"
            yield f"predicted.lengths: it is {told}, but job.lengths is {asked}; {_REMEDY}"
        return
    by_length = [PlanCosts(_of_length(plan, k)) for k in range(len(lengths.tokens))]
    rows = list(lengths.of_iterations(plan.microbatches))
    time_of = {}
    different = list(dict.fromkeys(rows))  # Iterations of sorted microbatches are often equal.
    for row, times in zip(different, claimed_by_length(plan, different), strict=True):
        tasks = PlanTasks(plan, orders, costs, [by_length[k] for k in row])
        checked = CheckedTimes(tasks, times)
        for problem in checked.problems():
            yield f"times of an iteration of lengths {row}: {problem}"
        time_of[row] = checked.iteration_time_s
    times_s = [time_of[row] for row in rows]
    found = LengthPrediction(
        iterations=len(times_s),
        expected_s=sum(times_s) / len(times_s),
        percentile_95_s=_percentile(sorted(times_s), 0.95),
        worst_s=max(times_s),
    )
    for name in LengthPrediction.model_fields:
        told, value = getattr(said, name), getattr(found, name)
        if abs(told - value) > _TOLERANCE * max(told, value):
            yield f"predicted.lengths.{name}: the plan says {told}, it is {value}; {_REMEDY}"


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


def _percentile(ascending: Sequence[float], share: float) -> float:
    """Return a percentile, linear between the two values around it."""
    place = share * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])
