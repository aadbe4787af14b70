"""Whether an argument proves a bound: each kind with arithmetic of its own, nothing is searched."""

from __future__ import annotations

import numpy as np

from planner.errors import PipeplanError
from planner.plan.certificate import (
    Argument,
    LayerPrices,
    LikeDevices,
    MicrobatchPath,
    TypePrices,
    WorkPrices,
)
from planner.plan.problem import Problem
from planner.space import Space
from planner.verification.proof.budget import BudgetPass, require_few_amounts
from planner.verification.proof.classes import ClassPass, require_few_states
from planner.verification.proof.columns import MOST_STAGES, earned_too_little
from planner.verification.proof.figures import MARGIN, Figures, FloatArray
from planner.verification.proof.links import AnyLinks, ClassLinks
from planner.verification.proof.stages import StageFigures
from planner.verification.proof.tied import StageCase, all_plans, cases_by_classes
from planner.verification.proof.vectors import Vectors

MOST_DEVICES = 64
"""Devices of a cluster whose pairs are looked at one by one."""


class BoundCheck:
    """Checks arguments for bounds on one space of plans.

    Args:
        problem: the layer graph, the cluster and the job.
        space: of the plans that the bounds are about.

    Raises:
        PipeplanError: if an argument is not about this problem, or too large to check.
    """

    def __init__(self, problem: Problem, space: Space) -> None:
        self._cluster, self._space = problem.cluster, space
        self._figures = Figures(problem, space)
        # Where backwards may be split, a pass counts ways back, and another all work.
        self._counted = (True, False) if space.splits else (True,)

    def least_s(self, argument: WorkPrices | MicrobatchPath) -> float:
        """Return the largest bound that an argument of one sum proves."""
        figures, layer = self._figures, self._figures.of_layer
        if isinstance(argument, MicrobatchPath):
            # Whatever is left of the first layer's backward follows its last gradient.
            way = figures.on_fastest(layer.forward + layer.gradient)
            return float(way.sum() + figures.on_fastest(layer.weight)[0]) / MARGIN
        # Each second of a layer is paid the price of its device's type, at least the lowest one.
        prices = self._type_prices(argument.prices, figures.at_once)
        paid = figures.on_fastest(prices[:, None] * (layer.forward + layer.backward))
        return figures.microbatches * float(paid.sum()) / MARGIN

    def proves(self, argument: Argument, bound_s: float) -> bool:
        """Return whether no plan of the space takes less than a bound, by this argument."""
        match argument:
            case WorkPrices() | MicrobatchPath():
                return bound_s <= self.least_s(argument)
            case LikeDevices():
                return self._no_stages_keep(argument, bound_s * MARGIN)
            case TypePrices():
                return self._no_budget_keeps(argument, bound_s * MARGIN)
            case LayerPrices():
                prices = self._layer_prices(argument)
                self._figures.require_few_layers()
                self._require_few_devices()
                return earned_too_little(self._figures, prices, bound_s)

    def _require_few_devices(self) -> None:
        count = len(self._cluster.devices)
        if count > MOST_DEVICES:
            raise PipeplanError(
                f"certificate: {count} devices are too many to check (at most {MOST_DEVICES})"
            )

    def _require_one_stage(self, what: str) -> None:
        if self._space.max_stages_per_device > 1:
            raise PipeplanError(
                f"argument: {what} prove nothing about several stages a device "
                f"(max_stages_per_device is {self._space.max_stages_per_device})"
            )

    # --- prices -----------------------------------------------------------------------------------

    def _no_budget_keeps(self, argument: TypePrices, limit_s: float) -> bool:
        """Return whether no sequence of stages that the budget pays for keeps a time."""
        self._require_one_stage("prices of devices")
        self._figures.require_few_layers()
        require_few_amounts(self._figures)
        links = AnyLinks(self._cluster)
        prices = self._type_prices(argument.prices, self._figures.counts)
        passes = (BudgetPass(self._figures, links, prices, limit_s, b) for b in self._counted)
        return any(row.refutes() for row in passes)

    def _type_prices(self, named: dict[str, float], counts: FloatArray) -> FloatArray:
        """Return prices by type, so many devices of each together costing 1."""
        types = self._figures.types
        if set(named) != set(types):
            raise PipeplanError(
                f"argument.prices: of {', '.join(sorted(named))}, but the cluster has "
                f"{', '.join(sorted(types))}"
            )
        prices = np.array([named[name] for name in types])
        if not prices.any():
            raise PipeplanError("argument.prices: all of them are 0, which proves nothing")
        prices = prices / prices.max()
        return np.asarray(prices / float((prices * counts).sum()))

    def _layer_prices(self, argument: LayerPrices) -> FloatArray:
        """Return the prices, the largest of them 1."""
        if len(argument.prices) != len(self._figures.layers):
            raise PipeplanError(
                f"argument.prices: {len(argument.prices)} of them, but the layer graph has "
                f"{len(self._figures.layers)} layers"
            )
        if self._space.max_stages_per_device > MOST_STAGES:
            raise PipeplanError(
                f"argument.prices: they prove bounds for up to {MOST_STAGES} stages a device "
                f"(max_stages_per_device is {self._space.max_stages_per_device})"
            )
        prices = np.array(argument.prices)
        return np.asarray(prices / (prices.max() or 1.0))

    # --- classes of devices -----------------------------------------------------------------------

    def _no_stages_keep(self, argument: LikeDevices, limit_s: float) -> bool:
        """Return whether no sequence of stages keeps a time, in all cases that plans may be in.

        A pass over all plans may show it, or one over those of each case.
        """
        stages = self._stages(argument)

        def is_refuted(case: StageCase) -> bool:
            passes = (ClassPass(stages, case, limit_s, back) for back in self._counted)
            return any(row.refutes() for row in passes)

        if is_refuted(all_plans(stages)):
            return True
        cases = list(cases_by_classes(stages))
        return bool(cases) and all(map(is_refuted, cases))

    def _stages(self, argument: LikeDevices) -> StageFigures:
        self._require_one_stage("classes")
        kinds = [self._kind(members) for members in argument.classes]
        named = sorted(name for members in argument.classes for name in members)
        if named != sorted(self._cluster.device_names):
            raise PipeplanError("argument.classes: they are not all devices, each of them once")
        self._require_few_devices()
        sizes = [len(members) for members in argument.classes]
        vectors = Vectors(sizes, replication=self._space.replication)
        self._figures.require_few_layers()
        require_few_states(vectors, len(self._figures.layers) + 1)
        links = ClassLinks(self._cluster, argument.classes)
        return StageFigures(self._figures, links, vectors, kinds)

    def _kind(self, members: tuple[str, ...]) -> int:
        """Return the number of the type of a class."""
        unknown = [name for name in members if name not in self._cluster.numbers]
        if unknown:
            raise PipeplanError(f"argument.classes: unknown device {unknown[0]!r}")
        names = {self._cluster.type_of(name) for name in members}
        if len(names) > 1:
            raise PipeplanError(
                f"argument.classes: devices of types {', '.join(sorted(names))} in one class"
            )
        return self._figures.types.index(names.pop())
