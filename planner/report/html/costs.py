"""Where the figures come from: times of layers, figures of devices and links, and the search."""

from __future__ import annotations

from collections import Counter
from xml.etree.ElementTree import Element

from planner.artifacts.plan import Plan
from planner.report.html.markup import Child, Column, code, node, section, table
from planner.report.html.plain_data import data_terms
from planner.simulator import Timeline
from planner.units import plural

_TYPES = (
    Column("device type"),
    Column("devices in use", True),
    Column("memory GiB", True),
    Column("of it reserved GiB", True),
    Column("memory GB/s", True),
    Column("peak TFLOP/s", True),
    Column("share of it reached", True),
    Column("layers measured", True),
)


def costs_section(plan: Plan, timeline: Timeline) -> Element:
    """Costs' provenance and the plan's own."""
    return section(
        "costs",
        "Where the figures come from",
        *(node("p", line) for line in _cost_lines(plan)),
        table("Device types in use", _TYPES, _type_rows(plan, timeline)),
        node("h3", "What made the plan"),
        data_terms(_provenance(plan)),
    )


def _cost_lines(plan: Plan) -> list[str]:
    graph = plan.model.graph
    measured = sum(bool(layer.measured) for layer in graph.layers)
    lines = [
        f"Layers: {measured:,} of {plural(len(graph.layers), 'layer')} have measured times. Where "
        "there is none for a device type, a roofline over the figures below stands in, at the "
        "share of peak throughput named there.",
        f"Operators: formulas for FLOPs cover {graph.flop_coverage:.1%} of them.",
    ]
    if graph.uncounted_operators:
        lines.append(f"Counted as free: {_names(graph.uncounted_operators)}.")
    sources = Counter(str(link.source) for link in plan.cluster.links)
    if sources:
        told = ", ".join(f"{count:,} {source}" for source, count in sorted(sources.items()))
        lines.append(f"Figures of links: {told}.")
    return lines


def _names(names: tuple[str, ...]) -> str:
    most = 20
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" * (len(names) > most))


def _type_rows(plan: Plan, timeline: Timeline) -> list[list[Child]]:
    cluster, precision = plan.cluster, plan.job.precision
    counts = Counter(cluster.type_of(device) for device in timeline.pipeline.devices)
    layers = plan.model.graph.layers
    rows: list[list[Child]] = []
    for name, count in counts.items():
        kind = cluster.device_types[name]
        peak = kind.peak_tflop_per_s.get(precision)
        measured = sum(name in layer.measured for layer in layers)
        rows.append(
            [
                code(name),
                f"{count:,}",
                f"{kind.memory_gib:g}",
                f"{kind.reserved_gib:g}",
                f"{kind.memory_bandwidth_gb_per_s:g}",
                "-" if peak is None else f"{peak:g} ({precision})",
                f"{kind.efficiency:.0%}",
                f"{measured:,} of {len(layers):,}",
            ]
        )
    return rows


def _provenance(plan: Plan) -> dict[str, object]:
    job = plan.job
    made = plan.provenance.model_dump(mode="json")
    return {
        **made,
        "optimizer": job.optimizer,
        "precision": job.precision,
        "samples_per_microbatch": plan.model.graph.samples_per_microbatch,
        "microbatches": plan.microbatches,
        "synchronisation": plan.sync.strategy,
        "graph_digest": plan.model.graph_digest,
    }
