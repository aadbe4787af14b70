"""Devices for stages of which only numbers of devices by class are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.bounds.layers import IntArray
from planner.cluster.cluster import Cluster


class BoundedStage(NamedTuple):
    """A stage of a partition.

    Attributes:
        begin: its first layer.
        end: the layer behind its last one.
        devices: names; of devices of a class that are attached alike the first ones that are left.
    """

    begin: int
    end: int
    devices: tuple[str, ...]


Stages = tuple[BoundedStage, ...]
"""In pipeline order."""


def named_stages(
    cluster: Cluster, classes: Sequence[Sequence[str]], ends: IntArray, held: IntArray
) -> Stages:
    """Return stages with devices, as few places a stage as a best fit finds.

    The largest stage is placed first; the devices that it takes of a class are of the fullest place
    that has enough left or else of the emptiest ones.

    Args:
        cluster: of the devices.
        classes: names of devices.
        ends: (S) the layer behind each stage.
        held: (S, C) devices of each stage by class.
    """
    places: list[dict[object, list[str]]] = [{} for _ in classes]
    for place, names in zip(places, classes, strict=True):
        for name in names:
            place.setdefault(cluster.attachment(name), []).append(name)
    left = [list(place.values()) for place in places]
    devices: list[tuple[str, ...]] = [()] * len(ends)
    for stage in sorted(range(len(ends)), key=lambda n: -int(held[n].sum())):
        for number, groups in zip(held[stage].tolist(), left, strict=True):
            devices[stage] += tuple(_taken(groups, number))
    begins = [0, *ends[:-1].tolist()]
    return tuple(map(BoundedStage, begins, ends.tolist(), devices))


def _taken(places: list[list[str]], number: int) -> list[str]:
    """Take some devices out of places."""
    taken: list[str] = []
    while len(taken) < number:
        wanted = number - len(taken)
        enough = [names for names in places if len(names) >= wanted]
        place = min(enough, key=len) if enough else max(places, key=len)
        taken += place[:wanted]
        del place[:wanted]
    return taken
