"""A machine's cluster from ``nvidia-smi topo -m``.

A class names a kind of connection without figures, so every link of the cluster is assumed: NVLink
by the number of bonded links, anything else as PCIe (:mod:`planner.interop.importing.pcie`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from planner.cluster.device_types import KnownType, presets_called
from planner.cluster.ports import FABRIC_LINKS, PORTS, Ports
from planner.errors import PipeplanError
from planner.interop.importing.captured import captured_lines
from planner.interop.importing.imported import (
    ImportedCluster,
    ImportOptions,
    Pair,
    Wire,
    alone_note,
    gpu_types,
    imported_machine,
    notes_on_ports,
    ports_of,
)
from planner.interop.importing.nvidia_table import (
    called_in,
    class_of,
    names_of,
    nvlinks,
    only_table,
)
from planner.interop.importing.pcie import (
    NVSWITCH,
    OTHER_FABRIC,
    PcieTree,
    joined_groups,
    nvlink,
)

_MOST_NVLINKS = 18
"""NVLinks that a GPU of unknown type may have."""
_OF_RACKS = ("GB200", "GB300")


def read_topology_cluster(path: Path, options: ImportOptions) -> ImportedCluster:
    """Read the table into a cluster of one machine.

    GPUs with NVLinks have them as links of their own, or by a switch (``nvswitch``) where each
    has more of them than a device has. All else is a tree of PCIe switches, NUMA nodes and what
    joins sockets. Network cards are switches in it, to which links to other machines are added.

    Args:
        path: of the file.
        options: the GPUs' type, if the file does not name them as ``nvidia-smi -L`` does, and what
            is given of their ports.

    Raises:
        PipeplanError: naming the line, if there is no such table or it is cut off, has words that
            are no classes, is of several machines, or leaves NVLinks out; if the GPUs' type is not
            known, or does not have the NVLinks of the table.
    """
    lines = captured_lines(path)
    table = only_table(path, lines)
    names = names_of(lines, table.columns)
    gpus = [names[name] for name in table.gpus]
    cards = tuple(names[name] for name in table.columns if name not in table.gpus)
    notes: list[str] = []
    ordered = [*table.gpus, *(name for name in table.columns if name not in table.gpus)]
    classes = {
        (names[a], names[b]): class_of(path, table, (a, b), notes)
        for a, b in combinations(ordered, 2)
    }
    called = called_in(lines)
    types = gpu_types(path, gpus, called, options, "the lines of `nvidia-smi -L`")
    ports = {gpu: ports_of(kind.name, options) for gpu, kind in types.items()}
    counts = {pair: count for pair, word in classes.items() if (count := nvlinks(word))}
    _require_nvlinks(path, types, counts)
    wires = _fabric(ports, counts)
    if cards or len(counts) < len(classes):
        over_pcie = {pair: word for pair, word in classes.items() if pair not in counts}
        told = {names[gpu]: table.numa(gpu) for gpu in table.gpus}
        numa = {gpu: node for gpu, node in told.items() if node is not None}
        wires += PcieTree(ports, cards, over_pcie, numa).wires()
    notes += notes_on_ports(types.values(), options, OTHER_FABRIC if counts else None)
    notes += _notes(called, cards, types, counts, options)
    return imported_machine(path.stem, types, wires, notes)


def _require_nvlinks(
    path: Path, types: Mapping[str, KnownType], counts: Mapping[Pair, int]
) -> None:
    """Refuse a type of GPU that cannot have the NVLinks of the table."""
    for pair, count in counts.items():
        for name in (types[gpu].name for gpu in pair):
            most = _most(PORTS[name]) if name in PORTS else _MOST_NVLINKS
            if count > most:
                has = f"at most {most} NVLinks" if most else "no NVLinks"
                raise PipeplanError(
                    f"{path}: {pair[0]} and {pair[1]} are joined by NV{count}, and {name} has "
                    f"{has}; give the --device-type of these GPUs"
                )


def _most(ports: Ports, unknown: int = 0) -> int:
    """Return the NVLinks of a GPU in all."""
    return FABRIC_LINKS[ports.fabric] if ports.fabric else unknown


def _fabric(ports: Mapping[str, Ports], counts: Mapping[Pair, int]) -> list[Wire]:
    """Return the links of GPUs that NVLinks join; each group of them may have its own switch."""
    own = {gpu: [n for pair, n in counts.items() if gpu in pair] for gpu in ports}
    switched = [
        group
        for group in joined_groups([*ports], counts)
        if any(sum(own[gpu]) > _most(ports[gpu], _MOST_NVLINKS) for gpu in group)
    ]
    wires = []
    for number, group in enumerate(switched):
        switch = NVSWITCH if len(switched) == 1 else f"{NVSWITCH}{number}"
        wires += [Wire((gpu, switch), nvlink(ports[gpu], max(own[gpu]))) for gpu in group]
    behind = {gpu for group in switched for gpu in group}
    direct = {pair: count for pair, count in counts.items() if pair[0] not in behind}
    return [*wires, *(Wire(pair, nvlink(ports[pair[0]], n)) for pair, n in direct.items())]


def _notes(
    called: Mapping[str, str],
    cards: Sequence[str],
    types: Mapping[str, KnownType],
    counts: Mapping[Pair, int],
    options: ImportOptions,
) -> Iterator[str]:
    given = options.known_type
    for name in dict.fromkeys(called.values()):
        if given is not None and given.name not in presets_called(name):
            yield f"the file calls a GPU {name!r}; it is taken as {given.name} (--device-type)"
    yield from alone_note(types, (gpu for pair in counts for gpu in pair))
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
    if cards:
        shown = f"{', '.join(cards[:4])}{' and more' if len(cards) > 4 else ''}"
        yield f"`pipeplan import` joins this box to others by its network cards ({shown})"
