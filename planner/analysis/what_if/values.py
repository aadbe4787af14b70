"""The value of a change, and the values of all changes together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from planner.analysis.what_if.altered import alter
from planner.analysis.what_if.case import Case, Way, holds_under
from planner.costs.placed_pipeline import PlacedPipeline
from planner.variants.changes import DeviceChange

LEAST_GAIN = 0.001
"""A change that can gain no larger share of the iteration cannot help."""
ROUNDING = 1e-9
"""A smaller share of a time is rounding."""
Useless = Literal["any plan", "same stages"]


@dataclass(frozen=True)
class Value:
    """A change and what it would give.

    Attributes:
        change: as it is written; parsing it gives the same change.
        iteration_time_s: the shortest found under it; None if nothing was found that fits.
        found_by: how; ``as it is`` if nothing was found faster than the plan as it is, whose
            timetable holds under the change too.
        compared_with_s: the shortest found without it, by the same steps.
        gain: share of that which it saves; negative if it costs.
        replay_s: of the plan, its orders unchanged; None if it does not fit memory then.
        stages_bound_s: no schedule of the plan's stages takes less under the change.
        lower_bound_s: no plan takes less; None where it was not solved again.
        bound_covers: the plans that holds for.
        useless: what is proved to gain no more than :data:`LEAST_GAIN` by it: ``any plan`` or
            any schedule of the ``same stages``; None if nothing is.
        assumes: what the figures rest on besides the cost model.
        why_not: why nothing fits.
    """

    change: str
    iteration_time_s: float | None
    found_by: Way | None
    compared_with_s: float
    gain: float | None
    replay_s: float | None
    stages_bound_s: float
    lower_bound_s: float | None
    bound_covers: str | None
    useless: Useless | None
    assumes: str | None
    why_not: str | None

    @property
    def most_gain(self) -> float | None:
        """The share it could save at most, over all plans; None if no bound was proved."""
        return self._most(self.lower_bound_s)

    @property
    def most_gain_of_stages(self) -> float | None:
        """The share it could save at most with the plan's stages."""
        return 0.0 if self.useless == "same stages" else self._most(self.stages_bound_s)

    def _most(self, bound_s: float | None) -> float | None:
        if bound_s is None or self.compared_with_s == 0:
            return None
        return max(0.0, 1 - bound_s / self.compared_with_s)


@dataclass(frozen=True)
class WhatIf:
    """All changes that were valued, the most gain first.

    Attributes:
        plan_s: iteration time of the plan itself.
        base_s: the shortest found for the problem as it is, by the same steps.
        base_found_by: how.
        values: of the changes.
        solved_anew: whether changed problems were solved, not only the plan's stages scheduled.
        left_out: changes a quick answer had no room for.
        interrupted: whether it was stopped before all steps were through.
    """

    plan_s: float
    base_s: float
    base_found_by: Way
    values: tuple[Value, ...]
    solved_anew: bool
    left_out: int
    interrupted: bool


@dataclass(frozen=True)
class WhatIfProgress:
    """A step that is through: which change, how much time has passed, what is known by now."""

    elapsed_s: float
    step: str
    change: str | None
    iteration_time_s: float | None


def value_of(case: Case, base: Case) -> Value:
    """Return the value of a change, compared with the plan as it is."""
    base_s = _compared_with_s(case, base)
    best_s, found_by = case.best_s, case.found_by
    if best_s > base_s and _still_holds(case, base):
        best_s, found_by = base_s, "as it is"
    found = math.isfinite(best_s)
    bound_s = case.lower_bound_s
    # A plan outside the bound's space may be faster than it.
    holds = bound_s is not None and best_s >= bound_s * (1 - ROUNDING)
    return Value(
        change=str(case.change),
        iteration_time_s=best_s if found else None,
        found_by=found_by,
        compared_with_s=base_s,
        gain=share_saved(best_s, base_s) if found else None,
        replay_s=case.replay_s,
        stages_bound_s=case.stages_bound_s,
        lower_bound_s=bound_s if holds else None,
        bound_covers=case.bound_covers if holds else None,
        useless=_useless(case, base, base_s, bound_s if holds else None),
        assumes=case.altered.assumes,
        why_not=None if found else case.why_not,
    )


def share_saved(time_s: float, compared_with_s: float) -> float:
    """Return the share of a time that a change saves; negative if it costs, 0 of no time."""
    return 1 - time_s / compared_with_s if compared_with_s > 0 else 0.0


def _compared_with_s(case: Case, base: Case) -> float:
    """Return the time to compare with; a change of the plan itself keeps its stages."""
    if not case.altered.is_of_plan:
        return base.best_s
    same = base.same
    assert same is not None, "the plan itself fits memory"
    return same.iteration_time_s


def _still_holds(case: Case, base: Case) -> bool:
    """Return whether the timetable of the best plan without the change holds under it."""
    best = base.best
    if best is None or case.altered.is_of_plan or case.change is None:
        return False
    altered = alter(base.with_plan_of(best), case.change)
    return case.allows(altered.stages, altered.orders) and holds_under(
        best, case.placed(altered.stages)
    )


def _useless(case: Case, base: Case, base_s: float, lower_bound_s: float | None) -> Useless | None:
    least_s = base_s * (1 - LEAST_GAIN)
    if lower_bound_s is not None and lower_bound_s >= least_s:
        return "any plan"
    if case.stages_bound_s >= least_s or _has_ample_memory(case, base):
        return "same stages"
    return None


def _has_ample_memory(case: Case, base: Case) -> bool:
    """Return whether a change gives memory to devices whose stages fit in any order as it is."""
    change, pipeline = case.change, base.pipeline
    if not isinstance(change, DeviceChange) or change.figure != "memory" or change.factor < 1:
        return False
    return all(
        _holds_everything(pipeline, device)
        for device in pipeline.devices
        if case.pipeline.capacity_bytes(device) != pipeline.capacity_bytes(device)
    )


def _holds_everything(pipeline: PlacedPipeline, device: str) -> bool:
    """Return whether all microbatches could be in flight with all tensors, none recomputed."""
    stages = [pipeline.stages[stage] for stage in pipeline.stages_on[device]]
    if any(stage.spec.recompute for stage in stages):
        return False
    each = sum(
        stage.stash_bytes
        + stage.weight_stash_bytes
        + stage.input_bytes
        + stage.output_bytes
        + stage.input_gradient_bytes
        + stage.output_gradient_bytes
        for stage in stages
    )
    apart = max(pipeline.split_extra_bytes(stage, device) for stage in pipeline.stages_on[device])
    need = pipeline.static_bytes(device) + apart + pipeline.microbatches * each
    return need <= pipeline.capacity_bytes(device)
