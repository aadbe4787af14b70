"""The gradients of a plan that several devices sum, by the rules of docs/cost_model.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.model.graph_record import Parameter
from planner.verification.costs import PlanCosts
from planner.verification.routes import AllReduce


@dataclass(frozen=True)
class Reduction:
    """Gradients that are summed over several devices, whole or in parts.

    Attributes:
        stages: whose gradients.
        devices: that hold them.
        taken: what it takes of time and links.
        first_layer: the layer that the last backward has to have run; None: all of it.
        gathered: what an all-gather of parameters takes after the optimizer's step; None: none
            follows.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    taken: AllReduce
    first_layer: str | None = None
    gathered: AllReduce | None = None


def reductions_of(costs: PlanCosts) -> list[Reduction]:
    """Return those of single stages in order, then of tied parameters by their stages.

    Raises:
        PipeplanError: if no path joins devices that reduce.
    """
    held: defaultdict[tuple[int, ...], list[Parameter]] = defaultdict(list)
    for name, stages in costs.holders.items():
        parameter = costs.parameters[name]
        if parameter.trainable and name not in costs.divided:
            held[stages].append(parameter)
            for stage in stages if costs.in_turn(stages) else ():
                held[(stage,)].append(parameter)
    found: list[Reduction] = []
    for stages in sorted(held, key=lambda stages: (len(stages) > 1, stages)):
        if any(row.bytes for row in held[stages]):
            found += _reductions(costs, stages, held[stages])
    return found


def _reductions(
    costs: PlanCosts, stages: tuple[int, ...], parameters: Sequence[Parameter]
) -> Iterator[Reduction]:
    """Yield the reductions of parameters that the same stages hold."""
    if costs.in_turn(stages):
        # The n-th replicas of all these stages sum what the replicas of each have summed.
        rows = zip(*(costs.plan.stages[stage].devices for stage in stages), strict=True)
        for devices in map(costs.in_order, map(set, rows)):
            if len(devices) > 1:
                yield Reduction(stages, devices, _all_reduce(costs, devices, parameters))
        return
    devices = costs.in_order(costs.devices_of(stages))
    for bucket, first_layer in _buckets(costs, stages, parameters) if len(devices) > 1 else ():
        if costs.plan.job.shards_state:
            taken, gathered = (
                costs.routes.ring_half(devices, bytes_)
                for bytes_ in (_summed_bytes(costs, bucket), sum(row.bytes for row in bucket))
            )
            yield Reduction(stages, devices, taken, first_layer, gathered)
        else:
            yield Reduction(stages, devices, _all_reduce(costs, devices, bucket), first_layer)


def _summed_bytes(costs: PlanCosts, parameters: Sequence[Parameter]) -> int:
    return sum(map(costs.single.gradient_bytes, parameters))


def _all_reduce(
    costs: PlanCosts, devices: Sequence[str], parameters: Sequence[Parameter]
) -> AllReduce:
    return costs.routes.all_reduce(devices, _summed_bytes(costs, parameters))


def _buckets(
    costs: PlanCosts, stages: tuple[int, ...], parameters: Sequence[Parameter]
) -> Iterator[tuple[Sequence[Parameter], str | None]]:
    """Yield what is reduced at once, and the layer whose backward completes it: all, or buckets."""
    limit = costs.plan.bucket_bytes
    if limit is None or len(stages) > 1:
        yield parameters, None
        return
    first_user: dict[str, str] = {}
    for layer in costs.layers[stages[0]]:
        for name in layer.parameters:
            first_user.setdefault(name, layer.name)
    own = {row.name: row for row in parameters if row.bytes}
    held: list[Parameter] = []
    for name in reversed([name for name in first_user if name in own]):
        if held and _summed_bytes(costs, [*held, own[name]]) > limit:
            yield held, first_user[held[-1].name]
            held = []
        held.append(own[name])
    yield held, first_user[held[-1].name]
