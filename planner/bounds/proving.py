"""Proves lower bounds: times that no plan of a problem's space keeps, each with its certificate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.bounds.alike import interchangeable_devices
from planner.bounds.budget import Budget
from planner.bounds.classes import MARGIN, Classes, ClassProgram
from planner.bounds.columns import Columns
from planner.bounds.intervals import IntervalTable
from planner.bounds.layers import LayerTable
from planner.bounds.prices import DIGITS, work_prices
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.plan.certificate import Argument, Certificate, MicrobatchPath, WorkPrices
from planner.plan.plan import COST_MODEL
from planner.plan.problem import Problem
from planner.units import significant

MOST_DEVICES = 64
"""Devices of a cluster of which pairs are looked at one by one."""
BELOW = 1 - 1e-6
"""A bound that is this share of a plan's time says that the plan is optimal."""
FARTHEST = 1e4
"""By this factor a bound may exceed that of total work: where no plan fits, any time is refuted."""
TOLERANCES = (2e-2, 2e-3, 1e-4)
"""By which share a larger time has to be refuted to be worth another pass, the coarsest first."""


TimeArgument = ClassProgram | Budget | Columns
"""A reason why no plan keeps a time, of which the largest is searched for."""


class ProvedBound(NamedTuple):
    """What has been proved so far.

    Attributes:
        bound_s: no plan of the problem's space takes less.
        argument: why.
        looked_at: states of dynamic programs that have been looked at, a measure of work that is
            the same on every machine.
    """

    bound_s: float
    argument: Argument
    looked_at: float

    def certificate(self, problem: Problem) -> Certificate:
        """Return the certificate that a plan of the problem carries."""
        return Certificate(
            bound_s=self.bound_s,
            argument=self.argument,
            space=problem.job.space,
            problem_digest=problem.digest,
            cost_model=COST_MODEL,
        )


def prove(problem: Problem, best_s: float = math.inf) -> Iterator[ProvedBound]:
    """Yield what has been proved after each pass over one time, until there is nothing to gain.

    The bounds never fall. The caller stops whenever it wants: a pass takes a fraction of a second,
    on the largest problems a few seconds.

    Args:
        problem: the layer graph, the cluster and the job. Devices may be tensor-parallel groups.
        best_s: iteration time of a plan, if there is one; no bound is above it.

    Raises:
        PipeplanError: if the job has tensor-parallel groups that are not yet devices of the
            cluster (:func:`planner.plan.tensor_parallel.grouped_problem`).
    """
    yield from Prover(problem, best_s).steps()


