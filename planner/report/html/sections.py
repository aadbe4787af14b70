"""The smaller sections: the measurement, the comparison, the explanation, and how to run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from planner.artifacts.measured import MeasuredTimeline
from planner.artifacts.plan import Plan
from planner.deviation import Comparison
from planner.explain import Explanation
from planner.report.comparison import HEADINGS, row_cells
from planner.report.deviation import comparison_data, comparison_line
from planner.report.explanation import explanation_data, explanation_lines
from planner.report.html.markup import Child, Column, code, node, section, table
from planner.report.html.measured_data import typical_step
from planner.report.html.plain_data import data_blocks
from planner.run_command import run_command

if TYPE_CHECKING:
    from planner.comparison import Row

_WORDS = ("planner", "schedule")


def measured_section(deviation: Comparison, measured: MeasuredTimeline) -> Element:
    """Predicted against measured."""
    hardware = ", ".join(dict.fromkeys(device.hardware for device in measured.devices))
    shown = (
        f"Measured on {hardware} over {measured.backend}. The timeline above shows step "
        f"{typical_step(measured)}, the one of median length; the figures here are medians over "
        "the steps that count."
    )
    return section(
        "measured",
        "Predicted against measured",
        node("p", comparison_line(deviation), class_="lead"),
        node("p", shown),
        *data_blocks(comparison_data(deviation)),
    )


def comparison_section(rows: Sequence[Row]) -> Element:
    """The plan beside the classic planners'."""
    columns = [Column(heading, heading not in _WORDS) for heading in HEADINGS]
    cells: list[list[Child]] = [list(row_cells(row)) for row in rows]
    sources = [
        node("li", node("span", row.planner, class_="name"), f": {row.source}") for row in rows
    ]
    return section(
        "comparison",
        "Beside the classic planners",
        table("All scored in one simulator", columns, cells),
        node("ul", *sources, class_="note"),
    )


def explanation_section(explanation: Explanation) -> Element:
    """What binds, in words and then with every figure."""
    return section(
        "explanation",
        "What binds",
        node("ul", *(node("li", line) for line in explanation_lines(explanation)), class_="lead"),
        *data_blocks(explanation_data(explanation)),
    )


def run_section(plan: Plan, plan_path: Path) -> Element:
    """The command that runs the plan, and those that read it."""
    command = run_command(plan, plan_path)
    if command is None:
        first = node("p", "The plan is of an imported graph: there is no model to run.")
    else:
        count = len(plan.ranks)
        hosts = "on one host" if count > 1 else "on this machine"
        first = node(
            "div", node("p", f"One process a device, {hosts}:"), node("pre", code(command))
        )
    return section("run", "Run it", first)
