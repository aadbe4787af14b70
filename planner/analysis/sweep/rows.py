"""Points compared: time and cost per sample, devices, and which points no other dominates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from planner.cluster.cluster import Cluster, node_of
from planner.costs.throughput import Throughput, throughput
from planner.errors import PipeplanError
from planner.plan.plan import gap
from planner.plan.problem import Problem
from planner.plan.sweep_index import Point, SweptPoint

Bill = Literal["devices", "machines"]
"""Devices that are paid for: those in use, or all of each machine that has one in use."""


class SweepRow(SweptPoint):
    """The result of a point, compared with those of other points.

    Attributes:
        chooses: Whether the cluster has more devices than the search could use.
        throughput: Figures of the iteration time; None without a plan, or if nothing takes time.
        on_front: Whether no other row is at least as good in time per sample, cost per sample and
            devices in use, and better in one; cost counts if every plan has one.
    """

    chooses: bool = False
    throughput: Throughput | None = None
    on_front: bool = False

    @property
    def samples(self) -> int:
        """Samples per iteration."""
        return self.samples_per_microbatch * self.microbatches

    @property
    def time_per_sample_s(self) -> float | None:
        """Iteration time divided by its samples; None without a plan."""
        return None if self.iteration_time_s is None else self.iteration_time_s / self.samples

    @property
    def gap(self) -> float | None:
        """Iteration time / lower bound - 1; None without a plan or a bound."""
        if self.iteration_time_s is None or self.lower_bound_s is None:
            return None
        return gap(self.iteration_time_s, self.lower_bound_s)

    @property
    def devices_used(self) -> int | None:
        """Devices in use; None without a plan."""
        return len(self.used) or None

    @property
    def cost_per_million_samples(self) -> float | None:
        """Cost in the cluster's currency; None without a plan, or if a device has no price."""
        return self.throughput.cost_per_million_samples if self.throughput else None


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
    with_costs = has_costs(rows)
    front = pareto_front(
        [
            (
                row.time_per_sample_s or 0.0,
                len(row.used),
                (with_costs and row.cost_per_million_samples) or 0.0,
            )
            for row in planned
        ]
    )
    best = {planned[index].point for index in front}
    return tuple(row.model_copy(update={"on_front": row.point in best}) for row in rows)


def has_costs(rows: Iterable[SweepRow]) -> bool:
    """Return whether there are plans, and every one has a cost."""
    costs = [row.cost_per_million_samples for row in rows if row.plan is not None]
    return bool(costs) and None not in costs


def pareto_front(costs: Sequence[Sequence[float]]) -> frozenset[int]:
    """Return the indices of the rows that no other row dominates.

    A row dominates another if it is nowhere greater and somewhere less. Equal rows do not dominate
    each other.

    Args:
        costs: rows of equally many numbers; less is better in each.
    """
    front: list[int] = []
    # In lexicographic order, a row comes after all that dominate it, one of which is on the front.
    for index in sorted(range(len(costs)), key=lambda i: tuple(costs[i])):
        if not any(_dominates(costs[other], costs[index]) for other in front):
            front.append(index)
    return frozenset(front)


def _dominates(first: Sequence[float], second: Sequence[float]) -> bool:
    return tuple(first) != tuple(second) and all(a <= b for a, b in zip(first, second, strict=True))


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


def require_bill(bill: str) -> None:
    """Check the name of what is paid for.

    Raises:
        PipeplanError: if it is not known.
    """
    if bill not in get_args(Bill):
        raise PipeplanError(f"bill: {bill!r} is not known; choose from {', '.join(get_args(Bill))}")


def _row(found: SweptPoint, problem: Problem, bill: Bill) -> SweepRow:
    row = SweepRow(**dict(found))
    if found.iteration_time_s is None:
        return row
    cluster = problem.cluster
    unit = node_of if bill == "machines" else str
    units = set(map(unit, found.used))
    paid = [name for name in cluster.device_names if unit(name) in units]
    figures = throughput(
        problem.graph.record, cluster, problem.job, found.used, found.iteration_time_s, paid
    )
    chooses = len(found.chosen) < len(cluster.devices)
    return row.model_copy(update={"chooses": chooses, "throughput": figures})
