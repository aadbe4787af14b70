"""The HTML page of a plan, made from a template; it has no scripts and loads nothing."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.analysis.deviation import Comparison, compare_with_measured
from planner.analysis.explain import explain
from planner.analysis.moves import moves
from planner.errors import require_kind
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan, gap
from planner.plan.run_command import run_commands
from planner.prediction import replay
from planner.records.document import write_atomically
from planner.report.deviation import comparison_view
from planner.report.explanation import explanation_view
from planner.report.figures import picture_data
from planner.report.gantt import plot_gantt
from planner.report.memory_plot import plot_memory
from planner.report.moves import moves_view
from planner.report.summary import device_table, stage_table, throughput_lines
from planner.report.tables import Table, View
from planner.simulation.timeline import Timeline
from planner.units import format_seconds, plural
from planner.verification import verify

MOST_OPERATORS = 20
"""Most operators named that count as free; the rest is counted."""


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        id: of its element.
        heading: above it.
        view: its lines and tables.
        picture: address of a picture above the view; empty for none.
        alt: what the picture shows.
        commands: below the view, for a terminal.
    """

    id: str
    heading: str
    view: View = ()
    picture: str = ""
    alt: str = ""
    commands: Sequence[str] = ()


def save_report(
    plan: Plan,
    path: str | Path,
    *,
    measured: MeasuredTimeline | None = None,
    plan_path: str | Path = "plan.json",
) -> None:
    """Write :func:`report_html`'s page, atomically.

    Raises:
        PipeplanError: if no simulation can be made of the plan, if the measurement is of another
            plan, or if the file cannot be written.
    """
    require_kind(plan, Plan, "plan", "planner.load_plan reads a file")
    page = report_html(plan, measured=measured, plan_path=plan_path)
    write_atomically(path, page)


def report_html(
    plan: Plan,
    *,
    measured: MeasuredTimeline | None = None,
    plan_path: str | Path = "plan.json",
) -> str:
    """Return a plan as one HTML page, the same for the same arguments.

    All figures come from a fresh simulation. A plan that does not hold is shown too, with what is
    wrong with it and without its bound.

    Args:
        plan: to show.
        measured: a run of the plan, compared with its simulation.
        plan_path: the plan's file, for the commands on the page.

    Raises:
        PipeplanError: if no simulation can be made of the plan, or if the measurement is of
            another plan.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    timeline, problems = replay(plan), verify(plan)
    deviation = None if measured is None else compare_with_measured(plan, timeline, measured)
    # Undecodable bytes of the name become question marks.
    file = str(plan_path).encode(errors="replace").decode()
    sections = [
        *_pictures(timeline, file),
        *_measured(deviation, measured),
        Section("explanation", "What limits it", explanation_view(plan, explain(timeline))),
        Section("changes", "Single changes", moves_view(plan, moves(plan, timeline), file)),
        Section(
            "stages", "Stages and devices", [stage_table(plan, timeline), device_table(timeline)]
        ),
        _sources(plan, timeline),
        _run(plan, file),
    ]
    environment = Environment(
        loader=PackageLoader("planner.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html").render(
        plan=plan,
        problems=problems,
        figures=list(_figures(plan, timeline, not problems, deviation)),
        sections=sections,
    )


def _figures(
    plan: Plan, timeline: Timeline, holds: bool, deviation: Comparison | None
) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and note of each main figure."""
    pipeline, time_s = timeline.pipeline, timeline.iteration_time_s
    bound_s = plan.predicted.lower_bound_s if holds else 0.0
    above = gap(time_s, bound_s)
    yield "Iteration", format_seconds(time_s), "predicted"
    if deviation is not None:
        error = "" if deviation.error is None else f", prediction {deviation.error:+.1%}"
        measured = format_seconds(deviation.iteration.measured_s or 0.0)
        yield "Measured", measured, plural(len(deviation.steps), "step") + error
    if above is None:
        yield "Lower bound", "none", "not proved"
    else:
        yield "Lower bound", format_seconds(bound_s), "proved, see below"
        yield "Gap", f"{above:.2%}", "iteration time above the bound"
    yield "Bubble", f"{timeline.bubble:.1%}", "idle fraction of device time"
    devices = plural(len(plan.cluster.devices), "device")
    yield "Stages", f"{len(pipeline.stages):,}", f"on {plan.world_size} of {devices}"
    samples = plural(plan.model.graph.samples_per_microbatch, "sample")
    yield "Microbatches", f"{pipeline.microbatches:,}", f"of {samples}"
    times = plan.predicted.lengths
    if times is not None:
        few = f"{plural(times.iterations, 'iteration')} of microbatches of {plan.job.lengths}"
        yield "Expected time", format_seconds(times.expected_s), f"mean of {few}"
        yield "95th percentile", format_seconds(times.percentile_95_s), f"of {few}"
    for line in throughput_lines(plan, time_s):
        rate, _, more = line.partition(", ")
        yield "Throughput", rate, more


