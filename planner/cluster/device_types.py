"""Device types by the names that torch and drivers report for GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.cluster.cluster_file import ClusterFile
from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICE_ROWS, DEVICES
from planner.errors import PipeplanError, shorten

CPU = "CPU-core"
_MEMORY_SHARE = 0.1
"""A GPU reports slightly less memory than its name states."""
_MAKERS = re.compile(r"\b(NVIDIA|AMD|Tesla|GeForce|Quadro)\b", re.IGNORECASE)
_SLICE = re.compile(r"(.+?) MIG (?:\dc\.)?(\d)g\.(\d+)gb.*", re.IGNORECASE)
_MOST_SLICES = 7
"""A GPU divides into at most 7 slices of compute (NVIDIA Multi-Instance GPU User Guide)."""
_IN_DEVICE_NAMES = re.compile(r"[^A-Za-z0-9_.:-]+")


@dataclass(frozen=True)
class KnownType:
    """A device type.

    Attributes:
        name: name of a preset, or a new one.
        figures: figures of the type.
        note: a remark for people, if there is one.
    """

    name: str
    figures: DeviceType
    note: str | None = None


def cpu_type() -> KnownType:
    """Return the device type of a rank without a GPU."""
    return KnownType(CPU, DEVICES[CPU])


def device_type_named(text: str) -> KnownType:
    """Return a device type by its name on a command line.

    Args:
        text: a preset, or ``FILE:NAME`` of a type in ``device_types`` of a cluster file (.toml or
            .json), which needs no devices.

    Raises:
        PipeplanError: if there is no such preset, file or type, or the file is wrong.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith((".toml", ".json")):
        if text not in DEVICES:
            raise PipeplanError(
                f"device_type: {shorten(text)} is unknown; use one of {', '.join(DEVICES)}, or "
                "FILE.toml:NAME of your own [device_types.NAME]"
            )
        return KnownType(text, DEVICES[text])
    own = ClusterFile.load(path).device_types
    if name not in own:
        there = f"it has {', '.join(own)}" if own else "it has none"
        raise PipeplanError(f"{path}: device_types: no type {shorten(name)}; {there}")
    return KnownType(name, own[name])


def gpu_type(called: str, memory_gib: float) -> KnownType:
    """Return the preset of a GPU, or a new type with the figures of the nearest one, as assumed.

    Args:
        called: the driver's name, such as ``NVIDIA A100-SXM4-80GB``.
        memory_gib: memory as torch reports it.
    """
    if (part := _SLICE.fullmatch(called)) is not None:
        return _slice(called, part, memory_gib)
    for name in presets_called(called):
        if _is_near(DEVICES[name].memory_gib, memory_gib):
            return KnownType(name, DEVICES[name])
    nearest = min(
        (name for name in DEVICES if name != CPU),
        key=lambda name: abs(DEVICES[name].memory_gib - memory_gib),
    )
    own = _IN_DEVICE_NAMES.sub("-", called).strip("-") or "GPU"
    memory_gib = round(memory_gib, 2)
    reserved_gib = min(DEVICES[nearest].reserved_gib, memory_gib / 2)
    update = {"memory_gib": memory_gib, "reserved_gib": reserved_gib, "source": "assumed"}
    note = (
        f"{called!r} is not a preset: memory_gib {memory_gib:g} is torch's, other figures are "
        f"assumed to be those of {nearest}; correct [device_types.{own!r}] in the file"
    )
    return KnownType(own, DEVICES[nearest].model_copy(update=update), note)


def named_type(called: str, place: str) -> KnownType:
    """Return the preset of a GPU whose name alone is known, as in logs of other tools.

    Args:
        called: the driver's name; it may contain the memory, as in ``A100-SXM4-80GB``.
        place: where the name is, for messages.

    Raises:
        PipeplanError: if no preset matches.
    """
    if (part := _SLICE.fullmatch(called)) is not None:
        return _slice(called, part, float(part[3]))
    found = presets_called(called)
    if not found:
        raise PipeplanError(
            f"{place}: {called!r} is no preset; give --device-type NAME: the nearest "
            "preset (`pipeplan detect --presets`), or FILE.toml:NAME of your own"
        )
    return KnownType(found[0], DEVICES[found[0]])


def presets_called(called: str) -> list[str]:
    """Return the presets whose ``names`` match a driver's name without its maker."""
    words = " ".join(_MAKERS.sub(" ", called).split())
    return [
        preset
        for preset, row in DEVICE_ROWS.items()
        if any(re.fullmatch(name, words, re.IGNORECASE) for name in row.get("names", ()))
    ]


def _slice(called: str, part: re.Match[str], memory_gib: float) -> KnownType:
    """Return the type of a MIG slice: its share of the GPU's compute and of its memory."""
    whole = named_type(part[1], called)
    compute = int(part[2]) / _MOST_SLICES
    memory_gib = round(memory_gib, 2)
    figures = whole.figures
    update = {
        "memory_gib": memory_gib,
        "reserved_gib": min(figures.reserved_gib, memory_gib / 2),
        "memory_bandwidth_gb_per_s": figures.memory_bandwidth_gb_per_s
        * min(1.0, memory_gib / figures.memory_gib),
        "peak_tflop_per_s": {k: peak * compute for k, peak in figures.peak_tflop_per_s.items()},
        "source": "assumed",
    }
    name = f"{whole.name}-MIG-{part[2]}g.{part[3]}gb"
    note = (
        f"{called!r} is a slice of {whole.name}: it is assumed to have {part[2]} of "
        f"{_MOST_SLICES} of its throughput and its memory's share of memory bandwidth; correct "
        f"[device_types.{name!r}] in the file"
    )
    return KnownType(name, figures.model_copy(update=update), note)


def _is_near(preset_gib: float, memory_gib: float) -> bool:
    return abs(memory_gib / preset_gib - 1) <= _MEMORY_SHARE
