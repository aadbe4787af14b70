"""Public records as HTML for notebooks: the tables of the command line, and the Gantt chart."""

from __future__ import annotations

from collections import Counter
from functools import singledispatch
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

from planner.analysis.comparison import PlannerComparison, best_baseline, plan_of_row
from planner.analysis.deviation import Comparison
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError, printable
from planner.plan.plan import Plan
from planner.report.comparison import comparison_table
from planner.report.deviation import comparison_view
from planner.report.figures import picture_data
from planner.report.gantt import plot_gantt, plot_gantts
from planner.report.summary import plan_view
from planner.report.tables import Table, View
from planner.search.result import Result
from planner.simulation.simulator import simulate_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 120


@singledispatch
def html_of(shown: Any) -> str:
    """Return a plan, a result, a cluster or a comparison as HTML."""
    raise TypeError(f"{type(shown).__name__} has no form for notebooks")


@html_of.register
def _(plan: Plan) -> str:
    try:
        timeline = simulate_plan(plan)
    except PipeplanError as error:  # An edited plan may not run.
        return _pre(printable("\n".join(error.problems)))
    return _text(plan_view(plan, timeline)) + _picture(plot_gantt(timeline))


@html_of.register
def _(result: Result) -> str:
    return _pre(printable(result.summary())) + html_of(result.plan)


@html_of.register
def _(cluster: Cluster) -> str:
    numbers = ("devices", "GiB", "GB/s", "TFLOP/s")
    table = Table(repr(cluster), ("type",), numbers)
    for name, count in Counter(device.type for device in cluster.devices).items():
        kind = cluster.device_types[name]
        peaks = ", ".join(f"{key} {peak:g}" for key, peak in kind.peak_tflop_per_s.items())
        figures = (f"{kind.memory_gib:g}", f"{kind.memory_bandwidth_gb_per_s:g}", peaks)
        table.add_row(name, str(count), *figures)
    return _text([table])


@html_of.register
def _(comparison: Comparison) -> str:
    return _text(comparison_view(comparison))


@html_of.register
def _(comparison: PlannerComparison) -> str:
    table = _text([comparison_table(comparison, comparison.title)])
    ours, best = comparison[0], best_baseline(comparison)
    rows = [row for row in (ours, best) if row is not None and row.orders is not None]
    charts = [
        (f"{row.planner}: {row.schedule}", simulate_plan(plan_of_row(comparison.problem, row)))
        for row in rows
    ]
    return table + (_picture(plot_gantts(charts)[0]) if charts else "")


def _text(view: View) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, file=StringIO(), width=_WIDTH)
    for part in view:
        console.print(Text(part) if isinstance(part, str) else part)
    return _pre(printable(console.export_text()))


def _pre(text: str) -> str:
    return f'<pre style="line-height: 1.2">{escape(text)}</pre>'


def _picture(ax: Axes) -> str:
    """Return the figure of a chart."""
    return f'<img alt="Gantt chart" style="max-width: 100%" src="{picture_data(ax)}">'
