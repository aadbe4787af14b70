"""Stages, layers, devices and the provenance of costs as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from xml.etree.ElementTree import Element

from planner.costs.placed_pipeline import PlacedStage
from planner.costs.roofline import layer_times
from planner.plan.operations import compress_devices
from planner.plan.plan import Plan
from planner.report.html.markup import (
    Child,
    Column,
    code,
    data_terms,
    details,
    node,
    section,
    table,
)
from planner.simulation.timeline import Timeline
from planner.units import format_bytes, format_seconds, plural

_STAGES = (
    Column("stage", True),
    Column("devices"),
    Column("layers"),
    Column("forward", True),
    Column("backward", True),
    Column("stash", True),
    Column("weights, gradients, optimizer", True),
    Column("sent on", True),
    Column("recomputed layers", True),
    Column("offloaded layers", True),
)
_LAYERS = (
    Column("layer"),
    Column("forward", True),
    Column("backward", True),
    Column("parameters", True),
    Column("stash", True),
    Column("costs"),
)
_DEVICES = (
    Column("device"),
    Column("type"),
    Column("stages"),
    Column("busy", True),
    Column("idle", True),
    Column("peak memory", True),
    Column("may use", True),
    Column("share", True),
)


def stages_section(timeline: Timeline) -> Element:
    """The table of stages, the layers of each to open, and the table of devices."""
    return section(
        "stages",
        "Stages and devices",
        table("Stages, for one microbatch", _STAGES, _stage_rows(timeline), most=10_000),
        *(
            details(_layers_summary(index, stage), _layer_table(timeline, stage))
            for index, stage in enumerate(timeline.pipeline.stages)
        ),
        table("Devices, for one iteration", _DEVICES, _device_rows(timeline), most=10_000),
    )


def _stage_rows(timeline: Timeline) -> list[list[Child]]:
    return [
        [
            str(index),
            compress_devices(stage.spec.devices),
            _layers(stage),
            _range(times.forward_s for times in stage.times.values()),
            _range(times.backward_s for times in stage.times.values()),
            format_bytes(stage.stash_bytes),
            format_bytes(stage.static_bytes),
            format_bytes(stage.output_bytes),
            f"{len(stage.spec.recompute):,}",
            f"{len(stage.spec.offload):,}",
        ]
        for index, stage in enumerate(timeline.pipeline.stages)
    ]


def _layers(stage: PlacedStage) -> str:
    names = stage.spec.layers
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names):,})"


def _layers_summary(index: int, stage: PlacedStage) -> str:
    return f"Stage {index}: {plural(len(stage.spec.layers), 'layer')}"


def _layer_table(timeline: Timeline, stage: PlacedStage) -> Element:
    """Times are those of the stage's first device."""
    device = stage.spec.devices[0]
    kind = timeline.pipeline.problem.cluster.type_of(device)
    rows = [_layer_row(timeline, stage, name, device) for name in stage.spec.layers]
    return table(f"For one microbatch on {kind}", _LAYERS, rows, most=2000)


def _layer_row(timeline: Timeline, stage: PlacedStage, name: str, device: str) -> list[Child]:
    problem = timeline.pipeline.problem
    kind = problem.cluster.type_of(device)
    graph = problem.graph.on(kind)
    layer = graph.layers[name]
    again = name in stage.spec.recompute
    times = layer_times(
        layer, kind, problem.cluster.device_type(device), problem.job.precision, again
    )
    return [
        code(name),
        format_seconds(times.forward_s),
        format_seconds(times.backward_s),
        format_bytes(graph.nodes[name]["parameter_bytes"]),
        "recomputed" if again else _stash(layer.stash_bytes, name in stage.spec.offload),
        "measured" if kind in layer.measured else "roofline",
    ]


def _stash(bytes_: int, is_offloaded: bool) -> str:
    return f"{format_bytes(bytes_)}, offloaded" if is_offloaded else format_bytes(bytes_)


def _device_rows(timeline: Timeline) -> list[list[Child]]:
    pipeline, time_s = timeline.pipeline, timeline.iteration_time_s
    rows: list[list[Child]] = []
    for device, stages in pipeline.stages_on.items():
        busy_s, peak = timeline.busy_s[device], timeline.peak_memory_bytes[device]
        capacity = pipeline.capacity_bytes(device)
        rows.append(
            [
                code(device),
                pipeline.problem.cluster.type_of(device),
                compress_devices(map(str, stages)),
                format_seconds(busy_s),
                f"{max(0.0, 1 - busy_s / time_s):.1%}" if time_s > 0 else "-",
                format_bytes(peak),
                format_bytes(capacity),
                f"{peak / capacity:.0%}",
            ]
        )
    return rows


def _range(seconds: Iterable[float]) -> str:
    """Return one figure, or the range over devices of several types."""
    values = list(seconds)
    first, last = format_seconds(min(values)), format_seconds(max(values))
    return first if first == last else f"{first} to {last}"


_TYPES = (
    Column("device type"),
    Column("devices in use", True),
    Column("memory GiB", True),
    Column("of it reserved GiB", True),
    Column("memory GB/s", True),
    Column("peak TFLOP/s", True),
    Column("fraction of it reached", True),
    Column("layers measured", True),
)


def costs_section(plan: Plan, timeline: Timeline) -> Element:
    """Return the section on the sources of the costs and the plan's provenance."""
    return section(
        "costs",
        "Where the figures come from",
        *(node("p", line) for line in _cost_lines(plan)),
        table("Device types in use", _TYPES, _type_rows(plan, timeline)),
        node("h3", "Provenance of the plan"),
        data_terms(_provenance(plan)),
    )


def _cost_lines(plan: Plan) -> list[str]:
    graph = plan.on_groups.model.graph
    measured = sum(bool(layer.measured) for layer in graph.layers)
    lines = [
        f"Layers: {measured:,} of {plural(len(graph.layers), 'layer')} have measured times. For "
        f"other device types a roofline uses the figures below, with the stated fraction of peak "
        f"throughput.",
        f"Operators: formulas for FLOPs cover {graph.flop_coverage:.1%} of them.",
    ]
    if graph.uncounted_operators:
        lines.append(f"Counted as free: {_names(graph.uncounted_operators)}.")
    sources = Counter(str(link.source) for link in plan.cluster.links)
    if sources:
        told = ", ".join(f"{count:,} {source}" for source, count in sorted(sources.items()))
        lines.append(f"Sources of link figures: {told}.")
    return lines


def _names(names: tuple[str, ...]) -> str:
    most = 20
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" * (len(names) > most))


def _type_rows(plan: Plan, timeline: Timeline) -> list[list[Child]]:
    plan = plan.on_groups
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
        "bound_covers": str(plan.provenance.bound_covers),
        "optimizer": job.optimizer,
        "precision": job.precision,
        "samples_per_microbatch": plan.model.graph.samples_per_microbatch,
        "microbatches": plan.microbatches,
        "synchronisation": plan.sync.strategy,
        "graph_digest": plan.model.graph_digest,
    }
