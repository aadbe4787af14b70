"""Points compared: time and cost per sample, devices, and which points no other dominates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.analysis.sweep.points import Point
from planner.cluster.cluster import Cluster
from planner.costs.throughput import Throughput, throughput
from planner.errors import PipeplanError
from planner.plan.plan import Plan, gap
from planner.plan.problem import Problem


@dataclass(frozen=True)
class SweepRow:
    """The result of a point: a plan's figures, or the reason why there is none.

    Attributes:
        point: the combination.
        plan: name of the plan's file; None without a plan, and so are other figures.
        iteration_time_s: of the plan.
        lower_bound_s: on the chosen devices.
        chosen: devices that the search could use.
        used: devices in use.
        degrees: numbers of devices of the plan's tensor-parallel groups.
        chooses: whether the cluster has more devices than the search could use.
        throughput: figures of the iteration time; None too if nothing takes time.
        reason: why there is no plan.
        on_front: whether no other row is at least as good in time per sample, cost per sample and
            devices in use, and better in one; cost counts if every plan has one.
    """

    point: Point
    plan: str | None = None
    iteration_time_s: float | None = None
    lower_bound_s: float | None = None
    chosen: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    degrees: tuple[int, ...] | None = None
    chooses: bool = False
    throughput: Throughput | None = None
    reason: str | None = None
    on_front: bool = False

    @property
    def samples(self) -> int:
        """Samples per iteration."""
        return self.point.samples_per_microbatch * self.point.microbatches

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
    def cost_per_million_samples(self) -> float | None:
        """Cost in the cluster's currency; None without a plan, or if a device has no price."""
        return self.throughput.cost_per_million_samples if self.throughput else None


def row_of(point: Point, problem: Problem, plan: Plan) -> SweepRow:
    """Return a plan's figures, with the prices that the problem's cluster has now."""
    time_s, used = plan.predicted.iteration_time_s, plan.rank_devices
    record, cluster = problem.graph.record, problem.cluster
    return SweepRow(
        point=point,
        plan=point.plan_name,
        iteration_time_s=time_s,
        lower_bound_s=plan.predicted.lower_bound_s,
        chosen=plan.cluster.device_names,
        used=used,
        degrees=plan.degrees,
        chooses=len(plan.cluster.devices) < len(cluster.devices),
        throughput=throughput(record, cluster, problem.job, used, time_s),
    )


def with_front(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """Return the rows with those marked that no other dominates."""
    planned, with_costs = [row for row in rows if row.plan is not None], has_costs(rows)
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
    return tuple(replace(row, on_front=row.point in best) for row in rows)


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
    rows = np.array(costs, dtype=float)
    return frozenset(
        number
        for number, row in enumerate(rows)
        if not ((rows <= row).all(axis=1) & (rows < row).any(axis=1)).any()
    )


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
