"""Changes: what can be changed, and how it is written.

One line each, the same in and out: ``device n1/gpu3 memory x1.2``, ``type A100-40GB speed x1.1``,
``link n0-tor bandwidth x2``, ``links like n0-tor latency x0.5``, ``recompute h.3``, ``keep h.3``,
``microbatches x2``, ``microbatches /2``, ``another n0/gpu0``, ``without split``, ``with chunks``;
those of a plan's stages and devices are in :mod:`planner.variants.plan_changes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from planner.errors import PipeplanError, shorten
from planner.space import Space
from planner.variants.plan_changes import FORMS as STAGE_FORMS
from planner.variants.plan_changes import (
    BoundaryChange,
    DeviceExchange,
    ReplicaChange,
    stage_change,
)

LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3
PLAN_FORMS = (
    *STAGE_FORMS,
    "microbatches xNUMBER or /NUMBER",
    "recompute LAYER",
    "offload LAYER",
    "keep LAYER",
)
"""Every form of a change of a plan on the machines there are."""
FORMS = (
    "device NAME memory|speed xFACTOR",
    "type NAME memory|speed xFACTOR",
    "link NAME-NAME bandwidth|latency xFACTOR",
    "links like NAME-NAME bandwidth|latency xFACTOR",
    "another DEVICE",
    "with|without split|chunks|replicas|recompute|overlap",
    *PLAN_FORMS,
)
"""Every form of a change."""
DeviceFigure = Literal["memory", "speed"]
LinkFigure = Literal["bandwidth", "latency"]
StashFate = Literal["recompute", "offload", "keep"]
_DEVICE_FIGURES: dict[str, DeviceFigure] = {"memory": "memory", "speed": "speed"}
_LINK_FIGURES: dict[str, LinkFigure] = {"bandwidth": "bandwidth", "latency": "latency"}


@dataclass(frozen=True)
class DeviceChange:
    """Another size or speed of one device or of all of a type.

    Attributes:
        target: ``device`` or ``type``.
        name: of it.
        figure: ``memory`` is all of ``memory_gib``; ``speed`` is computation and memory bandwidth
            together, measured times included.
        factor: by which it is multiplied.
    """

    target: Literal["device", "type"]
    name: str
    figure: DeviceFigure
    factor: float

    def __str__(self) -> str:
        return f"{self.target} {self.name} {self.figure} x{self.factor:g}"


@dataclass(frozen=True)
class LinkChange:
    """Another bandwidth or latency of the links between two neighbours, both directions.

    Attributes:
        name: both ends, as ``n0-tor``; ``n0>tor`` is the same link.
        figure: what is multiplied.
        factor: by which.
        alike: whether all links of the same bandwidth, latency and duplex change with it.
    """

    name: str
    figure: LinkFigure
    factor: float
    alike: bool = False

    def __str__(self) -> str:
        kind = "links like" if self.alike else "link"
        return f"{kind} {self.name} {self.figure} x{self.factor:g}"


@dataclass(frozen=True)
class StashChange:
    """What becomes of a layer's stash.

    Attributes:
        layer: name of the layer.
        fate: ``recompute``: it runs again in its backward; ``offload``: its stash goes to the host
            and back; ``keep``: neither.
    """

    layer: str
    fate: StashFate

    def __str__(self) -> str:
        return f"{self.fate} {self.layer}"


@dataclass(frozen=True)
class MicrobatchChange:
    """More microbatches of fewer samples, or fewer of more.

    Attributes:
        factor: a whole number of new microbatches for each old one, or one for so many.
    """

    factor: Fraction

    def __str__(self) -> str:
        times = f"x{self.factor}" if self.factor > 1 else f"/{1 / self.factor}"
        return f"microbatches {times}"


@dataclass(frozen=True)
class AnotherDevice:
    """One device more, of the same type and with the same links as another."""

    device: str

    def __str__(self) -> str:
        return f"another {self.device}"


Freedom = Literal["split", "chunks", "replicas", "recompute", "overlap"]
FREEDOMS: Mapping[Freedom, tuple[str, object, object]] = {
    "split": ("backward", "whole", "any"),
    "chunks": ("max_stages_per_device", 1, 2),
    "replicas": ("replication", False, True),
    "recompute": ("recompute", False, True),
    "overlap": ("overlap_reduction", False, True),
}
"""Fields of the job, with the values that take away a freedom and give it."""


@dataclass(frozen=True)
class SpaceChange:
    """A freedom of plans that the job gives or takes away.

    Attributes:
        freedom: split backwards; two stages a device (``chunks``); several devices a stage;
            recomputation; reductions that overlap with the last backwards.
        allowed: whether it is given.
    """

    freedom: Freedom
    allowed: bool

    def __str__(self) -> str:
        return f"{'with' if self.allowed else 'without'} {self.freedom}"

    def is_possible(self, space: Space) -> bool:
        """Return whether the rest of a job's freedoms goes with it.

        Replicas that divide weights need each other, and whole backwards.
        """
        return not (space.shards_parameters and self.freedom in ("split", "replicas"))

    @property
    def job_fields(self) -> dict[str, object]:
        """The fields of the job that change."""
        name, less, more = FREEDOMS[self.freedom]
        return {name: more if self.allowed else less}


PlanChange = BoundaryChange | DeviceExchange | ReplicaChange | StashChange | MicrobatchChange
"""What changes a plan on the machines there are."""
Change = PlanChange | DeviceChange | LinkChange | AnotherDevice | SpaceChange


def parse_change(text: str) -> Change:
    """Read a change as people write it. Names are not looked up yet.

    Raises:
        PipeplanError: that names what is wrong, and the forms there are.
    """
    return _read(text, FORMS)


def parse_move(text: str) -> PlanChange:
    """Read a change of a plan on the machines there are. Names are not looked up yet.

    Raises:
        PipeplanError: that names what is wrong, and the forms there are.
    """
    change = _read(text, PLAN_FORMS)
    if not isinstance(change, PlanChange):
        raise PipeplanError(
            f"change '{change}': it is of the machines or the job, not of the plan; "
            f"`pipeplan explain PLAN --change '{change}'` shows what it would give"
        )
    return change


def _read(text: str, forms: Sequence[str]) -> Change:
    kind, *words = text.split() or [""]
    readers: dict[str, Callable[[list[str]], Change | None]] = {
        "device": lambda rest: _device_change("device", rest),
        "type": lambda rest: _device_change("type", rest),
        "link": lambda rest: _link_change(rest, alike=False),
        "links": lambda rest: _link_change(rest[1:], alike=True) if rest[:1] == ["like"] else None,
        "recompute": lambda rest: StashChange(" ".join(rest), "recompute") if rest else None,
        "offload": lambda rest: StashChange(" ".join(rest), "offload") if rest else None,
        "keep": lambda rest: StashChange(" ".join(rest), "keep") if rest else None,
        "microbatches": _microbatch_change,
        "another": lambda rest: AnotherDevice(" ".join(rest)) if rest else None,
        "with": lambda rest: _space_change(rest, allowed=True),
        "without": lambda rest: _space_change(rest, allowed=False),
        **dict.fromkeys(("move", "exchange", "add", "remove"), lambda rest: stage_change(text)),
    }
    try:
        found = readers[kind](words) if kind in readers else None
    except PipeplanError as error:
        raise PipeplanError(f"change {shorten(text)}: {p}" for p in error.problems) from None
    if found is None:
        raise PipeplanError(
            f"change {shorten(text)}: is of no known form; write one of: {'; '.join(forms)}"
        )
    return found


def _device_change(target: Literal["device", "type"], words: list[str]) -> Change | None:
    if len(words) < 3:
        return None
    *name, word, factor = words
    figure = _DEVICE_FIGURES.get(word)
    if figure is None:
        raise PipeplanError(f"{shorten(word)} is no figure of a {target}; write memory or speed")
    return DeviceChange(target, " ".join(name), figure, _factor(factor))


def _link_change(words: list[str], *, alike: bool) -> Change | None:
    if len(words) != 3:
        return None
    name, word, factor = words
    figure = _LINK_FIGURES.get(word)
    if figure is None:
        raise PipeplanError(f"{shorten(word)} is no figure of a link; write bandwidth or latency")
    return LinkChange(name, figure, _factor(factor), alike)


def _microbatch_change(words: list[str]) -> Change | None:
    if len(words) != 1:
        return None
    is_fewer = words[0].startswith("/")
    factor = _factor(f"x{words[0][1:]}" if is_fewer else words[0])
    if factor != int(factor) or factor < 2:
        raise PipeplanError(
            f"{shorten(words[0])} is not a whole number of at least 2; write x2 for twice as many "
            "microbatches of half the samples, /2 for half as many of twice the samples"
        )
    number = Fraction(int(factor))
    return MicrobatchChange(1 / number if is_fewer else number)


def _space_change(words: list[str], *, allowed: bool) -> Change | None:
    if len(words) != 1:
        return None
    freedom = next((name for name in FREEDOMS if name == words[0]), None)
    if freedom is None:
        raise PipeplanError(
            f"{shorten(words[0])} is no freedom of plans; write one of {', '.join(FREEDOMS)}"
        )
    return SpaceChange(freedom, allowed)


def _factor(text: str) -> float:
    """Read ``x1.2``, or ``+20%`` and ``-20%``."""
    times = re.fullmatch(r"x(\d+(?:\.\d*)?|\.\d+)", text)
    share = re.fullmatch(r"([+-]\d+(?:\.\d*)?)%", text)
    factor = float(times[1]) if times else 1 + float(share[1]) / 100 if share else math.nan
    if not LEAST_FACTOR <= factor <= MOST_FACTOR:
        raise PipeplanError(
            f"{shorten(text)} is not a factor from x{LEAST_FACTOR:g} to x{MOST_FACTOR:g}; write "
            "x1.2 or +20% for a fifth more"
        )
    return factor
