"""Device types by the names that torch and drivers report for GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.cluster.cluster_file import ClusterFile
from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICES
from planner.errors import PipeplanError, shorten

CPU = "CPU-core"
_MEMORY_SHARE = 0.1
"""A GPU reports slightly less memory than its name states."""
_OTHERS = {
    "A100-80GB": {"PCIE"},
    "H100-80GB": {"PCIE", "NVL"},
    "RTX-3090": {"TI"},
    "RTX-4090": {"D", "LAPTOP"},
}
"""Words in names of devices with similar names and different figures."""
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
    words = set(re.split(r"[^A-Z0-9]+", called.upper()))
    for name, figures in DEVICES.items():
        if _is_called(name, words) and _is_near(figures.memory_gib, memory_gib):
            return KnownType(name, figures)
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
        PipeplanError: if no preset matches, or several do.
    """
    words = set(re.split(r"[^A-Z0-9]+", called.upper()))
    found = [name for name in DEVICES if _is_called(name, words)]
    sizes = [int(size) for size in re.findall(r"(\d+) ?GB", called.upper())]
    if sizes:
        found = [name for name in found if _is_near(DEVICES[name].memory_gib, sizes[0])]
    if len(found) != 1:
        which = f"may be {' or '.join(found)}" if found else "is no preset"
        raise PipeplanError(f"{place}: {called!r} {which}; give --device-type NAME")
    return KnownType(found[0], DEVICES[found[0]])


def _is_called(preset: str, words: set[str]) -> bool:
    """Return whether a name has the preset's words, apart from memory, and no other model's."""
    wanted = {word for word in preset.upper().split("-") if not word.endswith("GB")}
    return wanted <= words and words.isdisjoint(_OTHERS.get(preset, set()))


def _is_near(preset_gib: float, memory_gib: float) -> bool:
    return abs(memory_gib / preset_gib - 1) <= _MEMORY_SHARE
