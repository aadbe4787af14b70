"""The results and options of importers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from planner.cluster.cluster import Cluster
from planner.cluster.device_types import KnownType, device_type_named
from planner.cluster.hardware import LinkType
from planner.errors import PipeplanError, shorten


@dataclass(frozen=True)
class ImportOptions:
    """Options for reading a file.

    Attributes:
        device_type: the devices that the file does not name: a preset, or ``FILE.toml:NAME`` of
            one's own; None: not given.
        given: what a file does not say, by name; :mod:`planner.interop.importing.formats` has the
            names of each format.
    """

    device_type: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def known_type(self) -> KnownType | None:
        """The device type that was given, with its figures; None if none was."""
        return None if self.device_type is None else device_type_named(self.device_type)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return a value that was given, which has to be one of a few.

        Raises:
            PipeplanError: if it is none of them.
        """
        value = self.given[name]
        if value not in choices:
            raise PipeplanError(
                f"--given {name}={shorten(value)}: expected one of {', '.join(choices)}"
            )
        return value


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
