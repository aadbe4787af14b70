"""Changes of a plan's stages and devices: what can be moved, and how it is written.

One line each, the same in and out: ``move layer h.12 from stage 3 to stage 2``, ``move layers h.11
to h.12 from stage 3 to stage 2``, ``exchange devices n0/gpu0 and n1/gpu3``, ``add replica n1/gpu3
to stage 2``, ``remove replica n1/gpu3 from stage 2``, ``move replica n1/gpu3 from stage 2 to stage
0``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMS = (
    "move layer LAYER from stage I to stage J",
    "move layers FIRST to LAST from stage I to stage J",
    "exchange devices DEVICE and DEVICE",
    "add replica DEVICE to stage I",
    "remove replica DEVICE from stage I",
    "move replica DEVICE from stage I to stage J",
)
"""Every form of a change of stages and devices."""
_PATTERNS = (
    r"move layer (?P<first>.+?) from stage (?P<source>\d{1,6}) to stage (?P<target>\d{1,6})",
    r"move layers (?P<first>.+?) to (?P<last>.+?) from stage (?P<source>\d{1,6}) to stage "
    r"(?P<target>\d{1,6})",
    r"exchange devices (?P<one>.+?) and (?P<other>.+)",
    r"add replica (?P<device>.+?) to stage (?P<target>\d{1,6})",
    r"remove replica (?P<device>.+?) from stage (?P<source>\d{1,6})",
    r"move replica (?P<device>.+?) from stage (?P<source>\d{1,6}) to stage (?P<target>\d{1,6})",
)


@dataclass(frozen=True)
class BoundaryChange:
    """Layers at one end of a stage that go to the stage next to it.

    Attributes:
        first, last: the layers at either end of what moves, in executable order.
        source, target: numbers of the stages.
    """

    first: str
    last: str
    source: int
    target: int

    def __str__(self) -> str:
        several = f"layers {self.first} to {self.last}"
        what = f"layer {self.first}" if self.first == self.last else several
        return f"move {what} from stage {self.source} to stage {self.target}"


@dataclass(frozen=True)
class DeviceExchange:
    """Two devices that change places in all stages; one of them may be unused."""

    one: str
    other: str

    def __str__(self) -> str:
        return f"exchange devices {self.one} and {self.other}"


@dataclass(frozen=True)
class ReplicaChange:
    """A device that joins a stage, leaves one, or both.

    Attributes:
        device: its name.
        source: the stage that it leaves; None if it is added.
        target: the stage that it joins; None if it is removed.
    """

    device: str
    source: int | None
    target: int | None

    def __str__(self) -> str:
        verb = "add" if self.source is None else "remove" if self.target is None else "move"
        left = "" if self.source is None else f" from stage {self.source}"
        joined = "" if self.target is None else f" to stage {self.target}"
        return f"{verb} replica {self.device}{left}{joined}"


def stage_change(text: str) -> BoundaryChange | DeviceExchange | ReplicaChange | None:
    """Read a change of stages or devices; None if it has none of the :data:`FORMS`."""
    words = " ".join(text.split())
    found = next(filter(None, (re.fullmatch(pattern, words) for pattern in _PATTERNS)), None)
    if found is None:
        return None
    names = found.groupdict()
    if "one" in names:
        return DeviceExchange(names["one"], names["other"])
    source, target = (int(names[end]) if end in names else None for end in ("source", "target"))
    if "device" in names:
        return ReplicaChange(names["device"], source, target)
    assert source is not None, "both patterns have it"
    assert target is not None, "both patterns have it"
    return BoundaryChange(names["first"], names.get("last", names["first"]), source, target)
