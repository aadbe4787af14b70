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
    devices = Table.of(
        "Devices: dense peaks in TFLOP/s",
        ["device", "source"],
        ["GiB", "GB/s", *_PRECISIONS, "reached"],
        (
            (
                *(name, DEVICE_SOURCES[name].name),
                *(f"{kind.memory_gib:g}", f"{kind.memory_bandwidth_gb_per_s:g}"),
                *(f"{x:g}" if x else "-" for x in map(kind.peak_tflop_per_s.get, _PRECISIONS)),
                _reached(kind),
            )
            for name, kind in DEVICES.items()
        ),
    )
    devices.note = (
        "reached: fraction of peak throughput for matrix products, convolutions and attention, "
        "and fraction of memory bandwidth for everything else; assumed for GPUs"
    )
    links = (
        (name, LINK_SOURCES[name].name, f"{link.bandwidth_gb_per_s:g}", f"{link.latency_us:g}")
        for name, link in LINKS.items()
    )
    words, figures = ["link", "source"], ["GB/s", "latency µs"]
    return devices, Table.of("Links: each direction", words, figures, links)


def _reached(kind: DeviceType) -> str:
    shares = [reach(kind, name).efficiency for name in _REACHED]
    shares.append(reach(kind, "memory").bandwidth_efficiency)
    return " ".join(f"{share:.2f}" for share in shares)
