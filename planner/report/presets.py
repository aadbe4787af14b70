"""The presets of devices and links, with their sources."""

from __future__ import annotations

from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICE_SOURCES, DEVICES, LINK_SOURCES, LINKS
from planner.costs.roofline import reach
from planner.model.figures import EfficiencyClass
from planner.report.tables import Table

_PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
_REACHED: tuple[EfficiencyClass, ...] = ("product", "convolution", "attention")


def preset_tables() -> tuple[Table, Table]:
    """Return the tables of devices and of links."""
    devices = Table(
        "Devices: dense peaks in TFLOP/s",
        ["device", "source"],
        ["GiB", "GB/s", *_PRECISIONS, "reached"],
        note="reached: fraction of peak throughput for matrix products, convolutions and "
        "attention, and fraction of memory bandwidth for everything else; assumed for GPUs",
    )
    for name, kind in DEVICES.items():
        devices.add_row(
            name,
            DEVICE_SOURCES[name].name,
            f"{kind.memory_gib:g}",
            f"{kind.memory_bandwidth_gb_per_s:g}",
            *(f"{peak:g}" if peak else "-" for peak in map(kind.peak_tflop_per_s.get, _PRECISIONS)),
            _reached(kind),
        )
    links = Table("Links: each direction", ["link", "source"], ["GB/s", "latency µs"])
    for name, link in LINKS.items():
        figures = f"{link.bandwidth_gb_per_s:g}", f"{link.latency_us:g}"
        links.add_row(name, LINK_SOURCES[name].name, *figures)
    return devices, links


def _reached(kind: DeviceType) -> str:
    shares = [reach(kind, name).efficiency for name in _REACHED]
    shares.append(reach(kind, "memory").bandwidth_efficiency)
    return " ".join(f"{share:.2f}" for share in shares)
