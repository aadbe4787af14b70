"""The HTML page: sections in a template, with styles, scripts and data embedded."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from planner.analysis.deviation import compare_with_measured
from planner.analysis.explain import explain
from planner.analysis.moves import moves
from planner.errors import require_kind
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan
from planner.prediction import replay
from planner.records.document import write_atomically
from planner.report.html.colours import style_sheet
from planner.report.html.markup import markup
from planner.report.html.sections import (
    comparison_section,
    explanation_section,
    header,
    measured_section,
    moves_section,
    navigation,
    run_section,
)
from planner.report.html.stages import costs_section, stages_section
from planner.report.html.timeline_data import measured_data, timeline_data
from planner.report.html.topology import topology_section
from planner.verification import verify

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from planner.analysis.comparison import ComparisonRow

SCRIPTS = "format view model density chart gantt path memory find controls table main".split()
"""Files in ``static``, in the order in which they are joined to one module."""


def save_report(
    plan: Plan,
    path: str | Path,
    *,
    measured: MeasuredTimeline | None = None,
    comparison: Sequence[ComparisonRow] | None = None,
    plan_path: str | Path = "plan.json",
) -> None:
    """Write :func:`report_html`'s page, atomically.

    Raises:
        PipeplanError: if no simulation can be made of the plan, if the measurement is of another
            plan, or if the file cannot be written.
    """
    require_kind(plan, Plan, "plan", "planner.load_plan reads a file")
    page = report_html(plan, measured=measured, comparison=comparison, plan_path=plan_path)
    write_atomically(path, page)


def report_html(
    plan: Plan,
    *,
    measured: MeasuredTimeline | None = None,
    comparison: Sequence[ComparisonRow] | None = None,
    plan_path: str | Path = "plan.json",
) -> str:
    """Return a plan as one HTML page, the same for the same arguments.

    All figures come from a fresh simulation. A plan that does not hold is shown too, with what is
    wrong with it and without its bound.

    Args:
        plan: to show.
        measured: a run of the plan, shown beneath its simulation.
        comparison: rows of :func:`planner.analysis.comparison.compare_plan`.
        plan_path: the plan's file, for the command that runs it.

    Raises:
        PipeplanError: if no simulation can be made of the plan, or if the measurement is of
            another plan.
    """
    timeline = replay(plan)
    deviation = None if measured is None else compare_with_measured(plan, timeline, measured)
    explanation = explain(timeline)
    data = timeline_data(timeline, explanation.critical_path)
    if measured is not None:
        names = timeline.pipeline.devices
        data["measured"] = measured_data(measured, names, data["tick_s"])
    sections = [
        None if deviation is None or measured is None else measured_section(deviation, measured),
        explanation_section(explanation),
        moves_section(plan, moves(plan, timeline), shlex.quote(str(_readable(plan_path)))),
        stages_section(timeline),
        topology_section(timeline),
        None if comparison is None else comparison_section(comparison),
        costs_section(plan, timeline),
        run_section(plan, _readable(plan_path)),
    ]
    shown = [found for found in sections if found is not None]
    top = header(plan, timeline, verify(plan), deviation)
    return _filled(plan, top, shown, data)


def _filled(plan: Plan, top: Element, sections: list[Element], data: dict[str, Any]) -> str:
    styles = style_sheet() + _static("page.css")
    rows = data["devices"]
    script = "\n".join(_static(f"{name}.js") for name in SCRIPTS)
    return Template(_static("page.html")).substitute(
        policy=_policy(styles, script),
        title=_escaped(f"{plan.model.name} on {plan.cluster.name}: plan"),
        styles=styles,
        header=markup(top),
        navigation=markup(navigation(sections)),
        measured_hidden="" if "measured" in data else "hidden",
        alike_hidden="hidden" if all(row["row"] == n for n, row in enumerate(rows)) else "",
        sections=markup(*sections),
        data=_script_data(data),
        script=script,
    )


def _policy(styles: str, script: str) -> str:
    """Return the page's content security policy: only embedded code and styles, no network."""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(styles)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _script_data(data: dict[str, Any]) -> str:
    """Return JSON that cannot end the script element or open a comment in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _readable(path: str | Path) -> Path:
    """Return a path whose undecodable bytes are replaced by question marks."""
    return Path(str(path).encode(errors="replace").decode())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@cache
def _static(name: str) -> str:
    return files("planner.report.html").joinpath("static", name).read_text(encoding="utf-8")
