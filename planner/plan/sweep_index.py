"""The index of a sweep's folder: what its plans have in common, and points without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.errors import shorten
from planner.records.formats import JsonFile

INDEX_NAME = "sweep.json"
"""File name of the index in its folder."""
PlanName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.json$")]
"""Name of a plan's file in the folder itself."""


class SweepIndex(JsonFile):
    """What the plans of a sweep's folder have in common, and which points have no plan.

    Attributes:
        format: ``pipeplan-sweep/7``.
        inputs: Model, digests of layer graphs and clusters (without prices), fields of the job, the
            runtime and the settings of the search, by name.
        no_plan: Why points have no plan, by the names that their plans would have.
    """

    format: Literal["pipeplan-sweep/7"] = "pipeplan-sweep/7"
    inputs: dict[str, Any]
    no_plan: dict[PlanName, str] = Field(default_factory=dict)

    def differences(self, inputs: dict[str, Any]) -> Iterator[str]:
        """Yield each input in which another sweep differs, so that points do not compare.

        Graphs and clusters that only one of them has are no difference.
        """
        for name in sorted(self.inputs.keys() & inputs.keys()):
            there, now = self.inputs[name], inputs[name]
            if there != now:
                yield f"{name}: {shorten(there)} there, {shorten(now)} now"
