"""One cluster of several: renamed so that names do not collide, and joined by their cards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from planner.cluster.cluster import Cluster
from planner.cluster.hardware import LinkType
from planner.cluster.presets import LINKS
from planner.errors import PipeplanError, shorten

NETWORK = "network"
NETWORK_LATENCY_US = LINKS["Ethernet-100G"].latency_us
"""Assumed latency of a link to the network that is given by its bandwidth alone."""
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(gbit|GB/s)")


@dataclass(frozen=True)
class MergedBox:
    """A cluster to be joined with others.

    Attributes:
        cluster: with names that no other box has.
        cards: names of what leads to the other boxes: network cards, or switches or devices.
        title: what it is called in messages, such as its file.
    """

    cluster: Cluster
    cards: tuple[str, ...]
    title: str


def network_link(text: str, latency_us: float | None = None) -> LinkType:
    """Return the link from each card to the network.

    Args:
        text: a preset of a link, or a bandwidth each way, such as ``100gbit`` or ``12.5GB/s``.
        latency_us: in place of the preset's latency, or of the assumed one.

    Raises:
        PipeplanError: if it is neither, or not above 0.
    """
    match = _RATE.fullmatch(text)
    if text in LINKS:
        data = LINKS[text].model_dump()
    elif match is not None:
        rate = float(match[1]) / (8 if match[2] == "gbit" else 1)
        data = {"bandwidth_gb_per_s": rate, "latency_us": NETWORK_LATENCY_US}
    else:
        raise PipeplanError(
            f"--network {shorten(text)}: expected a preset of a link ({', '.join(LINKS)}) or a "
            "bandwidth such as 100gbit or 12.5GB/s"
        )
    if latency_us is not None:
        data["latency_us"] = latency_us
    return LinkType.parse(data, "--network")


def renamed(cluster: Cluster, prefix: str) -> Cluster:
    """Return a cluster whose devices and switches are called ``PREFIX/NAME``."""
    data = cluster.model_dump()
    for device in data["devices"]:
        device["name"] = f"{prefix}/{device['name']}"
    data["switches"] = [f"{prefix}/{name}" for name in cluster.switches]
    for link in data["links"]:
        link["between"] = [f"{prefix}/{end}" for end in link["between"]]
    for host in data.get("hosts", ()):
        host["devices"] = [f"{prefix}/{name}" for name in host["devices"]]
    return Cluster.parse(data, f"prefix {prefix}")


def cards_of(cluster: Cluster, patterns: Sequence[str], title: str) -> tuple[str, ...]:
    """Return what leads out of a cluster: switches with one link, or the names that are given.

    Args:
        cluster: one box.
        patterns: names of cards, switches or devices, with or without the prefix; ``*`` and ``?``
            stand for any characters. None: all switches that have one link, as network cards do.
        title: of the cluster, for messages.

    Raises:
        PipeplanError: if there is none.
    """
    names = (*cluster.switches, *cluster.device_names)
    if patterns:
        found = tuple(name for name in names if any(_is_called(name, p) for p in patterns))
        if not found:
            raise PipeplanError(
                f"{title}: no card, switch or device is called {' or '.join(patterns)}; there are "
                f"{', '.join(names)}"
            )
        return found
    links = Counter(end for link in cluster.links for end in link.between)
    found = tuple(name for name in cluster.switches if links[name] == 1)
    if not found:
        raise PipeplanError(
            f"{title}: has no network cards (switches with one link); name what leads to the "
            f"network with --card, such as one of {', '.join(names)}"
        )
    return found


def _is_called(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition("/")[2], pattern)


def merged(boxes: Sequence[MergedBox], network: LinkType, name: str) -> Cluster:
    """Return the cluster of all boxes, each of whose cards has a link to one switch.

    Args:
        boxes: two or more.
        network: the link of each card.
        name: of the cluster.

    Raises:
        PipeplanError: if names collide, or a device type or the currency has two meanings.
    """
    _require_apart(boxes)
    data: dict[str, Any] = {"name": name, "switches": [], "links": [], "devices": [], "hosts": []}
    data["device_types"], data["currency"] = _types(boxes), _currency(boxes)
    for box in boxes:
        own = box.cluster.model_dump()
        for field in ("devices", "switches", "links", "hosts"):
            data[field] += own.get(field, ())
    data["switches"].append(NETWORK)
    data["links"] += [
        {"between": [card, NETWORK], **network.model_dump()} for box in boxes for card in box.cards
    ]
    return Cluster.parse(data, name)


def _require_apart(boxes: Sequence[MergedBox]) -> None:
    owners: dict[str, str] = {NETWORK: "the switch that joins them"}
    for box in boxes:
        for name in (*box.cluster.device_names, *box.cluster.switches):
            if name in owners:
                raise PipeplanError(
                    f"{box.title}: the name {name!r} is also in {owners[name]}; give --prefix once "
                    "for each file, in their order"
                )
            owners[name] = box.title


def _types(boxes: Sequence[MergedBox]) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for box in boxes:
        for name, kind in box.cluster.device_types.items():
            if types.setdefault(name, kind) != kind:
                raise PipeplanError(
                    f"{box.title}: device type {name!r} has other figures than in the files "
                    "before it; rename it in one of them"
                )
    return {name: kind.model_dump() for name, kind in types.items()}


def _currency(boxes: Sequence[MergedBox]) -> str | None:
    found = {box.cluster.currency for box in boxes if box.cluster.currency is not None}
    if len(found) > 1:
        raise PipeplanError(
            f"currency: the files have {' and '.join(sorted(found))}; convert prices to one of them"
        )
    return next(iter(found), None)


def card_of_device(cluster: Cluster, boxes: Sequence[MergedBox]) -> Mapping[str, str]:
    """Return the card by which each device of a merged cluster reaches the other boxes."""
    found = {}
    for box, other in zip(boxes, (*boxes[1:], boxes[0]), strict=True):
        for device in box.cluster.device_names:
            route = cluster.route(device, other.cluster.device_names[0])
            ends = [end for n in route.crossed for end in cluster.links[n].between] if route else ()
            own = [end for end in ends if end in box.cards]
            if own:
                found[device] = own[0]
    return found


def detours(
    cluster: Cluster, boxes: Sequence[MergedBox]
) -> Iterator[tuple[str, str, float, float]]:
    """Yield pairs of a box that the network joins by more bandwidth than the box itself.

    Yields:
        Two devices, and the GB/s inside the box (0 if nothing joins them there) and in the merged
        cluster; of each kind of pair one.
    """
    for box in boxes:
        seen = set()
        for a, b in combinations(box.cluster.device_names, 2):
            alone, now = box.cluster.route(a, b), cluster.route(a, b)
            inside = 0.0 if alone is None else alone.bandwidth_gb_per_s
            outside = 0.0 if now is None else now.bandwidth_gb_per_s
            if outside > inside and (inside, outside) not in seen:
                seen.add((inside, outside))
                yield a, b, inside, outside