def _pictures(timeline: Timeline, file: str) -> Iterator[Section]:
    """Yield the Gantt chart, how to look at it closely, and the memory over time."""
    yield Section(
        "timeline",
        "Timeline",
        ["To zoom into every operation, message and link, open a trace at ui.perfetto.dev:"],
        picture_data(plot_gantt(timeline)),
        "operations of each device over one iteration; the tables of stages and devices have the "
        "figures",
        [f"pipeplan simulate {shlex.quote(file)} --trace trace.json"],
    )
    alt = "memory of each device over one iteration; the table of devices has the peaks"
    yield Section("memory", "Memory", picture=picture_data(plot_memory(timeline)), alt=alt)


def _measured(deviation: Comparison | None, measured: MeasuredTimeline | None) -> Iterator[Section]:
    if deviation is not None and measured is not None:
        hardware = ", ".join(dict.fromkeys(device.hardware for device in measured.devices))
        line = f"Measured on {hardware} over {measured.backend}."
        view: View = [line, *comparison_view(deviation)]
        yield Section("measured", "Predicted against measured", view)


def _sources(plan: Plan, timeline: Timeline) -> Section:
    """Return the section on the sources of the costs and the plan's provenance."""
    graph = plan.on_groups.model.graph
    lines = [
        "Layers without measured times have those of a roofline of the device types below.",
        f"FLOP formulas cover {graph.flop_coverage:.1%} of operators.",
    ]
    if graph.uncounted_operators:
        names = graph.uncounted_operators
        more = f" and {len(names) - MOST_OPERATORS:,} more" if len(names) > MOST_OPERATORS else ""
        lines.append(f"Counted as free: {', '.join(names[:MOST_OPERATORS])}{more}.")
    links = Counter(str(link.source) for link in plan.cluster.links)
    if links:
        counts = ", ".join(f"{count:,} {source}" for source, count in sorted(links.items()))
        lines.append(f"Sources of link figures: {counts}.")
    view: View = [*lines, _type_table(plan, timeline), _provenance_table(plan)]
    return Section("costs", "Where the figures come from", view)


def _type_table(plan: Plan, timeline: Timeline) -> Table:
    cluster, precision = plan.on_groups.cluster, plan.job.precision
    layers = plan.on_groups.model.graph.layers

    def cells(name: str, count: int) -> Iterator[str]:
        kind = cluster.device_types[name]
        peak = kind.peak_tflop_per_s.get(precision)
        yield from (name, f"{count:,}")
        for figure in (kind.memory_gib, kind.reserved_gib, kind.memory_bandwidth_gb_per_s):
            yield f"{figure:g}"
        yield from ("-" if peak is None else f"{peak:g}", f"{kind.efficiency:.0%}")
        yield f"{sum(name in layer.measured for layer in layers):,} of {len(layers):,}"

    return Table.of(
        "Device types in use",
        ["device type"],
        [
            *("devices in use", "memory GiB", "of it reserved GiB", "memory GB/s"),
            *(f"peak TFLOP/s in {precision}", "fraction of it reached", "layers measured"),
        ],
        (cells(*row) for row in Counter(map(cluster.type_of, timeline.pipeline.devices)).items()),
    )


def _provenance_table(plan: Plan) -> Table:
    values = {
        **plan.provenance.model_dump(mode="json"),
        "bound_covers": plan.provenance.bound_covers,
        "optimizer": plan.job.optimizer,
        "precision": plan.job.precision,
        "synchronisation": plan.sync.strategy,
        "graph_digest": plan.model.graph_digest,
    }
    rows = ((k.replace("_", " "), "-" if v is None else str(v)) for k, v in values.items())
    return Table.of("Provenance of the plan", ["field", "value"], (), rows)


def _run(plan: Plan, file: str) -> Section:
    commands = run_commands(plan, Path(file))
    if commands is None:
        return Section("run", "Run it", ["The plan is of an imported graph: no model to run."])
    hosts = [f"{one.host}: " if len(commands.hosts) > 1 else "" for one in commands.hosts]
    lines = [name + one.command for name, one in zip(hosts, commands.hosts, strict=True)]
    line = f"One process per device, {commands.explanation}:"
    return Section("run", "Run it", [line], commands=lines)
