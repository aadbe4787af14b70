"""``pipeplan simulate --against``: a plan's simulation beside its measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.output import named, print_rich

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.deviation import Comparison


def comparison_of(plan: Plan, path: Path | None) -> Comparison | None:
    """The plan's simulation beside the measurement in a file; None without a file.

    Raises:
        PipeplanError: if the file is no measurement, or one of another plan.
    """
    from planner.artifacts.measured import MeasuredTimeline
    from planner.deviation import compare_with_measured
    from planner.simulator import simulate_plan

    if path is None:
        return None
    measured = MeasuredTimeline.load(path)
    with named(path):
        return compare_with_measured(plan, simulate_plan(plan), measured)


def against_report(comparison: Comparison | None) -> dict[str, Any]:
    """The comparison as plain data, if any."""
    from planner.report.deviation import comparison_data

    return {} if comparison is None else {"against": comparison_data(comparison)}


def show_against(comparison: Comparison | None) -> None:
    """Print the comparison, if any."""
    from planner.report.deviation import comparison_tables

    if comparison is not None:
        print_rich(comparison_tables(comparison))
