"""What an importer of links hands out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.artifacts.cluster import Cluster
from planner.artifacts.hardware import LinkType


@dataclass(frozen=True)
class ImportedCluster:
    """A file of another tool as a cluster.

    Attributes:
        cluster: devices and links.
        notes: what could not be read or had to be assumed, one line each, for the user.
    """

    cluster: Cluster
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Wire:
    """A link to be: its ends and its figures."""

    between: tuple[str, str]
    kind: LinkType


def cluster_of(
    name: str,
    devices: Mapping[str, str],
    types: Mapping[str, Any],
    switches: Sequence[str],
    wires: Iterable[Wire],
) -> Cluster:
    """A cluster of what was read.

    Args:
        name: of the cluster.
        devices: types by device.
        types: figures of device types, by name.
        switches: by name.
        wires: links.
    """
    data = {
        "format": "pipeplan-cluster/1",
        "name": name,
        "device_types": {kind: figures.model_dump() for kind, figures in types.items()},
        "devices": [{"name": device, "type": kind} for device, kind in devices.items()],
        "switches": list(switches),
        "links": [{"between": list(wire.between), **wire.kind.model_dump()} for wire in wires],
    }
    return Cluster.parse(data, name)
