"""A machine's cluster from the classes of ``nvidia-smi topo -m``, every figure assumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

from networkx.utils import UnionFind

from planner.artifacts.hardware import LinkType
from planner.artifacts.presets import DEVICES, LINKS
from planner.errors import PipeplanError
from planner.importing.imported_cluster import ImportedCluster, Wire, cluster_of
from planner.importing.nvidia_topology import Topology, nvlinks, read_topology
from planner.wiring.device_types import KnownType, named_type

NVLINK = {
    "V100-16GB": ("NVLink2", 6),
    "V100-32GB": ("NVLink2", 6),
    "A100-40GB": ("NVLink3", 12),
    "A100-80GB": ("NVLink3", 12),
    "H100-80GB": ("NVLink4", 18),
    "H200": ("NVLink4", 18),
    "B200": ("NVLink5", 18),
}
"""The preset of all NVLinks of a device together, and how many these are (NVIDIA's datasheets)."""
OTHER_NVLINK = ("NVLink3", 12)
PCIE = {
    **dict.fromkeys(("V100-16GB", "V100-32GB"), "PCIe3-x16"),
    **dict.fromkeys(("H100-80GB", "H200", "B200", "MI300X"), "PCIe5-x16"),
}
OTHER_PCIE = "PCIe4-x16"
SYS_SHARE = 0.5
"""Between sockets: half of what PCIe carries; machines differ widely here."""


def read_topology_cluster(path: Path, device_type: str | None = None) -> ImportedCluster:
    """Read the table into a cluster of one machine.

    GPUs with NVLinks have them as links of their own, or by a switch (``nvswitch``) where each
    has more of them than a device has. Switches stand for PCIe bridges (PIX, PXB), for the host
    bridges of a NUMA node (PHB, NODE) and for what joins sockets (SYS).

    Args:
        path: of the file.
        device_type: preset of the GPUs; None if the file names them, as ``nvidia-smi -L`` does.

    Raises:
        PipeplanError: if there is no whole table, or the GPUs' type is not known.
    """
    topology = read_topology(path)
    types = {gpu: _type(path, topology, gpu, device_type) for gpu in topology.gpus}
    wires, switches, notes = _wires(topology, types)
    cluster = cluster_of(
        path.stem,
        {_name(gpu): types[gpu].name for gpu in topology.gpus},
        {kind.name: kind.figures for kind in types.values()},
        switches,
        wires,
    )
    told = dict.fromkeys(kind.note for kind in types.values() if kind.note is not None)
    assumed = (
        "the table tells classes, no figures: bandwidths and latencies are presets and assumed; "
        "`torchrun -m executor.measure_links` measures them"
    )
    return ImportedCluster(cluster, (*topology.notes, *notes, *told, assumed))


def _type(path: Path, topology: Topology, gpu: int, given: str | None) -> KnownType:
    if given is not None:
        if given not in DEVICES:
            raise PipeplanError(
                f"device_type: {given!r} is unknown; use one of {', '.join(DEVICES)}"
            )
        return KnownType(given, DEVICES[given])
    if gpu not in topology.names:
        raise PipeplanError(
            f"{path}: the table does not say what GPU{gpu} is; give --device-type PRESET, or put "
            "the lines of `nvidia-smi -L` into the file"
        )
    return named_type(topology.names[gpu], f"{path}: GPU{gpu}")


def _name(gpu: int) -> str:
    return f"gpu{gpu}"


def _wires(
    topology: Topology, types: dict[int, KnownType]
) -> tuple[list[Wire], list[str], list[str]]:
    counts = {pair: nvlinks(word) for pair, word in topology.classes.items()}
    wires: list[Wire] = []
    switches: list[str] = []
    notes: list[str] = []
    ports = {gpu: [n for pair, n in counts.items() if gpu in pair] for gpu in topology.gpus}
    most = {gpu: NVLINK.get(types[gpu].name, OTHER_NVLINK)[1] for gpu in topology.gpus}
    if any(counts.values()) and (odd := [t.name for t in types.values() if t.name not in NVLINK]):
        notes.append(f"{odd[0]}: an NVLink of it is assumed to be one of {OTHER_NVLINK[0]}")
    if all(sum(ports[gpu]) > most[gpu] for gpu in topology.gpus):
        switches.append("nvswitch")
        wires += [
            Wire((_name(gpu), "nvswitch"), _nvlink(types[gpu].name, max(ports[gpu])))
            for gpu in topology.gpus
        ]
    else:
        wires += [
            Wire((_name(a), _name(b)), _nvlink(types[a].name, count))
            for (a, b), count in counts.items()
            if count
        ]
    if any(not count for count in counts.values()) or len(counts) < _pairs(topology):
        tree = list(_pcie_tree(topology, types))
        wires += tree
        ends = dict.fromkeys(end for wire in tree for end in wire.between)
        switches += [end for end in ends if not end.startswith("gpu")]
    return wires, switches, notes


def _pairs(topology: Topology) -> int:
    return len(list(combinations(topology.gpus, 2)))


def _nvlink(type_name: str, count: int) -> LinkType:
    preset, all_of_them = NVLINK.get(type_name, OTHER_NVLINK)
    width = LINKS[preset].bandwidth_gb_per_s * count / all_of_them
    return LINKS[preset].model_copy(update={"bandwidth_gb_per_s": width, "source": "assumed"})


def _pcie(type_name: str, share: float = 1.0) -> LinkType:
    kind = LINKS[PCIE.get(type_name, OTHER_PCIE)]
    width = kind.bandwidth_gb_per_s * share
    return kind.model_copy(update={"bandwidth_gb_per_s": width, "source": "assumed"})


def _pcie_tree(topology: Topology, types: dict[int, KnownType]) -> Iterator[Wire]:
    """Bridges, NUMA nodes, and what joins these; a switch of one device is left out."""
    gpus = topology.gpus
    kind = types[gpus[0]].name
    bridges = _groups(gpus, _joined(topology, ("PIX", "PXB")))
    nodes = _groups(gpus, [*_joined(topology, ("PIX", "PXB", "PHB", "NODE")), *_of_numa(topology)])
    ends: dict[tuple[int, ...], str] = {}
    for number, group in enumerate(bridges):
        ends[group] = _name(group[0])
        if len(group) > 1:
            ends[group] = f"pcie{number}"
            for gpu in group:
                yield Wire((_name(gpu), ends[group]), _pcie(types[gpu].name))
    tops = []
    for number, node in enumerate(nodes):
        inside = [ends[group] for group in bridges if set(group) <= set(node)]
        tops.append(inside[0] if len(inside) == 1 else f"numa{number}")
        if len(inside) > 1:
            for end in inside:
                yield Wire((end, f"numa{number}"), _pcie(kind))
    if len(tops) == 2:
        yield Wire((tops[0], tops[1]), _pcie(kind, SYS_SHARE))
    elif len(tops) > 2:
        for top in tops:
            yield Wire((top, "sockets"), _pcie(kind, SYS_SHARE))


def _joined(topology: Topology, classes: Sequence[str]) -> list[tuple[int, int]]:
    return [pair for pair, word in topology.classes.items() if word in classes]


def _of_numa(topology: Topology) -> Iterator[tuple[int, int]]:
    """Pairs that NVLink joins, which show no class of PCIe, on one NUMA node."""
    for a, b in combinations(topology.gpus, 2):
        is_told = a in topology.numa and topology.numa.get(a) == topology.numa.get(b)
        if is_told and nvlinks(topology.classes.get((a, b), "")):
            yield a, b


def _groups(gpus: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    joined = UnionFind(gpus)
    for a, b in pairs:
        joined.union(a, b)
    return sorted(tuple(sorted(group)) for group in joined.to_sets())
