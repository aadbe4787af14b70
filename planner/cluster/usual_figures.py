"""The ranges in which figures of real devices and links lie; beyond them a unit is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from planner.cluster.hardware import DeviceType, LinkType
from planner.errors import PipeplanError

OVERRIDE = "unusual_figures"


class _Usual(NamedTuple):
    """A range, and other units by how many of them make one of the field's."""

    least: float
    most: float
    unit: str
    others: Mapping[str, float]


_SPEED = {"MB/s": 1e3, "bytes/s": 1e9}
_DURATION = {"ns": 1e3, "s": 1e-6, "ms": 1e-3}
_USUAL = {
    "memory_gib": _Usual(1e-3, 4096, "GiB", {"MiB": 2**10, "KiB": 2**20, "bytes": 2**30}),
    "memory_bandwidth_gb_per_s": _Usual(1e-2, 50_000, "GB/s", _SPEED),
    "peak_tflop_per_s": _Usual(1e-4, 20_000, "TFLOP/s", {"GFLOP/s": 1e3, "FLOP/s": 1e12}),
    "bandwidth_gb_per_s": _Usual(1e-4, 10_000, "GB/s", _SPEED),
    "latency_us": _Usual(1e-3, 1e6, "µs", _DURATION),
    "host_link_gb_per_s": _Usual(1e-2, 10_000, "GB/s", _SPEED),
    "loader_gb_per_s": _Usual(1e-6, 10_000, "GB/s", _SPEED),
    "operation_overhead_us": _Usual(1e-5, 1e6, "µs", _DURATION),
    "ramp_up_us": _Usual(0, 1e6, "µs", _DURATION),
}
"""Ranges from single cores and slow modems to several times the largest device of 2026.

A fitted ramp-up may be as short as it likes: next to nothing is nothing.
"""
_OF_DEVICE_TYPES = (
    "memory_gib",
    "memory_bandwidth_gb_per_s",
    "host_link_gb_per_s",
    "loader_gb_per_s",
    "operation_overhead_us",
    "ramp_up_us",
)


def unusual_figures(
    device_types: Mapping[str, DeviceType], links: Mapping[str, LinkType]
) -> Iterator[str]:
    """Yield each figure outside its usual range, with its likely unit.

    Args:
        device_types: by name.
        links: links and types of links, by their place in the file.
    """
    for name, kind in device_types.items():
        place = f'device_types."{name}"'
        for field in _OF_DEVICE_TYPES:
            yield from _unusual(f"{place}.{field}", field, getattr(kind, field))
        for precision, peak in kind.peak_tflop_per_s.items():
            yield from _unusual(f"{place}.peak_tflop_per_s.{precision}", "peak_tflop_per_s", peak)
    for place, link in links.items():
        for field in ("bandwidth_gb_per_s", "latency_us"):
            yield from _unusual(f"{place}.{field}", field, getattr(link, field))


def require_usual(
    device_types: Mapping[str, DeviceType], links: Mapping[str, LinkType], source: str
) -> None:
    """Refuse figures in wrong units.

    Raises:
        PipeplanError: with a line for each.
    """
    problems = [
        f"{source}: {problem}, or set {_override(source)} at the top"
        for problem in unusual_figures(device_types, links)
    ]
    if problems:
        raise PipeplanError(problems)


def _override(source: str) -> str:
    return f'"{OVERRIDE}": true' if source.endswith(".json") else f"{OVERRIDE} = true"


def _unusual(place: str, field: str, value: float | None) -> Iterator[str]:
    usual = _USUAL[field]
    if not value or usual.least <= value <= usual.most:
        return
    found = f"{place}: {value:g} {usual.unit}, expected {usual.least:g} to {usual.most:g}"
    for unit, factor in usual.others.items():
        if usual.least <= value / factor <= usual.most:
            yield f"{found}; {value:g} {unit} would be {value / factor:g}: write that"
            return
    yield f"{found}; correct it"
