"""Plans explained and shown from Python, as the commands of the same names do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planner.analysis.explain import explain as explain_timeline
from planner.analysis.explain.explanation import Explanation
from planner.errors import require_kind
from planner.plan.plan import Plan
from planner.prediction import replay
from planner.report.explanation import explanation_lines
from planner.report.gantt import plot_gantts, save_gantts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOAD = "planner.load_plan reads a file"


class PlanExplanation(NamedTuple):
    """Why a plan is not faster; as a string, the lines of ``pipeplan explain``.

    Attributes:
        figures: times in s and sizes in bytes.
        lines: the same in words, the strongest limit first.
    """

    figures: Explanation
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def explain(plan: Plan) -> PlanExplanation:
    """Explain why a plan is not faster.

    Raises:
        PipeplanError: if no simulation can be made of the plan.
    """
    require_kind(plan, Plan, "plan", _LOAD)
    figures = explain_timeline(replay(plan))
    return PlanExplanation(figures, tuple(explanation_lines(figures)))


def plot(*plans: Plan, path: str | Path | None = None) -> list[Axes]:
    """Draw Gantt charts of plans below each other, on one scale of time.

    Args:
        plans: at least one.
        path: also write a picture to this file, ``.png`` or ``.svg``.

    Returns:
        The axes of each chart; ``axes[0].figure`` is the figure.

    Raises:
        PipeplanError: without a plan, for another suffix, or if no simulation can be made of one.
    """
    for plan in plans or (None,):
        require_kind(plan, Plan, "plans", _LOAD)
    charts = [(None, replay(plan)) for plan in plans]
    if path is not None:
        save_gantts(charts, path)
    return plot_gantts(charts)
