"""Independent checker of plans; it shares no code with the solvers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.artifacts.plan import Plan, Predicted, RestsOn
from planner.costs.placement import is_connected, place_plan
from planner.errors import PipeplanError, first_problems
from planner.plan_form import form_problems, order_problems, stage_problems
from planner.rests_on import rests_on
from planner.simulator import Orders, Timeline, simulate
from planner.sync.lanes import lanes_of
from planner.sync.strategies import TOGETHER
from planner.units import format_bytes

RELATIVE_TOLERANCE = 1e-6
REMEDY = "run `pipeplan simulate PLAN -o PLAN` to write fresh figures"


def verify(plan: Plan) -> list[str]:
    """Check a plan.

    Returns:
        One line a problem, each naming the field, and the rest counted where they are many; empty
        if the plan holds: every layer in exactly one stage, no edge backwards, no more stages and
        replicas than the job allows, each operation once and on a device of its stage, no
        deadlock, memory within capacity at every moment, predictions equal to a fresh simulation,
        pipelines if the strategy of synchronisation needs them, a bound only for the problem it
        was proved for.
    """
    try:
        orders = plan.parsed_orders()
        problems = list(form_problems(plan, orders))
        if not problems:
            timeline = _replay(plan, orders)
            problems = [
                *_memory(timeline),
                *_pipelines(plan),
                *_proof(plan, timeline),
                *_predicted(plan, timeline),
            ]
    except PipeplanError as error:
        return list(error.problems)
    return list(first_problems(problems))


def require_valid(plan: Plan, source: str = "plan") -> None:
    """Raise unless the plan holds.

    Raises:
        PipeplanError: with every problem :func:`verify` finds.
    """
    problems = verify(plan)
    if problems:
        raise PipeplanError(f"{source}: {problem}" for problem in problems)


def replay(plan: Plan) -> Timeline:
    """Simulate a plan that need not hold: it may overflow memory or predict another time.

    Raises:
        PipeplanError: naming what no simulation can be made of, such as an unknown layer.
    """
    orders = plan.parsed_orders()
    problems = [*stage_problems(plan), *order_problems(plan, orders)]
    if problems:
        raise PipeplanError(problems)
    return _replay(plan, orders)


def replay_whole(plan: Plan) -> Timeline | None:
    """Simulate a plan; None if its form does not hold, as :func:`verify` then tells."""
    try:
        orders = plan.parsed_orders()
        return None if any(form_problems(plan, orders)) else _replay(plan, orders)
    except PipeplanError:
        return None


def _replay(plan: Plan, orders: Orders) -> Timeline:
    pipeline = place_plan(plan)
    if not is_connected(pipeline):
        raise PipeplanError("stages: two devices that must exchange data have no path of links")
    return simulate(pipeline, orders)


def predict(timeline: Timeline, lower_bound_s: float) -> Predicted:
    """What a plan says of itself, from a simulation and a proven bound."""
    bound = min(lower_bound_s, timeline.iteration_time_s)
    return Predicted.model_validate(
        {
            "iteration_time_s": timeline.iteration_time_s,
            "lower_bound_s": bound,
            "gap": gap(timeline.iteration_time_s, bound),
            "bubble": timeline.bubble,
            "devices": {
                device: {
                    "busy_s": timeline.busy_s[device],
                    "peak_memory_bytes": timeline.peak_memory_bytes[device],
                }
                for device in timeline.pipeline.devices
            },
            "rests_on": rests_on(timeline),
        }
    )


def gap(iteration_time_s: float, lower_bound_s: float) -> float | None:
    """How far above the bound a plan may be from the best: time / bound - 1; None if no bound.

    A bound so small that the quotient has no number is none.
    """
    if lower_bound_s <= 0 or not math.isfinite(iteration_time_s / lower_bound_s):
        return None
    return max(0.0, iteration_time_s / lower_bound_s - 1)


def _memory(timeline: Timeline) -> Iterator[str]:
    for device, steps in timeline.memory.items():
        capacity = timeline.pipeline.capacity_bytes(device)
        over = next(((time, held) for time, held in steps if held > capacity), None)
        if over:
            kind = timeline.pipeline.problem.cluster.device_type(device)
            peak = max(held for _, held in steps)
            yield (
                f"memory of {device!r}: {format_bytes(over[1])} at {over[0]:.6f} s (peak "
                f"{format_bytes(peak)}), but it has {format_bytes(capacity)} "
                f"(memory_gib {kind.memory_gib:g} less reserved_gib {kind.reserved_gib:g}); "
                "give it fewer layers or fewer microbatches in flight"
            )


def _pipelines(plan: Plan) -> Iterator[str]:
    """Strategies between pipelines need some."""
    if plan.sync.strategy in TOGETHER:
        return
    try:
        lanes_of(plan)
    except PipeplanError as error:
        for problem in error.problems:
            yield f"sync.strategy: {plan.sync.strategy!r} needs pipelines, but {problem}"


def _proof(plan: Plan, timeline: Timeline) -> Iterator[str]:
    """A bound that was proved for another problem may be above the time of a better plan."""
    said, found = plan.provenance.problem_digest, timeline.pipeline.problem.digest
    if plan.predicted.lower_bound_s > 0 and said != found:
        yield (
            f"provenance.problem_digest: {'none' if said is None else said[:19] + '…'}, but the "
            f"plan's layer graph, cluster and job have {found[:19]}…: predicted.lower_bound_s was "
            "proved for another problem; run `pipeplan simulate PLAN -o PLAN`, which drops the "
            "bound, or plan again"
        )


def _predicted(plan: Plan, timeline: Timeline) -> Iterator[str]:
    fresh = predict(timeline, plan.predicted.lower_bound_s)
    if not _close(plan.predicted.lower_bound_s, fresh.lower_bound_s):
        yield (
            f"predicted.lower_bound_s: {plan.predicted.lower_bound_s} s cannot be a bound, this "
            f"plan itself takes {fresh.iteration_time_s} s; plan again to have one proved"
        )
    for name in ("iteration_time_s", "gap", "bubble"):
        said, found = getattr(plan.predicted, name), getattr(fresh, name)
        if not _close(said, found):
            yield f"predicted.{name}: the plan says {said}, a simulation gives {found}; {REMEDY}"
    yield from _rests_on(plan.predicted, fresh)
    if set(plan.predicted.devices) != set(fresh.devices):
        yield f"predicted.devices: they are not the devices that hold a stage; {REMEDY}"
        return
    for device, found_row in fresh.devices.items():
        said_row = plan.predicted.devices[device]
        for name in ("busy_s", "peak_memory_bytes"):
            said, found = getattr(said_row, name), getattr(found_row, name)
            if not _close(said, found):
                yield (
                    f"predicted.devices[{device!r}].{name}: the plan says {said:.9g}, "
                    f"a simulation gives {found:.9g}; {REMEDY}"
                )


def _rests_on(said: Predicted, found: Predicted) -> Iterator[str]:
    """Plans of older versions do not tell it."""
    if said.rests_on is None:
        return
    for name in RestsOn.model_fields:
        told = getattr(said.rests_on, name)
        share = getattr(found.rests_on, name) if found.rests_on is not None else None
        if not _close(told, share):
            yield f"predicted.rests_on.{name}: the plan says {told}, it is {share}; {REMEDY}"


def _close(said: float | None, found: float | None) -> bool:
    if said is None or found is None:
        return said is found
    return abs(said - found) <= RELATIVE_TOLERANCE * max(abs(said), abs(found)) + 1e-12
