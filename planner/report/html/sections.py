"""The page's header and its sections on measurement, comparison, explanation and changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from planner.analysis.deviation import Comparison
from planner.analysis.explain import Explanation
from planner.analysis.moves import MovesFound
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan, gap
from planner.plan.run_command import run_commands
from planner.report.comparison import HEADINGS, row_cells
from planner.report.deviation import comparison_data, comparison_line
from planner.report.explanation import explanation_data, explanation_lines
from planner.report.html.markup import (
    Child,
    Column,
    code,
    data_blocks,
    data_table,
    data_terms,
    details,
    node,
    section,
    table,
)
from planner.report.html.timeline_data import typical_step
from planner.report.moves import MOST_ROWS, moves_data, moves_lines, signed_change
from planner.report.summary import throughput_lines
from planner.simulation.timeline import Timeline
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.analysis.comparison import ComparisonRow


_WORDS = ("planner", "schedule")


def measured_section(deviation: Comparison, measured: MeasuredTimeline) -> Element:
    """Return the section of predicted against measured times."""
    hardware = ", ".join(dict.fromkeys(device.hardware for device in measured.devices))
    shown = (
        f"Measured on {hardware} over {measured.backend}. The timeline above shows step "
        f"{typical_step(measured)}, which has the median duration; the figures are medians over "
        f"the steps after warm-up."
    )
    return section(
        "measured",
        "Predicted against measured",
        node("p", comparison_line(deviation), class_="lead"),
        node("p", shown),
        *data_blocks(comparison_data(deviation)),
    )


def comparison_section(rows: Sequence[ComparisonRow]) -> Element:
    """Return the section that compares the plan with the baselines."""
    columns = [Column(heading, heading not in _WORDS) for heading in HEADINGS]
    cells: list[list[Child]] = [list(row_cells(row)) for row in rows]
    sources = [
        node("li", node("span", row.planner, class_="name"), f": {row.source}") for row in rows
    ]
    return section(
        "comparison",
        "Comparison with baselines",
        table("All evaluated in one simulator", columns, cells),
        node("ul", *sources, class_="note"),
    )


def explanation_section(explanation: Explanation) -> Element:
    """Return the section on what limits the plan: sentences, then every figure."""
    return section(
        "explanation",
        "What binds",
        node("ul", *(node("li", line) for line in explanation_lines(explanation)), class_="lead"),
        *data_blocks(explanation_data(explanation)),
    )


def run_section(plan: Plan, plan_path: Path) -> Element:
    """Return the section with the commands that run the plan."""
    commands = run_commands(plan, plan_path)
    if commands is None:
        parts = [node("p", "This plan is for an imported graph; there is no model to run.")]
    else:
        parts = [node("p", f"One process per device, {commands.explanation}:")]
        for one in commands.hosts:
            parts += [node("p", f"{one.host}:")] if len(commands.hosts) > 1 else []
            parts.append(node("pre", code(one.command)))
    return section("run", "Run it", node("div", *parts))


def header(
    plan: Plan, timeline: Timeline, problems: Sequence[str], deviation: Comparison | None
) -> Element:
    """Return the title, the main figures, and the problems if there are any.

    Args:
        plan: to show.
        timeline: its simulation.
        problems: what :func:`planner.verification.verify` found.
        deviation: from a measurement, if any.
    """
    title = node(
        "h1",
        node("span", plan.model.name, class_="name"),
        " on ",
        node("span", plan.cluster.name, class_="name"),
    )
    figures = [
        node("div", node("dt", name), node("dd", value), node("dd", note, class_="note"))
        for name, value, note in _figures(plan, timeline, not problems, deviation)
    ]
    return node("header", title, node("dl", *figures, class_="figures"), *_verdict(problems))


def _figures(
    plan: Plan, timeline: Timeline, holds: bool, deviation: Comparison | None
) -> list[tuple[str, str, str]]:
    """Return name, value and note of each figure."""
    pipeline, time_s = timeline.pipeline, timeline.iteration_time_s
    bound_s = plan.predicted.lower_bound_s if holds else 0.0
    above = gap(time_s, bound_s)
    rows = [
        ("Iteration", format_seconds(time_s), "predicted"),
        (
            "Lower bound",
            "none" if above is None else format_seconds(bound_s),
            "not proved" if above is None else "proved for the plans described below",
        ),
        ("Gap", "-" if above is None else f"{above:.2%}", "iteration time above the bound"),
        ("Bubble", f"{timeline.bubble:.1%}", "idle fraction of device time"),
        (
            "Stages",
            f"{len(pipeline.stages):,}",
            f"on {plan.world_size} of {plural(len(plan.cluster.devices), 'device')}",
        ),
        (
            "Microbatches",
            f"{pipeline.microbatches:,}",
            f"of {plural(plan.model.graph.samples_per_microbatch, 'sample')}",
        ),
    ]
    times = plan.predicted.lengths
    if times is not None:
        few = f"{plural(times.iterations, 'iteration')} of microbatches of {plan.job.lengths}"
        rows.append(("Expected time", format_seconds(times.expected_s), f"mean of {few}"))
        rows.append(("95th percentile", format_seconds(times.percentile_95_s), f"of {few}"))
    for line in throughput_lines(plan, time_s):
        rate, _, more = line.partition(", ")
        rows.append(("Throughput", rate, more))
    if deviation is not None:
        rows.append(_measured(deviation))
    return rows


def _measured(deviation: Comparison) -> tuple[str, str, str]:
    error = deviation.error
    off = "" if error is None else f", prediction {error:+.1%}"
    steps = plural(len(deviation.steps), "step")
    return "Measured", format_seconds(deviation.iteration.measured_s or 0.0), f"{steps}{off}"


def _verdict(problems: Sequence[str]) -> list[Child]:
    if not problems:
        return [node("p", "✓ The plan is valid.", class_="verdict")]
    return [
        node(
            "div",
            node("p", "✗ The plan is not valid; its bound is not shown."),
            node("ul", *(node("li", problem) for problem in problems)),
            class_="verdict alert",
            role="note",
        )
    ]


def navigation(sections: Sequence[Element]) -> Element:
    """Return links to all sections, the charts of the template first."""
    charts = [("timeline", "Timeline"), ("memory", "Memory")]
    others = [(found.get("id") or "", found[0].text or "") for found in sections]
    links = [
        node("li", node("a", heading, href=f"#{identifier}"))
        for identifier, heading in [*charts, *others]
    ]
    return node("nav", node("ul", *links), aria_label="Sections")


_MOVE_COLUMNS = (Column("change"), Column("iteration", True), Column("vs now", True))


def moves_section(plan: Plan, found: MovesFound, source: str) -> Element:
    """Return the section on single changes of the plan, those that help most first.

    Args:
        plan: that may be changed.
        found: its changes.
        source: of the plan, for the command.
    """
    rows: list[list[Child]] = [
        [str(row.move), format_seconds(row.iteration_time_s), signed_change(row.gain)]
        for row in found.helpful[:MOST_ROWS]
    ]
    caption = f"Against {format_seconds(found.plan_s)} without any change"
    lines = moves_lines(plan, found, source)
    data = moves_data(found)
    every = data.pop("moves")
    return section(
        "what-if",
        "What changes would give",
        *([table(caption, _MOVE_COLUMNS, rows)] if rows else []),
        node("ul", *(node("li", line) for line in lines), class_="note"),
        details("Every figure", data_terms(data), data_table("changes", every)),
    )
