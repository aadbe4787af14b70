"""Device types by what torch calls a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.artifacts.hardware import DeviceType
from planner.artifacts.presets import DEVICES
from planner.errors import PipeplanError

CPU = "CPU-core"
_MEMORY_SHARE = 0.1
"""A GPU reports a little less memory than its name says."""
_OTHERS = {
    "A100-80GB": {"PCIE"},
    "H100-80GB": {"PCIE", "NVL"},
    "RTX-4090": {"D", "LAPTOP"},
}
"""Words in the names of devices that are called alike and have other figures."""
_IN_DEVICE_NAMES = re.compile(r"[^A-Za-z0-9_.:-]+")


@dataclass(frozen=True)
class KnownType:
    """A device type.

    Attributes:
        name: a preset's, or one of its own.
        figures: of the type.
        note: what people should know of it, if anything.
    """

    name: str
    figures: DeviceType
    note: str | None = None


def cpu_type() -> KnownType:
    """What a rank without a GPU counts as."""
    return KnownType(CPU, DEVICES[CPU])


def gpu_type(called: str, memory_gib: float) -> KnownType:
    """The preset of a GPU, or a type of its own with the figures of the nearest one, assumed.

    Args:
        called: by the driver, such as ``NVIDIA A100-SXM4-80GB``.
        memory_gib: as torch tells it.
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
        f"{called!r} is no preset: memory_gib {memory_gib:g} is torch's, its other figures are "
        f"those of {nearest} and only assumed; correct [device_types.{own!r}] by hand"
    )
    return KnownType(own, DEVICES[nearest].model_copy(update=update), note)


def named_type(called: str, place: str) -> KnownType:
    """The preset of a GPU of which there is a name alone, as in the logs of other tools.

    Args:
        called: by the driver; it may say the memory, as in ``A100-SXM4-80GB``.
        place: of the name, for messages.

    Raises:
        PipeplanError: if it is none, or may be several.
    """
    words = set(re.split(r"[^A-Z0-9]+", called.upper()))
    found = [name for name in DEVICES if _is_called(name, words)]
    sizes = [int(size) for size in re.findall(r"(\d+) ?GB", called.upper())]
    if sizes:
        found = [name for name in found if _is_near(DEVICES[name].memory_gib, sizes[0])]
    if len(found) != 1:
        which = f"may be {' or '.join(found)}" if found else "is no preset"
        raise PipeplanError(f"{place}: {called!r} {which}; give --device-type PRESET")
    return KnownType(found[0], DEVICES[found[0]])


def _is_called(preset: str, words: set[str]) -> bool:
    """The preset's words are in the name, its size of memory aside, and no other model's are."""
    wanted = {word for word in preset.upper().split("-") if not word.endswith("GB")}
    return wanted <= words and words.isdisjoint(_OTHERS.get(preset, set()))


def _is_near(preset_gib: float, memory_gib: float) -> bool:
    return abs(memory_gib / preset_gib - 1) <= _MEMORY_SHARE
