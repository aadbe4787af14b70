"""The top of the page: what the plan is for, its figures, whether it holds, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from planner.artifacts.plan import Plan
from planner.deviation import Comparison
from planner.report.html.markup import Child, node
from planner.simulator import Timeline
from planner.units import format_seconds, plural
from planner.verifier import gap


def header(
    plan: Plan, timeline: Timeline, problems: Sequence[str], deviation: Comparison | None
) -> Element:
    """The title, the figures side by side, and what is wrong if anything is.

    Args:
        plan: to show.
        timeline: its simulation.
        problems: what :func:`planner.verifier.verify` found.
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
    """Name, value and note of each figure."""
    pipeline, time_s = timeline.pipeline, timeline.iteration_time_s
    bound_s = plan.predicted.lower_bound_s if holds else 0.0
    above = gap(time_s, bound_s)
    rows = [
        ("Iteration", format_seconds(time_s), "predicted"),
        (
            "Lower bound",
            "none" if above is None else format_seconds(bound_s),
            "not proved" if above is None else "proved for the plans named below",
        ),
        ("Gap", "-" if above is None else f"{above:.2%}", "iteration over bound"),
        ("Bubble", f"{timeline.bubble:.1%}", "idle share of devices"),
        (
            "Stages",
            f"{len(pipeline.stages):,}",
            f"on {len(pipeline.devices)} of {plural(len(plan.cluster.devices), 'device')}",
        ),
        (
            "Microbatches",
            f"{pipeline.microbatches:,}",
            f"of {plural(plan.model.graph.samples_per_microbatch, 'sample')}",
        ),
    ]
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
        return [node("p", "✓ The plan holds: what it says was checked.", class_="verdict")]
    return [
        node(
            "div",
            node("p", "✗ This plan does not hold; its bound is not shown."),
            node("ul", *(node("li", problem) for problem in problems)),
            class_="verdict alert",
            role="note",
        )
    ]


def navigation(sections: Sequence[Element]) -> Element:
    """Links to all sections; the charts, which stand in the template, come first."""
    charts = [("timeline", "Timeline"), ("memory", "Memory")]
    others = [(found.get("id") or "", found[0].text or "") for found in sections]
    links = [
        node("li", node("a", heading, href=f"#{identifier}"))
        for identifier, heading in [*charts, *others]
    ]
    return node("nav", node("ul", *links), aria_label="Sections")
