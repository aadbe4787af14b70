"""Presets of common devices and links: the figures of ``presets.toml`` beside this file."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cluster.hardware import DeviceType, LinkType

OVERHEAD_US = 5.0
"""Overhead per operation: torch launches them one by one (a guess; kernels alone take 2 to 4)."""
RAMP_UP_US = 2.0
"""Derived from public timings of 512 x 512 products on an RTX 4090: 6 µs instead of 2."""
_GPU = {
    "efficiency": 0.5,
    "bandwidth_efficiency": 0.8,
    "operation_overhead_us": OVERHEAD_US,
    "ramp_up_us": RAMP_UP_US,
    "reserved_gib": 1.0,
}
_DATA: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
DEVICE_ROWS: Mapping[str, Mapping[str, Any]] = _DATA["devices"]
LINK_ROWS: Mapping[str, Mapping[str, Any]] = _DATA["links"]
"""The tables of the file."""


@dataclass(frozen=True)
class Datasheet:
    """The source of a preset's figures.

    Attributes:
        name: name of the document and its date or version.
        url: a public page of the vendor; empty if there is none.
        note: the variant, and figures that differ from the document.
    """

    name: str
    url: str = ""
    note: str = ""


def _device(row: Mapping[str, Any]) -> DeviceType:
    figures = {name: value for name, value in row.items() if name in DeviceType.model_fields}
    if "efficiencies" not in row:
        return DeviceType.model_validate(figures)
    reached = _DATA["efficiencies"][row["efficiencies"]]
    by_class: dict[str, dict[str, float]] = {
        name: {"efficiency": reached[name]} for name in ("product", "convolution", "attention")
    }
    by_class["memory"] = {"bandwidth_efficiency": reached["memory"]}
    return DeviceType.model_validate({**_GPU, "by_class": by_class, **figures})


def _link(row: Mapping[str, Any]) -> LinkType:
    figures = {name: value for name, value in row.items() if name in LinkType.model_fields}
    return LinkType.model_validate(figures)


def _source(row: Mapping[str, Any]) -> Datasheet:
    return Datasheet(row["datasheet"], row.get("url", ""), row.get("note", ""))


DEVICES: dict[str, DeviceType] = {name: _device(row) for name, row in DEVICE_ROWS.items()}
LINKS: dict[str, LinkType] = {name: _link(row) for name, row in LINK_ROWS.items()}
DEVICE_SOURCES: Mapping[str, Datasheet] = {n: _source(row) for n, row in DEVICE_ROWS.items()}
LINK_SOURCES: Mapping[str, Datasheet] = {n: _source(row) for n, row in LINK_ROWS.items()}
