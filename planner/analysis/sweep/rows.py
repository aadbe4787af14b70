"""Points compared: time and cost a sample, devices, and which no other beats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from planner.cluster.cluster import Cluster, node_of
from planner.costs.throughput import (
    Throughput,
    cost_per_million_samples,
    price_per_hour,
    throughput,
)
from planner.errors import PipeplanError
from planner.plan.plan import gap
from planner.plan.problem import Problem
from planner.plan.sweep_index import Point, SweptPoint


def pareto_front(costs: Sequence[Sequence[float]]) -> frozenset[int]:
    """Return the indices of the rows that no other row dominates.

    A row dominates another if it is nowhere greater and somewhere less. Equal rows do not dominate
    each other.

    Args:
        costs: rows of equally many numbers; less is better in each.
    """
    front: list[int] = []
    # What dominates a row comes before it in lexicographic order, and so does what is on the front
    # and dominates it too.
    for index in sorted(range(len(costs)), key=lambda i: tuple(costs[i])):
        if not any(_dominates(costs[other], costs[index]) for other in front):
            front.append(index)
    return frozenset(front)


def _dominates(first: Sequence[float], second: Sequence[float]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


Bill = Literal["devices", "machines"]
"""Devices that are paid for: those in use, or all of each machine that has one in use."""


@dataclass(frozen=True)
class SweepRow:
    """A point and its figures; None where there is no plan, or no price.

    Attributes:
        point: which.
        plan: name of its plan's file in the folder.
        iteration_time_s: predicted.
        lower_bound_s: no plan on the point's devices takes less.
        gap: iteration time / lower bound - 1.
        devices_used: how many; the plan may leave some of the point's devices idle.
        degree: devices of each tensor-parallel group, several numbers where they differ; None also
            where an older sweep did not say.
        chosen: the devices that the search could use.
        chooses: whether the cluster has more.
        price_per_hour: of what is paid for, in the cluster's currency.
        throughput: what the iteration time means; None also where nothing takes time.
        on_front: whether no other row is at least as good in time a sample, cost a sample and
            devices in use, and better in one; cost counts if every plan has one.
        reason: why there is no plan.
    """

    point: Point
    plan: str | None = None
    iteration_time_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    devices_used: int | None = None
    degree: int | tuple[int, ...] | None = None
    chosen: tuple[str, ...] = ()
    chooses: bool = False
    price_per_hour: float | None = None
    throughput: Throughput | None = None
    on_front: bool = False
    reason: str | None = None

    @property
    def time_per_sample_s(self) -> float | None:
        """Iteration time divided by its samples."""
        return None if self.iteration_time_s is None else self.iteration_time_s / self.point.samples

    @property
    def cost_per_million_samples(self) -> float | None:
        """Cost in the cluster's currency."""
        if self.time_per_sample_s is None or self.price_per_hour is None:
            return None
        return cost_per_million_samples(self.time_per_sample_s, self.price_per_hour)


def rows_of(
    found: Iterable[SweptPoint], problems: Mapping[Point, Problem], bill: Bill = "devices"
) -> tuple[SweepRow, ...]:
    """Return points with their figures and costs, those on the front marked.

    Args:
        found: points, in the order of the rows.
        problems: of the points, with whole clusters, as their idle devices may cost too.
        bill: what is paid for.
    """
    rows = [_row(row, problems[row.point], bill) for row in found]
    planned = [row for row in rows if row.plan is not None]
    best = {planned[index].point for index in pareto_front(_costs(planned))}
    return tuple(replace(row, on_front=row.point in best) for row in rows)


def has_costs(rows: Iterable[SweepRow]) -> bool:
    """Return whether there are plans, and every one has a cost."""
    costs = [row.cost_per_million_samples for row in rows if row.plan is not None]
    return bool(costs) and None not in costs


def currency_of(clusters: Mapping[str, Cluster]) -> str | None:
    """Return the currency of all clusters with prices; None if there is none.

    Raises:
        PipeplanError: if they name different ones.
    """
    priced = {
        label: cluster.currency
        for label, cluster in clusters.items()
        if any(price is not None for price in cluster.prices_per_hour.values())
    }
    if len(set(priced.values())) > 1:
        named = ", ".join(f"{label} {name or 'names none'}" for label, name in priced.items())
        raise PipeplanError(
            f"currency: the clusters' prices do not compare ({named}); give all in one currency"
        )
    return next(iter(priced.values()), None)


def require_bill(bill: str) -> Bill:
    """Return which devices are paid for, checking its name.

    Raises:
        PipeplanError: if it is none.
    """
    for known in get_args(Bill):
        if bill == known:
            return known  # type: ignore[no-any-return]
    raise PipeplanError(f"bill: {bill!r} is not known; choose from {', '.join(get_args(Bill))}")


def _row(found: SweptPoint, problem: Problem, bill: Bill) -> SweepRow:
    if found.iteration_time_s is None or found.lower_bound_s is None:
        return SweepRow(found.point, reason=found.reason)
    cluster, time_s = problem.cluster, found.iteration_time_s
    paid = _paid(found.used, cluster, bill)
    return SweepRow(
        found.point,
        plan=found.plan,
        iteration_time_s=time_s,
        lower_bound_s=found.lower_bound_s,
        gap=gap(time_s, found.lower_bound_s),
        devices_used=len(found.used),
        degree=found.degree,
        chosen=found.chosen,
        chooses=len(found.chosen) < len(cluster.devices),
        price_per_hour=price_per_hour(cluster, paid),
        throughput=throughput(problem.graph.record, cluster, problem.job, found.used, time_s, paid),
    )


def _paid(used: Sequence[str], cluster: Cluster, bill: Bill) -> list[str]:
    """Return the devices that are paid for, in the cluster's order."""
    unit = node_of if bill == "machines" else str
    units = set(map(unit, used))
    return [name for name in cluster.device_names if unit(name) in units]


def _costs(planned: Sequence[SweepRow]) -> list[tuple[float, ...]]:
    """Return what the front compares: time and devices, and cost if all have one."""
    with_costs = has_costs(planned)
    rows: list[tuple[float, ...]] = []
    for row in planned:
        assert row.time_per_sample_s is not None, "planned"
        assert row.devices_used is not None, "planned"
        cost = row.cost_per_million_samples if with_costs else None
        rows.append((row.time_per_sample_s, float(row.devices_used), cost or 0.0))
    return rows
