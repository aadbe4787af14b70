"""Reader of the JSON graphs of dnn-partitioning.

They come with Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators"
(NeurIPS 2020); the format is that of the README of github.com/msr-fiddle/dnn-partitioning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from benchmarks.placement.solver.instance import (
    MOST_DEVICES,
    DeviceClass,
    LoadInstance,
    LoadNode,
    graph_problems,
)
from planner.errors import PipeplanError, shorten
from planner.records.document import Record, read_json

ACCELERATOR, CPU = "accelerator", "cpu"
SAME_COST = 1e-6
"""Costs of edges out of one node that differ by less are one cost to the authors' programs."""


def _flag(value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError("expected true, false, 1 or 0")


Flag = Annotated[bool, BeforeValidator(_flag)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Devices = Annotated[int, Field(ge=0, le=MOST_DEVICES)]


class _Part(Record):
    # The format allows any debug information beside its own fields.
    model_config = ConfigDict(extra="ignore")


class NodeRecord(_Part):
    """A layer or operator; latencies in milliseconds, size in bytes."""

    id: int
    supportedOnFpga: Flag  # noqa: N815
    cpuLatency: Amount  # noqa: N815
    fpgaLatency: Amount  # noqa: N815
    isBackwardNode: Flag  # noqa: N815
    colorClass: int | None = None  # noqa: N815
    size: Amount = 0.0
    name: str = ""


class EdgeRecord(_Part):
    """Who uses whose output; the time to transfer it in milliseconds, its size in bytes."""

    sourceId: int  # noqa: N815
    destId: int  # noqa: N815
    cost: Amount
    size: Amount | None = None


class FileRecord(_Part):
    """The whole file, as its authors name the fields."""

    maxSizePerFPGA: Amount  # noqa: N815
    maxFPGAs: Devices  # noqa: N815
    maxCPUs: Devices  # noqa: N815
    nodes: tuple[NodeRecord, ...]
    edges: tuple[EdgeRecord, ...]


def looks_like_dnn_partitioning(head: str) -> bool:
    """Return whether the beginning of a file names a field of this format."""
    return any(f'"{field}"' in head for field in ("maxFPGAs", "maxSizePerFPGA", "fpgaLatency"))


def load_record(path: str | Path) -> FileRecord:
    """Read a file.

    Raises:
        PipeplanError: naming every field, node and edge that is wrong.
    """
    return parse_record(read_json(path, keeps_nan=True), str(path))


def parse_record(data: Any, source: str) -> FileRecord:
    """Check plain JSON data.

    Args:
        data: what a JSON file held.
        source: its name, for messages.

    Raises:
        PipeplanError: naming every field, node and edge that is wrong.
    """
    try:
        record, problems = FileRecord.parse(data, source), []
    except PipeplanError as error:
        record, problems = None, list(error.problems)
    problems += [f"{source}: {problem}" for problem in _problems_between(data)]
    if record is not None and not record.nodes:
        problems.append(f"{source}: nodes: there are none; a graph needs at least one")
    if record is not None and not record.maxFPGAs + record.maxCPUs:
        problems.append(f"{source}: maxFPGAs and maxCPUs are both 0; give at least one device")
    if problems or record is None:
        raise PipeplanError(problems)
    return record


def _problems_between(data: Any) -> Iterator[str]:
    """Yield contradictions between fields that are each well formed."""
    nodes = _rows(data, "nodes", ("id",))
    edges = _rows(data, "edges", ("sourceId", "destId"))
    if len(nodes) < len(_rows(data, "nodes", ())):
        edges = []  # Which ids there are is not known.
    backward = {node["id"] for node in nodes if node.get("isBackwardNode") in (1, True)}
    pairs = [(edge["sourceId"], edge["destId"]) for edge in edges]
    yield from graph_problems([node["id"] for node in nodes], backward, pairs)
    yield from _different_costs(edges)
    for node in nodes:
        for field in ("containedSubnodes", "containedNodes"):
            if field in node:
                yield (
                    f"node {node['id']}: it has {field}, so the graph was contracted already; "
                    "give the graph it was made from"
                )


def _rows(data: Any, name: str, ids: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """The entries of a list of the file that have integers for ids."""
    found = data.get(name) if isinstance(data, Mapping) else None
    rows = found if isinstance(found, list) else []
    return [
        row
        for row in rows
        if isinstance(row, Mapping)
        and all(isinstance(row.get(id_), int) and not isinstance(row[id_], bool) for id_ in ids)
    ]


def _different_costs(edges: list[Mapping[str, Any]]) -> Iterator[str]:
    first: dict[int, float] = {}
    for edge in edges:
        source, cost = edge["sourceId"], edge.get("cost")
        if isinstance(cost, int | float) and abs(first.setdefault(source, cost) - cost) > SAME_COST:
            yield (
                f"edge {source} -> {edge['destId']}: cost {shorten(cost)}, but another edge out of "
                f"node {source} has {shorten(first[source])}; all of them carry one output, give "
                "them one cost"
            )


def load_instance(path: str | Path) -> LoadInstance:
    """Read a file as a placement problem.

    Raises:
        PipeplanError: naming every field, node and edge that is wrong.
    """
    return to_instance(load_record(path), Path(path).stem)


def to_instance(record: FileRecord, name: str) -> LoadInstance:
    """The placement problem of a file; times stay in the file's unit, milliseconds."""
    cost: dict[int, float] = {}
    for edge in record.edges:
        cost.setdefault(edge.sourceId, edge.cost)
    return LoadInstance(
        name=name,
        classes=(
            DeviceClass(ACCELERATOR, record.maxFPGAs, record.maxSizePerFPGA, pays_transfers=True),
            DeviceClass(CPU, record.maxCPUs, None, pays_transfers=False),
        ),
        nodes=tuple(
            LoadNode(
                id=node.id,
                times=(node.fpgaLatency, node.cpuLatency),
                allowed=(node.supportedOnFpga, True),
                memory_bytes=node.size,
                transfer_time=cost.get(node.id, 0.0),
                color=node.colorClass,
                is_backward=node.isBackwardNode,
                name=node.name,
            )
            for node in record.nodes
        ),
        edges=tuple((edge.sourceId, edge.destId) for edge in record.edges),
    )
