"""Whether any sequence of stages keeps a time on classes of devices: all passes that it takes."""

from __future__ import annotations

import numpy as np

from planner.verification.proof.program import MARGIN, Counted, ProofPass
from planner.verification.proof.stages import ProvedStages
from planner.verification.proof.tied import StageCase, all_plans, cases_by_classes

FIGURES = 10_000
"""Stages that are looked at in the time that figures of a set of devices take, once."""


class ClassProgram:
    """Whether any sequence of stages keeps a time, on classes of devices.

    A time above one that is kept is kept too, and one below a refuted one is refuted; so no pass is
    made twice for nothing where several times are asked for.

    Args:
        stages: of the problem.
    """

    def __init__(self, stages: ProvedStages) -> None:
        self.stages = stages
        self._all = _CasePasses(stages, all_plans(stages))
        self._cases = [_CasePasses(stages, case) for case in cases_by_classes(stages)]

    def refutes(self, time_s: float) -> bool:
        """Return whether no sequence of stages keeps a time, in all cases that plans may be in."""
        if self._all.refute(time_s):
            return True
        likeliest = sorted(self._cases, key=lambda case: case.kept_s)
        return bool(likeliest) and all(case.refute(time_s) for case in likeliest)

    @property
    def looked_at(self) -> float:
        """Stages of states that all passes have looked at, each on a class with a memory level.

        The figures of all stages count as some more.
        """
        passes = sum(case.looked_at for case in (self._all, *self._cases))
        return passes + FIGURES * len(self.stages.vectors.options)


class _CasePasses:
    """The passes for plans of one case."""

    def __init__(self, stages: ProvedStages, case: StageCase) -> None:
        counted: tuple[Counted, ...] = ("way", "work") if stages.layers.space.splits else ("way",)
        self._stages, self._case = stages, case
        # The largest time that a pass refutes so far, and the least that it does not.
        self._refuted_s = dict.fromkeys(counted, 0.0)
        self._kept_s = dict.fromkeys(counted, np.inf)
        self.looked_at = 0.0

    @property
    def kept_s(self) -> float:
        """The least time that no pass refutes, as far as is known."""
        return max(self._kept_s.values())

    def refute(self, time_s: float) -> bool:
        """Return whether a pass shows that no sequence of stages keeps a time."""
        strongest = sorted(self._refuted_s, key=lambda counted: -self._refuted_s[counted])
        return any(self._refute(counted, time_s) for counted in strongest)

    def _refute(self, counted: Counted, time_s: float) -> bool:
        if self._refuted_s[counted] < time_s < self._kept_s[counted]:
            made = ProofPass(self._stages, self._case, time_s * MARGIN, counted)
            known = self._refuted_s if made.refutes() else self._kept_s
            known[counted] = time_s
            self.looked_at += made.looked_at
        return time_s <= self._refuted_s[counted]
