"""Tables for a terminal, all in one style."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICE_SOURCES, DEVICES, LINK_SOURCES, LINKS
from planner.costs.roofline import reach
from planner.model.figures import EfficiencyClass
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import compress_devices, stages_label
from planner.simulation.timeline import Timeline
from planner.units import format_bytes, four_digits, plural

if TYPE_CHECKING:
    from rich.table import Table


def new_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return a table with columns of words, then columns of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for word in words:
        table.add_column(word, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def plain(text: str) -> str:
    """Escape a name, so that brackets in it are no markup."""
    from rich.markup import escape

    return escape(text)


__all__ = ["compress_devices", "problem_title", "stages_label"]


def problem_title(timeline: Timeline) -> str:
    """Return the model, the cluster and the size of the pipeline on one line."""
    pipeline = timeline.pipeline
    parts = (
        plural(len(pipeline.stages), "stage"),
        plural(len(pipeline.devices), "device"),
        plural(pipeline.microbatches, "microbatch", "es"),
    )
    return f"{pipeline.problem.graph.name} on {pipeline.problem.cluster.name}: {', '.join(parts)}"


def layer_table(graph: LayerGraph) -> Table:
    """Return layers with FLOPs, parameters, stash, and bytes sent if cut after them."""
    from rich.table import Table

    record = graph.record
    table = Table(
        title=f"{plain(record.name)}: {plural(len(record.layers), 'layer')}, "
        f"{plural(record.samples_per_microbatch, 'sample')} per microbatch, "
        f"{plain(record.precision)}",
        caption=_caption(graph),
        caption_justify="left",
    )
    table.add_column("layer", no_wrap=True)
    for name in ("forward GFLOP", "backward GFLOP", "parameters", "stash", "cut"):
        table.add_column(name, justify="right")
    before: list[str] = []
    for name, layer in graph.layers.items():
        before.append(name)
        backward = layer.input_gradient_flops + layer.weight_gradient_flops
        table.add_row(
            plain(name),
            four_digits(layer.forward_flops / 1e9),
            four_digits(backward / 1e9),
            format_bytes(graph.nodes[name]["parameter_bytes"]),
            format_bytes(layer.stash_bytes),
            format_bytes(sum(tensor.bytes for tensor in graph.crossing(before))),
        )
    return table


def _caption(graph: LayerGraph) -> str:
    record = graph.record
    trained = sum(p.elements for p in record.parameters if p.trainable)
    others = sum(p.elements for p in record.parameters if not p.trainable)
    frozen = f" and {others:,} without gradients (frozen, or buffers)" if others else ""
    uncounted = plain(", ".join(record.uncounted_operators))
    return (
        f"{trained:,} parameters{frozen}; FLOP formulas cover {record.flop_coverage:.1%} of "
        "operators; cut: bytes sent if the model is cut after this layer"
    ) + (f"; counted as free: {uncounted}" if uncounted else "")


DEVICE_COLUMNS = tuple("device GiB GB/s float32 tf32 float16 bfloat16 reached source".split())
LINK_COLUMNS = ("link", "GB/s", "latency µs", "source")
REACHED: tuple[EfficiencyClass, ...] = ("product", "convolution", "attention")


def device_rows() -> list[tuple[str, ...]]:
    """Return memory, bandwidth, dense peaks in TFLOP/s, fractions reached and source of each."""
    return [
        (
            name,
            f"{kind.memory_gib:g}",
            f"{kind.memory_bandwidth_gb_per_s:g}",
            *(_peak(kind, precision) for precision in DEVICE_COLUMNS[3:7]),
            _reached(kind),
            DEVICE_SOURCES[name].name,
        )
        for name, kind in DEVICES.items()
    ]


def link_rows() -> list[tuple[str, ...]]:
    """Return bandwidth per direction, latency and source of each."""
    return [
        (name, f"{kind.bandwidth_gb_per_s:g}", f"{kind.latency_us:g}", LINK_SOURCES[name].name)
        for name, kind in LINKS.items()
    ]


def _peak(kind: DeviceType, precision: str) -> str:
    peak = kind.peak_tflop_per_s.get(precision)
    return "-" if peak is None else f"{peak:g}"


def _reached(kind: DeviceType) -> str:
    """Return fractions of peak for products, convolutions, attention, and of bandwidth."""
    shares = [reach(kind, name).efficiency for name in REACHED]
    shares.append(reach(kind, "memory").bandwidth_efficiency)
    return " ".join(f"{share:.2f}" for share in shares)


def preset_tables() -> tuple[Table, Table]:
    """Return the tables of devices and links."""
    from rich.table import Table

    devices = Table(
        title="Devices: dense peaks in TFLOP/s",
        caption="reached: fraction of peak throughput for matrix products, convolutions and "
        "attention, and fraction of memory bandwidth for everything else; assumed for GPUs",
        caption_justify="left",
    )
    links = Table(title="Links: each direction")
    for table, columns, rows in (
        (devices, DEVICE_COLUMNS, device_rows()),
        (links, LINK_COLUMNS, link_rows()),
    ):
        for name in columns:
            table.add_column(name, justify="left" if name in (columns[0], "source") else "right")
        for row in rows:
            table.add_row(*map(plain, row))
    return devices, links


def preset_data() -> dict[str, Any]:
    """Return all figures and their sources as plain data."""
    return {
        "devices": {
            name: {**kind.model_dump(mode="json"), "datasheet": vars(DEVICE_SOURCES[name])}
            for name, kind in DEVICES.items()
        },
        "links": {
            name: {**kind.model_dump(mode="json"), "datasheet": vars(LINK_SOURCES[name])}
            for name, kind in LINKS.items()
        },
    }
