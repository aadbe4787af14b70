"""Options and results of importers, the types of devices, and what is assumed of their ports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from planner.cluster.cluster import Cluster
from planner.cluster.device_types import KnownType, device_type_named, named_type
from planner.cluster.hardware import LinkType
from planner.cluster.ports import OTHER_PORTS, PORTS, Ports
from planner.errors import PipeplanError, shorten

Pair = tuple[str, str]
HOST_SHARE = 0.5
"""The share of PCIe's bandwidth between GPUs without peer-to-peer, whose messages are written to
host memory and read from there. Measured with PCIe 4: 13 GB/s each way between RTX 4090
(tinygrad/open-gpu-kernel-modules #6), 15 to 22 between other GPUs (NVIDIA/nccl #814)."""
GIVEN_PORTS = ("pcie", "peer_to_peer")
"""What tables of connections do not say of the ports of GPUs, and the user may."""
_ASSUMED_FIGURES = (
    "the file has kinds of connections, no figures: bandwidths and latencies are presets and "
    "assumed; `torchrun -m executor.detect` measures them"
)


@dataclass(frozen=True)
class ImportOptions:
    """What a file does not say.

    Attributes:
        device_type: of all GPUs: a preset, or ``FILE.toml:NAME`` of one's own; None: not given.
        given: further values by name, of which each format takes some.
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

    between: Pair
    kind: LinkType


def cluster_of(name: str, types: Mapping[str, KnownType], wires: Sequence[Wire]) -> Cluster:
    """Return a cluster of devices by name; the ends of links that are no devices are switches."""
    ends = dict.fromkeys(end for wire in wires for end in wire.between)
    figures = {kind.name: kind.figures.model_dump() for kind in types.values()}
    data = {
        "format": "pipeplan-cluster/1",
        "name": name,
        "device_types": figures,
        "devices": [{"name": device, "type": kind.name} for device, kind in types.items()],
        "switches": [end for end in ends if end not in types],
        "links": [{"between": list(wire.between), **wire.kind.model_dump()} for wire in wires],
    }
    return Cluster.parse(data, name)


def imported_machine(
    name: str, types: Mapping[str, KnownType], wires: Sequence[Wire], notes: Iterable[str]
) -> ImportedCluster:
    """Return the cluster of a machine whose figures are assumed."""
    return ImportedCluster(cluster_of(name, types, wires), (*notes, _ASSUMED_FIGURES))


def gpu_types(
    path: Path, gpus: Iterable[str], called: Mapping[str, str], options: ImportOptions, names: str
) -> dict[str, KnownType]:
    """Return the type of each GPU: the one that was given, or what the driver calls it.

    Args:
        path: of the file, for messages.
        gpus: by the names that they have in the cluster.
        called: what the driver calls them, where the file says so.
        options: with the type of all GPUs, if it was given.
        names: what the user may add to the file to name them.

    Raises:
        PipeplanError: if a type is not known.
    """
    if options.known_type is not None:
        return dict.fromkeys(gpus, options.known_type)
    types = {}
    for gpu in gpus:
        if gpu not in called:
            raise PipeplanError(
                f"{path}: does not say what {gpu.upper()} is; give --device-type NAME, or put "
                f"{names} into the file"
            )
        types[gpu] = named_type(called[gpu], f"{path}: {gpu.upper()}")
    return types


def ports_of(type_name: str, options: ImportOptions) -> Ports:
    """Return the ports of a device type, with what was given in place of what is known.

    Raises:
        PipeplanError: if a given value is none of those there are.
    """
    ports = PORTS.get(type_name, OTHER_PORTS)
    if "pcie" in options.given:
        ports = replace(ports, pcie=f"PCIe{options.choice('pcie', ('3', '4', '5'))}-x16")
    if "peer_to_peer" in options.given:
        has_it = options.choice("peer_to_peer", ("yes", "no")) == "yes"
        ports = replace(ports, peer_to_peer=has_it)
    return ports


def notes_on_ports(
    types: Iterable[KnownType], options: ImportOptions, fabric: str | None
) -> Iterator[str]:
    """Yield what is assumed of the ports of device types.

    Args:
        types: of the GPUs.
        options: with what was given.
        fabric: that is assumed where a type's is not known; None if no GPU has links of one.
    """
    for name, note in dict.fromkeys((kind.name, kind.note) for kind in types):
        if note is not None:
            yield note
        ports = ports_of(name, options)
        if fabric is not None and ports.fabric is None:
            yield f"{name}: a direct link to another GPU is assumed to be one of {fabric}"
        if name not in PORTS and "pcie" not in options.given:
            yield (
                f"{name}: its link to the host is assumed to be {ports.pcie}; "
                "--given pcie=3, 4 or 5 says otherwise"
            )
        if not ports.peer_to_peer:
            yield (
                f"{name}: no peer-to-peer over PCIe, so messages go through host memory, at "
                f"{HOST_SHARE:.0%} of PCIe's bandwidth; --given peer_to_peer=yes if your driver "
                "has it"
            )


def alone_note(gpus: Iterable[str], joined: Iterable[str]) -> Iterator[str]:
    """Yield a note on GPUs without NVLinks beside others that have them."""
    having = set(joined)
    if having and (alone := [gpu for gpu in gpus if gpu not in having]):
        yield (
            f"{', '.join(alone)}: no NVLinks, unlike the other GPUs, so messages go over PCIe; "
            "`nvidia-smi nvlink -s` shows whether they are inactive"
        )
