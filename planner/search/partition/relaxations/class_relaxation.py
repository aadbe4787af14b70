"""A bound on every plan where many devices can be exchanged, with all links as they are.

As the type relaxation, but only devices that can be exchanged count as alike: a state says how many
devices of each class are used and which of them hold the last stage. So every transfer has its own
links, and a stage's work is spread with regard to what each replica's links carry. Whether a time
can be reached is decided by a pass of dynamic programming over the cuts
(:mod:`planner.search.partition.relaxations.class_pass`). One stage a device, any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np

from planner.cluster.link_table import LinkTable
from planner.search.partition.chain import Chain, Partition, StageChoice
from planner.search.partition.dynamic_programs.core import narrowed_s
from planner.search.partition.intervals import MAX_CUTS
from planner.search.partition.relaxations.class_figures import ClassFigures, ClassStageFigures
from planner.search.partition.relaxations.class_pass import ClassPass, Stage, Steps, most_steps
from planner.search.partition.relaxations.tied_stages import Support, TiedStages
from planner.search.partition.symmetry import MOST_DEVICES

GROWTH = 1.25
"""By how much a limit that cannot be kept is raised."""
TOLERANCE = 5e-5
"""Relative width of a bisection at its end: an exact relaxation then proves the best plan alone."""
MAX_STEPS = 2e7
"""Steps of a pass at all cuts, beyond which it takes too long."""
MAX_FIGURES = 8e6
"""Figures of one kind of all stages, 64 MB."""


Among = tuple[Support, ...]
"""Sets of classes, one of which the stage of the last tied layer lies on; none: any classes."""


class ClassRelaxation:
    """The relaxation of one problem.

    Args:
        chain: the layers.
        links: of the cluster.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self._figures = ClassFigures(chain, links)
        self._refuted_s: dict[Among, float] = {}
        self._stages: tuple[Among, ClassStageFigures] | None = None

    @property
    def is_tractable(self) -> bool:
        """Whether the program holds for the chain and is small enough to be run.

        Chains in cells are left to other relaxations: a stage inside of a cell is not seen, and its
        devices may join two others better than these are joined themselves.
        """
        chain = self._figures.chain
        if len(chain.problem.cluster.devices) > MOST_DEVICES or chain.length > MAX_CUTS:
            return False
        classes, replication = self._figures.classes, chain.problem.job.replication
        steps = most_steps(classes.sizes, replication=replication) * chain.length
        return steps <= MAX_STEPS and classes.count * chain.length**2 <= MAX_FIGURES

    def bound_s(
        self,
        low_s: float,
        guess_s: float,
        longest_s: float,
        tolerance: float = TOLERANCE,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """Return a time that no plan beats.

        Args:
            low_s: no plan is faster than this either.
            guess_s: a limit to try first.
            longest_s: what some plan keeps, or any valid time limit; not more is returned.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step of it.
        """
        high_s = min(max(guess_s, low_s), longest_s)
        among = self._kept(self._tied.supports, high_s)
        while among is None:
            low_s = max(low_s, high_s)
            if high_s >= longest_s or not may_go_on():
                return low_s
            # Where nothing is known to take any time there is nothing to grow from.
            high_s = min(GROWTH * high_s, longest_s) if high_s > 0 else longest_s
            among = self._kept(self._tied.supports, high_s)
        while among is not None and may_go_on():
            # No other choice is of interest but below the least limit of this one.
            high_s, _ = narrowed_s(partial(self._keeps, among), low_s, high_s, tolerance, may_go_on)
            among = self._kept(self._tied.supports, high_s) if high_s > low_s else None
        return low_s if among is not None else max(low_s, high_s)

    def partition(self, limit_s: float) -> Partition | None:
        """Return stages that keep a limit on the relaxed cluster; None if there are none."""
        among = self._kept(self._tied.supports, limit_s)
        found = None if among is None else self._pass(among, limit_s)
        return None if found is None else self._placed(found.stages())

    @cached_property
    def _tied(self) -> TiedStages:
        return TiedStages(self._figures)

    def _kept(self, among: Among, limit_s: float) -> Among | None:
        """Return the set of classes with which a limit can be kept, alone; None if there is none.

        What all of them together refute, with the least reduction of any, each of them refutes.
        """
        if not self._keeps(among, limit_s):
            return None
        if len(among) <= 1:
            return among
        middle = len(among) // 2
        found = self._kept(among[:middle], limit_s)
        return found if found is not None else self._kept(among[middle:], limit_s)

    def _keeps(self, among: Among, limit_s: float) -> bool:
        if limit_s <= self._refuted_s.get(among, 0.0):
            return False
        keeps = self._pass(among, limit_s).keeps
        if not keeps:
            self._refuted_s[among] = limit_s
        return keeps

    def _pass(self, among: Among, limit_s: float) -> ClassPass:
        if self._stages is None or self._stages[0] != among:
            self._stages = among, self._tied.stages(among)
        return ClassPass(self._figures, self._stages[1], self._steps, limit_s)

    @cached_property
    def _steps(self) -> Steps:
        figures = self._figures
        return Steps(figures.classes.vectors, figures.classes.sizes, figures.holds)

    def _placed(self, stages: Sequence[Stage]) -> Partition:
        classes, cuts = self._figures.classes, self._figures.intervals.cuts
        used = np.zeros(len(classes.sizes), dtype=np.int64)
        chosen = []
        for begin, end, number in stages:
            vector = classes.vectors[number]
            devices = classes.devices(vector, used)
            chosen.append(StageChoice(int(cuts[begin]), int(cuts[end]), devices))
            used = used + vector
        return tuple(chosen)