class Prover:
    """Searches for the largest time that some argument refutes.

    Args:
        problem: the layer graph, the cluster and the job.
        best_s: iteration time of a plan; it may be lowered while the search goes on.

    Attributes:
        found: what has been proved so far.
    """

    def __init__(self, problem: Problem, best_s: float = math.inf) -> None:
        if problem.job.tensor_parallel != 1 and not problem.has_groups:
            raise PipeplanError(
                f"tensor_parallel = {problem.job.tensor_parallel}: bounds are proved for groups "
                "that are the devices of a problem; group its devices first"
            )
        self.best_s = best_s
        self._layers = layers = LayerTable(problem)
        self._strongest: TimeArgument | None = None
        self._kept_s: defaultdict[TimeArgument, float] = defaultdict(lambda: math.inf)
        prices = work_prices(layers.forward_s + layers.backward_s, layers.may_run, layers.working)
        named = {
            name: significant(float(price / prices.max()), DIGITS)
            for name, price in zip(layers.types, prices, strict=True)
        }
        work_s = layers.work_s(np.array([named[name] for name in layers.types])) / MARGIN
        path_s = layers.path_s / MARGIN
        by_work = work_s >= path_s
        argument: Argument = WorkPrices(prices=named) if by_work else MicrobatchPath()
        self._simple = ProvedBound(max(work_s, path_s), argument, 0.0)
        self.found = self._simple._replace(bound_s=min(best_s, self._simple.bound_s))

    def steps(self) -> Iterator[ProvedBound]:
        """Yield what has been proved after each pass."""
        yield self.found
        arguments = self._arguments
        for tolerance in TOLERANCES:
            # The argument that proved most comes first: others mostly fail at once after it.
            for argument in sorted(arguments, key=lambda row: row is not self._strongest):
                for _ in self._raised(argument, tolerance):
                    looked_at = sum(row.looked_at for row in arguments)
                    self.found = self.found._replace(looked_at=looked_at)
                    yield self.found

    @property
    def likely(self) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
        """Partitions that passes could not rule out, the one of the least time first.

        Of each stage the layer behind it and the numbers of its devices. Layers and numbers of
        devices may keep a time that messages or memory do not, so that they are not yet plans.
        """
        programs = [row for row in self._arguments if isinstance(row, ClassProgram)]
        rows = sorted((s, stages) for row in programs for stages, s in row.likely.items())
        numbers = self._layers.cluster.numbers
        return [
            (
                tuple(stage.end for stage in stages),
                tuple(tuple(sorted(numbers[n] for n in stage.devices)) for stage in stages),
            )
            for _, stages in rows
        ]

    def _raised(self, argument: TimeArgument, tolerance: float) -> Iterator[None]:
        """Raise the bound as far as an argument can, to within a share; yield after each pass."""
        if not self._may_rise(argument, tolerance):
            return
        step, first_s = tolerance, self.found.bound_s * (1 + tolerance)
        # One that has raised the bound before is likely to go on.
        is_rising = argument is self._strongest or self._try(argument, first_s)
        yield
        while is_rising and self._may_rise(argument, tolerance):
            step *= 2
            kept_s = self._kept_s[argument]
            if math.isfinite(kept_s):
                self._try(argument, (self.found.bound_s + min(kept_s, self._most_s)) / 2)
            else:
                # A pass over a time far above the bound looks at far more stages: go there slowly,
                # even where a plan is known, since the first plan of a search may be far from good.
                self._try(argument, min(self._most_s, self.found.bound_s * (1 + step)))
            yield

    @property
    def _most_s(self) -> float:
        return min(self.best_s * BELOW, FARTHEST * self._simple.bound_s)

    def _may_rise(self, argument: TimeArgument, tolerance: float) -> bool:
        most_s = min(self._most_s, self._kept_s[argument])
        return self.found.bound_s * (1 + tolerance) < most_s

    def _try(self, argument: TimeArgument, time_s: float) -> bool:
        """Look whether an argument refutes a time, and note it."""
        proved = argument.refute(time_s)
        if proved is None:
            self._kept_s[argument] = min(time_s, self._kept_s[argument])
        elif time_s > self.found.bound_s:
            self.found = ProvedBound(time_s, proved, self.found.looked_at)
            self._strongest = argument
        return proved is not None

    @cached_property
    def _arguments(self) -> list[TimeArgument]:
        return list(self._made())

    def _made(self) -> Iterator[TimeArgument]:
        """Yield arguments, the strongest first; none where there are too many layers."""
        problem = self._layers.problem
        with suppress(PipeplanError):
            intervals = IntervalTable(self._layers)
            if problem.job.max_stages_per_device > 1:
                if len(problem.cluster.devices) <= MOST_DEVICES:
                    yield Columns(intervals)
                return
            for classes in classes_of(problem.cluster):
                with suppress(PipeplanError):
                    yield ClassProgram(intervals, classes)
            yield Budget(intervals)


def classes_of(cluster: Cluster) -> Iterator[Classes]:
    """Yield devices that can be exchanged, and devices by type; none of large clusters."""
    if len(cluster.devices) > MOST_DEVICES:
        return
    groups = [tuple(group) for group in interchangeable_devices(cluster)]
    held = {name for group in groups for name in group}
    alone = [(name,) for name in cluster.device_names if name not in held]
    types = dict.fromkeys(device.type for device in cluster.devices)
    of_type = [tuple(d.name for d in cluster.devices if d.type == kind) for kind in types]
    yield from dict.fromkeys([(*groups, *alone), tuple(of_type)])
