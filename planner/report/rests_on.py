"""What a predicted time rests on, in a line."""

from __future__ import annotations

from collections.abc import Sequence

from planner.artifacts.plan import RestsOn
from planner.costs.placement import PlacedPipeline
from planner.critical_path import PathStep
from planner.rests_on import rests_on_path


def rests_on_lines(shares: RestsOn | None) -> list[str]:
    """How much of the time is measured, and how much assumed; no line where nothing takes time."""
    if shares is None:
        return []
    return [
        f"of the iteration time {shares.measured:.1%} rests on measured figures, "
        f"{shares.datasheet:.1%} on datasheets, {shares.assumed:.1%} on assumptions"
    ]


def rests_on_data(pipeline: PlacedPipeline, path: Sequence[PathStep]) -> dict[str, float] | None:
    """The shares of a critical path as plain JSON values."""
    shares = rests_on_path(pipeline, path)
    return None if shares is None else shares.model_dump()
