"""The shares of a replay's critical path by what its times come from (docs/cost_model.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from planner.cluster.hardware import Source
from planner.model.graph_record import Layer
from planner.plan.plan import Plan
from planner.verification.costs import PlanCosts
from planner.verification.layer_costs import at_lengths, exchanging_s
from planner.verification.steps import Step

_WEAKEST_FIRST: tuple[Source, ...] = ("assumed", "datasheet", "measured")
_PHASES_OF = {
    "F": ("forward",),
    "I": ("input_gradient",),
    "W": ("weight_gradient",),
    "B": ("input_gradient", "weight_gradient"),
}


def time_shares(plan: Plan, costs: PlanCosts, last: Step) -> dict[str, float] | None:
    """Return the shares of the critical path by what its times come from; None if it takes none.

    Args:
        plan: that was replayed.
        costs: of the plan.
        last: the step that ends the iteration.
    """
    found: dict[str, float] = dict.fromkeys(_WEAKEST_FIRST, 0.0)
    step: Step | None = last
    while step is not None:
        if step.seconds:
            parts = list(_parts(plan, costs, step))
            whole = sum(seconds for _, seconds in parts)
            if not whole:  # Host time alone.
                parts, whole = [("measured", 1.0)], 1.0
            for source, seconds in parts:
                found[source] += seconds / whole * step.seconds
        step = step.cause
    total = sum(found.values())
    return {name: seconds / total for name, seconds in found.items()} if total else None


def _parts(plan: Plan, costs: PlanCosts, step: Step) -> Iterator[tuple[Source, float]]:
    """The seconds of a step, or a share of them, by their source."""
    if step.operation is not None:
        stage, kind, _ = step.operation
        yield from _operation_parts(plan, costs, stage, kind, step.devices[0])
    elif len(step.devices) == 1:  # An optimizer step.
        yield plan.cluster.device_type(step.devices[0]).source, 1.0
    else:
        yield _weakest_link(plan, costs, step.devices), 1.0


def _weakest_link(plan: Plan, costs: PlanCosts, devices: Sequence[str]) -> Source:
    """Return the weakest source of the links on a message's path or an all-reduce's ring."""
    links = plan.cluster.links
    paths = (costs.routes.path(*ends) for ends in pairwise(devices))
    sources = {links[number].source for path in paths for number in path.links}
    return next(source for source in _WEAKEST_FIRST if source in sources)


def _operation_parts(
    plan: Plan, costs: PlanCosts, stage: int, kind: str, device: str
) -> Iterator[tuple[Source, float]]:
    """Each layer by its time: measured, or phase by phase of its roofline."""
    type_name, rerun = plan.cluster.type_of(device), set(plan.stages[stage].recompute)
    for whole in costs.layers(stage):
        shares = [row.share for row in whole.lengths] or [1.0]
        for layer, share in zip(at_lengths(whole) or [whole], shares, strict=True):
            found = _layer_parts(plan, costs, layer, kind, type_name, again=whole.name in rerun)
            yield from ((source, share * seconds) for source, seconds in found)
    together_s = sum(costs.collective_s(stage).values())
    if together_s:
        ring = costs.ring(stage)
        source = _weakest_link(plan, costs, (*ring, ring[0]))
        yield source, together_s * (2 if kind == "B" else 1)


def _layer_parts(
    plan: Plan, costs: PlanCosts, layer: Layer, kind: str, type_name: str, *, again: bool
) -> Iterator[tuple[Source, float]]:
    kind_of_device = plan.cluster.device_types[type_name]
    phases = (*_PHASES_OF[kind], *(_PHASES_OF["F"] if again and kind in "BI" else ()))
    if type_name in layer.measured:
        sent_s = sum(exchanging_s(layer, phase, kind_of_device) for phase in phases)
        yield "measured", costs.layer_seconds(layer, type_name)["FIWB".index(kind)] - sent_s
        yield kind_of_device.source, sent_s
        return
    if kind == "F":
        loaded = costs.problem.loaded(layer, type_name)[0]
        yield kind_of_device.source, costs.problem.seconds(layer, type_name)[0] - loaded
    for phase in phases:
        seconds, by_throughput = costs.problem.roofline(layer, phase, kind_of_device)
        is_guess = kind_of_device.source == "datasheet" and by_throughput
        yield "assumed" if is_guess else kind_of_device.source, seconds
        yield kind_of_device.source, exchanging_s(layer, phase, kind_of_device)
