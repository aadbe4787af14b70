"""The results and options of importers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from planner.cluster.cluster import Cluster
from planner.cluster.device_types import KnownType, device_type_named
from planner.cluster.hardware import DeviceType, LinkType
from planner.cluster.presets import DEVICES
from planner.errors import PipeplanError, shorten
from planner.job import Job
from planner.model.layer_graph import LayerGraph


@dataclass(frozen=True)
class Imported:
    """A profile of another tool in Pipeplan's own artifacts.

    Attributes:
        graph: the layers.
        job: what the file says of the job; the samples per microbatch are those of the profile.
        notes: what could not be read or had to be assumed, one line each, for the user.
    """

    graph: LayerGraph
    job: Job
    notes: tuple[str, ...]


MOST_SAMPLES = 2**20
DEFAULT_TYPE = KnownType("V100-16GB", DEVICES["V100-16GB"])
"""The device of PipeDream's and DAPPLE's profiles."""


@dataclass(frozen=True)
class ImportOptions:
    """Options for reading a file.

    Attributes:
        device_type: the device that the times were measured on: a preset, or ``FILE.toml:NAME`` of
            one's own; None: not said.
        samples_per_microbatch: samples of the batch that was measured; None leaves it to the file.
        free_inputs: whether ``Input`` nodes of a profile take no time.
        given: what a file does not say, by name; :mod:`planner.interop.importing.formats` has the
            names of each format.

    Raises:
        PipeplanError: if the device type is unknown or the samples are no count.
    """

    device_type: str | None = None
    samples_per_microbatch: int | None = None
    free_inputs: bool = False
    given: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems: list[str] = []
        try:
            _ = self.known_type
        except PipeplanError as error:
            problems += error.problems
        samples = self.samples_per_microbatch
        if samples is not None and not 1 <= samples <= MOST_SAMPLES:
            problems.append(
                f"samples_per_microbatch: expected 1 to {MOST_SAMPLES}, found {shorten(samples)}"
            )
        if problems:
            raise PipeplanError(problems)

    @cached_property
    def known_type(self) -> KnownType | None:
        """The device type that was said, with its figures; None if none was."""
        return None if self.device_type is None else device_type_named(self.device_type)

    @property
    def type_name(self) -> str:
        """The device type; :data:`DEFAULT_TYPE` if none was said."""
        return (self.known_type or DEFAULT_TYPE).name

    @property
    def device(self) -> DeviceType:
        """The figures of :attr:`type_name`."""
        return (self.known_type or DEFAULT_TYPE).figures

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
class ImportedTensor:
    """A tensor that one node passes to others.

    Attributes:
        producer: the node that makes it.
        users: the nodes that read it; at least one, none twice.
        bytes: its size.
        elements: its places in the producer's list of outputs.
    """

    producer: str
    users: tuple[str, ...]
    bytes: int
    elements: tuple[int, ...] = (0,)


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
