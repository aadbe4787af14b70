"""What became of a plan's machines: devices lost, slowed and added, as people write it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.artifacts.cluster import Cluster
from planner.errors import PipeplanError, near, shorten

MOST_FACTOR = 1e3
TWIN = "NAME=LIKE"


@dataclass(frozen=True)
class Slow:
    """A device, or every device of a node, that takes ``factor`` times as long for everything."""

    name: str
    factor: float

    def __post_init__(self) -> None:
        if not 1 < self.factor <= MOST_FACTOR:
            raise PipeplanError(
                f"slow: {shorten(f'{self.name}:{self.factor:g}')}: the factor is how many times as "
                f"long everything takes, above 1 and at most {MOST_FACTOR:g}; for a device that is "
                "as fast again as its type give the new cluster"
            )


@dataclass(frozen=True)
class Twin:
    """A device or node ``name`` of the type and with the links of ``like``, which is there."""

    name: str
    like: str


@dataclass(frozen=True)
class MachineChanges:
    """What became of a plan's machines, in this order.

    Attributes:
        cluster: all machines there are now; those of the plan with the losses and additions if
            None.
        lost: devices, or nodes for all of their devices.
        added: cluster files with devices and links to add, or twins of what is there.
        slow: devices or nodes that became slower.
    """

    cluster: Cluster | None = None
    lost: tuple[str, ...] = ()
    added: tuple[Path | Twin, ...] = ()
    slow: tuple[Slow, ...] = ()

    def __post_init__(self) -> None:
        if self.cluster is not None and (self.lost or self.added):
            raise PipeplanError(
                "cluster: it is all machines there are now, so lost and added have no place beside "
                "it; leave out the one or the others"
            )
        if self.cluster is None and not (self.lost or self.added or self.slow):
            raise PipeplanError(
                "nothing changed: name what was lost, slowed or added, or the new cluster"
            )


def parse_slow(text: str) -> Slow:
    """Read ``DEVICE:FACTOR``, such as ``n0/gpu1:1.5``.

    Raises:
        PipeplanError: saying what is wrong with it.
    """
    name, colon, factor = text.rpartition(":")
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    if not colon or not name or math.isnan(value):
        raise PipeplanError(
            f"slow: {shorten(text)} is not DEVICE:FACTOR; write n0/gpu1:1.5 for a device that "
            "takes 1.5 times as long"
        )
    return Slow(name, value)


def parse_added(text: str | Path) -> Path | Twin:
    """Read the path of a cluster file, or ``NAME=LIKE`` for a twin of what is there.

    Raises:
        PipeplanError: if it is neither, or one side of the equals sign is empty.
    """
    if isinstance(text, Path) or os.path.exists(text):
        return Path(text)
    if "=" not in text:
        if Path(text).suffix.lower() in (".toml", ".json"):
            return Path(text)
        raise PipeplanError(
            f"added: {shorten(text)} is neither a cluster file nor {TWIN}; write {text}=n0 for a "
            "node like n0, or n0/gpu4=n0/gpu3 for a device"
        )
    name, _, like = text.partition("=")
    if not name or not like:
        raise PipeplanError(
            f"added: {shorten(text)} is not {TWIN}; write n1/gpu3=n1/gpu2 for a device n1/gpu3 "
            "like n1/gpu2, or give a cluster file"
        )
    return Twin(name, like)


def is_within(vertex: str, name: str) -> bool:
    """Whether a device or switch is the one of a name, or of the node that bears it."""
    return vertex == name or vertex.startswith(f"{name}/")


def devices_of(cluster: Cluster, name: str) -> tuple[str, ...]:
    """A device by its name, or all devices of a node by the node's.

    Raises:
        PipeplanError: naming what there is that is like it.
    """
    if name in cluster.numbers:
        return (name,)
    found = tuple(device for device in cluster.device_names if device.startswith(f"{name}/"))
    if not found:
        known = [*_nodes(cluster), *cluster.device_names]
        raise PipeplanError(f"the cluster has no device or node {name!r}; {near(name, known)}")
    return found


def named_devices(cluster: Cluster, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each device that some names stand for, with the name: its own or its node's.

    Raises:
        PipeplanError: naming one that there is not, or a device that two names stand for.
    """
    seen: dict[str, str] = {}
    for name in names:
        for device in devices_of(cluster, name):
            if device in seen:
                twice = (
                    f"{device!r} is named twice"
                    if seen[device] == name
                    else f"{seen[device]!r} and {name!r} both stand for {device!r}"
                )
                raise PipeplanError(f"{twice}; name each device once")
            seen[device] = name
            yield device, name


def _nodes(cluster: Cluster) -> Sequence[str]:
    rows = (device.rpartition("/")[0] for device in cluster.device_names)
    return [node for node in dict.fromkeys(rows) if node]
