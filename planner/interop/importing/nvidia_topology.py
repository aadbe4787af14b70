"""A machine's cluster from ``nvidia-smi topo -m``, with assumed figures.

A class names a kind of connection without figures, so every link of the cluster is assumed: NVLink
by the number of bonded links, anything else as PCIe (:mod:`planner.interop.importing.pcie`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from networkx.utils import UnionFind

from planner.cluster.device_types import KnownType, presets_called
from planner.cluster.hardware import LinkType
from planner.cluster.ports import FABRIC_LINKS, PORTS, Ports
from planner.errors import PipeplanError
from planner.interop.importing.imported import ImportedCluster, ImportOptions, Wire
from planner.interop.importing.nvidia_table import NvidiaTopology, nvlinks, read_topology
from planner.interop.importing.pcie import (
    Pair,
    PcieMachine,
    assumed,
    gpu_types,
    imported_machine,
    notes_on_ports,
    pcie_tree,
    ports_of,
)

NVSWITCH = "nvswitch"
OTHER_FABRIC = "NVLink3"
"""Assumed for each NVLink of GPUs whose NVLinks are not known."""
_MOST_NVLINKS = 18
"""NVLinks that such a GPU may have."""
_OF_RACKS = ("GB200", "GB300")


def read_topology_cluster(path: Path, options: ImportOptions) -> ImportedCluster:
    """Read the table into a cluster of one machine.

    GPUs with NVLinks have them as links of their own, or by a switch (``nvswitch``) where each
    has more of them than a device has. All else is a tree of PCIe switches, NUMA nodes and what
    joins sockets. Network cards are switches in it, to which links to other machines are added.

    Args:
        path: of the file.
        options: the GPUs' type, if the file does not name them as ``nvidia-smi -L`` does, and
            :data:`GIVEN_PORTS`.

    Raises:
        PipeplanError: if there is no whole table, the GPUs' type is not known, or the type does
            not have the NVLinks of the table.
    """
    topology = read_topology(path)
    types = gpu_types(path, topology.gpus, topology.names, options, "the lines of `nvidia-smi -L`")
    ports = {gpu: ports_of(kind.name, options) for gpu, kind in types.items()}
    counts = {pair: count for pair, word in topology.classes.items() if (count := nvlinks(word))}
    _require_nvlinks(path, types, counts)
    wires = fabric_wires(topology.gpus, ports, counts)
    if topology.cards or len(counts) < len(list(combinations(topology.gpus, 2))):
        over_pcie = {pair: word for pair, word in topology.classes.items() if pair not in counts}
        wires += pcie_tree(PcieMachine(ports, topology.cards, over_pcie, topology.numa))
    notes = (*topology.notes, *_notes(topology, types, counts, options))
    return imported_machine(path.stem, types, wires, notes)


def _require_nvlinks(
    path: Path, types: Mapping[str, KnownType], counts: Mapping[Pair, int]
) -> None:
    """Refuse a type of GPU that cannot have the NVLinks of the table."""
    for pair, count in counts.items():
        for name in (types[gpu].name for gpu in pair):
            fabric = PORTS[name].fabric if name in PORTS else OTHER_FABRIC
            most = _MOST_NVLINKS if name not in PORTS else FABRIC_LINKS[fabric] if fabric else 0
            if count > most:
                has = f"at most {most} NVLinks" if most else "no NVLinks"
                raise PipeplanError(
                    f"{path}: {pair[0]} and {pair[1]} are joined by NV{count}, and {name} has "
                    f"{has}; give the --device-type of these GPUs"
                )


def fabric_wires(
    gpus: Sequence[str], ports: Mapping[str, Ports], counts: Mapping[Pair, int]
) -> list[Wire]:
    """Return the links of GPUs that NVLinks join, each of which may be of another switch.

    Args:
        gpus: by name.
        ports: of each.
        counts: NVLinks that the driver reports between two of them.
    """
    own = {gpu: [n for pair, n in counts.items() if gpu in pair] for gpu in gpus}
    groups = _joined(gpus, counts)
    switched = [
        group for group in groups if any(sum(own[gpu]) > _links(ports[gpu]) for gpu in group)
    ]
    wires = []
    for number, group in enumerate(switched):
        switch = NVSWITCH if len(switched) == 1 else f"{NVSWITCH}{number}"
        wires += [Wire((gpu, switch), nvlink(ports[gpu], max(own[gpu]))) for gpu in group]
    behind = {gpu for group in switched for gpu in group}
    wires += [
        Wire((a, b), nvlink(ports[a], count)) for (a, b), count in counts.items() if a not in behind
    ]
    return wires


def _joined(gpus: Sequence[str], counts: Mapping[Pair, int]) -> list[list[str]]:
    """Return the GPUs that NVLinks join, group by group."""
    joined = UnionFind(gpus)
    for a, b in counts:
        joined.union(a, b)
    groups: dict[str, list[str]] = {}
    for gpu in gpus:
        groups.setdefault(joined[gpu], []).append(gpu)
    return [group for group in groups.values() if len(group) > 1]


def nvlink(ports: Ports, count: int) -> LinkType:
    """Return a link of so many bonded NVLinks, or xGMI links, of a GPU."""
    fabric = ports.fabric or OTHER_FABRIC
    return assumed(fabric, count / FABRIC_LINKS[fabric])


def _links(ports: Ports) -> int:
    """NVLinks of a GPU in all."""
    return FABRIC_LINKS[ports.fabric] if ports.fabric else _MOST_NVLINKS


def _notes(
    topology: NvidiaTopology,
    types: Mapping[str, KnownType],
    counts: Mapping[Pair, int],
    options: ImportOptions,
) -> Iterator[str]:
    yield from notes_on_ports(types.values(), options, OTHER_FABRIC if counts else None)
    given = options.known_type
    for name in dict.fromkeys(topology.names.values()):
        if given is not None and given.name not in presets_called(name):
            yield f"the file calls a GPU {name!r}; it is taken as {given.name} (--device-type)"
    joined = {gpu for pair in counts for gpu in pair}
    if counts and (alone := [gpu for gpu in topology.gpus if gpu not in joined]):
        yield (
            f"{', '.join(alone)}: no NVLinks, unlike the other GPUs, so messages go over PCIe; "
            "`nvidia-smi nvlink -s` shows whether they are inactive"
        )
    for name in dict.fromkeys(kind.name for kind in types.values()):
        if not counts and len(types) > 1 and name in PORTS and PORTS[name].fabric:
            yield (
                f"{name}: the table shows no NVLinks; if these GPUs have them, the table is of "
                "`topo -mp`, or they are inactive (`nvidia-smi nvlink -s`)"
            )
        if name in _OF_RACKS:
            yield (
                f"{name}: a rack's other trays are on the same NVLink switches; `pipeplan import "
                "TRAY… --card 'gpu*' --network NVLink5` joins the trays' files by them"
            )
    if topology.cards:
        cards = f"{', '.join(topology.cards[:4])}{' and more' if len(topology.cards) > 4 else ''}"
        yield f"`pipeplan import` joins this box to others by its network cards ({cards})"
