"""The presets of devices and links as rows, tables and plain data."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from planner.artifacts.hardware import DeviceType
from planner.artifacts.preset_sources import DEVICE_SOURCES, LINK_SOURCES
from planner.artifacts.presets import DEVICES, LINKS
from planner.artifacts.work import EfficiencyClass
from planner.costs.roofline import reach

DEVICE_COLUMNS = (
    "device",
    "GiB",
    "GB/s",
    "float32",
    "tf32",
    "float16",
    "bfloat16",
    "reached",
    "source",
)
LINK_COLUMNS = ("link", "GB/s", "latency µs", "source")
REACHED: tuple[EfficiencyClass, ...] = ("product", "convolution", "attention")


def device_rows() -> list[tuple[str, ...]]:
    """Memory, bandwidth, dense peaks in TFLOP/s, shares reached and the datasheet of each."""
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
    """Bandwidth a direction, latency and source of each."""
    return [
        (name, f"{kind.bandwidth_gb_per_s:g}", f"{kind.latency_us:g}", LINK_SOURCES[name].name)
        for name, kind in LINKS.items()
    ]


def _peak(kind: DeviceType, precision: str) -> str:
    peak = kind.peak_tflop_per_s.get(precision)
    return "-" if peak is None else f"{peak:g}"


def _reached(kind: DeviceType) -> str:
    """Shares of peak of products, convolutions and attention, and of bandwidth of the rest."""
    shares = [reach(kind, name).efficiency for name in REACHED]
    shares.append(reach(kind, "memory").bandwidth_efficiency)
    return " ".join(f"{share:.2f}" for share in shares)


def preset_tables() -> tuple[Table, Table]:
    """Devices and links, for people."""
    devices = Table(
        title="Devices: dense peaks in TFLOP/s",
        caption="reached: share of peak of products, convolutions and attention, and share of "
        "memory bandwidth of everything else; assumed for GPUs",
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
            table.add_row(*map(escape, row))
    return devices, links


def preset_data() -> dict[str, Any]:
    """All figures and their sources, for programs."""
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
