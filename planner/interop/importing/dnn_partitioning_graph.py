"""A dnn-partitioning file as a layer graph, a cluster and a job."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Literal

import networkx as nx
from pydantic import ValidationError

from benchmarks.placement.solver.contraction import ordered_groups
from planner.cluster.cluster import Cluster, Device, Link
from planner.cluster.hardware import LEAST, MOST, DeviceType
from planner.errors import PipeplanError
from planner.interop.importing.dnn_partitioning import (
    ACCELERATOR,
    CPU,
    FileRecord,
    NodeRecord,
    load_record,
    to_instance,
)
from planner.interop.importing.imported import Imported
from planner.job import Job
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import Boundary, GraphRecord, Layer, Parameter
from planner.model.layer_graph import LayerGraph
from planner.units import plural

SECONDS = 1e-3
"""The files' times are milliseconds."""
HOST = "host"
CPU_MEMORY_GIB = 1e6
"""Stands for the CPUs' memory, which the format does not limit."""
PRECISION: Literal["float32"] = "float32"
NAMELESS_LINK_GB_PER_S = 1.0


def read_dnn_partitioning(path: str | Path) -> Imported:
    """Read a file.

    Raises:
        PipeplanError: naming every field, node and edge that is wrong.
    """
    record = load_record(path)
    try:
        return _Conversion(record, Path(path).stem[:100]).imported()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PipeplanError(
            f"{path}: a time or size is too large for a layer graph ({first['loc']}: "
            f"{first['msg']}); correct it"
        ) from None


class _Conversion:
    """The conversion of the file's nodes to layers.

    Args:
        record: the file.
        name: of the graph.
    """

    def __init__(self, record: FileRecord, name: str) -> None:
        self._record, self._name = record, name
        self._instance = to_instance(record, name)
        self._group, self._order = ordered_groups(self._instance)

    def imported(self) -> Imported:
        """The artifacts."""
        return Imported(
            graph=LayerGraph.from_record(self._graph()),
            cluster=self._cluster(),
            job=Job(
                name=self._name,
                samples_per_microbatch=1,
                precision=PRECISION,
                backward="whole",
                replication=False,
            ),
            notes=tuple(self._notes()),
        )

    def _graph(self) -> GraphRecord:
        return GraphRecord(
            name=self._name,
            samples_per_microbatch=1,
            precision=PRECISION,
            layers=tuple(self._layer(group) for group in self._groups),
            boundaries=tuple(self._boundaries()),
            parameters=tuple(
                Parameter(name=_size_name(name), elements=0, bytes=bytes_, trainable=False)
                for name, bytes_ in self._sizes.items()
                if bytes_
            ),
        )

    @cached_property
    def _groups(self) -> list[int]:
        """The layers' groups in an executable order, depth first: what is used soon comes late."""
        graph = nx.DiGraph()
        graph.add_nodes_from(dict.fromkeys(self._group))
        graph.add_edges_from(sorted((edge.before, edge.after) for edge in self._order))
        return list(reversed(list(nx.dfs_postorder_nodes(graph))))

    @cached_property
    def _nodes(self) -> dict[int, list[NodeRecord]]:
        """The nodes of every group."""
        found: dict[int, list[NodeRecord]] = {group: [] for group in self._groups}
        for node, group in zip(self._record.nodes, self._group, strict=True):
            found[group].append(node)
        return found

    @cached_property
    def _names(self) -> dict[int, str]:
        """The layer of every group: its first forward node's id, and name if it has one."""
        names = {}
        for group, nodes in self._nodes.items():
            first = min(nodes, key=lambda node: node.isBackwardNode)
            names[group] = f"{first.id}:{first.name}"[:400] if first.name else str(first.id)
        return names

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes by layer name."""
        return {
            self._names[group]: round(sum(node.size for node in nodes))
            for group, nodes in self._nodes.items()
        }

    def _layer(self, group: int) -> Layer:
        nodes, name = self._nodes[group], self._names[group]
        return Layer(
            name=name,
            forward_flops=0,
            input_gradient_flops=0,
            weight_gradient_flops=0,
            forward_traffic_bytes=0,
            input_gradient_traffic_bytes=0,
            weight_gradient_traffic_bytes=0,
            stash_bytes=0,
            parameters=(_size_name(name),) if self._sizes[name] else (),
            measured={
                ACCELERATOR: _times([(node.isBackwardNode, node.fpgaLatency) for node in nodes]),
                CPU: _times([(node.isBackwardNode, node.cpuLatency) for node in nodes]),
            },
            device_types=() if all(node.supportedOnFpga for node in nodes) else (CPU,),
        )

    def _boundaries(self) -> Iterator[Boundary]:
        """One tensor a producer and direction of its edges: the users are whole layers."""
        trains = any(node.isBackwardNode for node in self._record.nodes)
        for (node, is_turned), users in self._users().items():
            cost = self._instance.nodes[node].transfer_time
            ends = [self._group[node], *users]
            for producer, targets in self._directed(ends, is_turned):
                yield Boundary(
                    name=f"{self._record.nodes[node].id}" + (f"<{producer}" if is_turned else ""),
                    producer=self._names[producer],
                    users=tuple(self._names[target] for target in targets),
                    bytes=round(cost * SECONDS * self._bandwidth_gb_per_s * 1e9),
                    shape=(),
                    dtype=PRECISION,
                    requires_grad=trains,
                )

    def _directed(self, ends: list[int], is_turned: bool) -> Iterator[tuple[int, list[int]]]:
        position = {group: index for index, group in enumerate(self._groups)}
        users = sorted(ends[1:], key=position.__getitem__)
        if is_turned:
            yield from ((user, [ends[0]]) for user in users)
        else:
            yield ends[0], users

    def _users(self) -> dict[tuple[int, bool], list[int]]:
        """Return the other groups that use a producer, by producer and direction of the edges."""
        order = {(edge.before, edge.after, edge.is_turned) for edge in self._order}
        found: dict[tuple[int, bool], dict[int, None]] = {}
        for first, second in self._edges():
            a, b = self._group[first], self._group[second]
            backward = [self._record.nodes[end].isBackwardNode for end in (first, second)]
            if not any(backward) and a != b:
                found.setdefault((first, False), {})[b] = None
            elif all(backward) and (b, a, True) in order:
                found.setdefault((first, True), {})[b] = None
        return {key: list(users) for key, users in found.items()}

    @cached_property
    def _bandwidth_gb_per_s(self) -> float:
        """Bytes over transfer time, the median over the edges that have both."""
        ratios = [
            edge.size / (edge.cost * SECONDS * 1e9)
            for edge in self._record.edges
            if edge.size and edge.cost
        ]
        usual = median(ratios) if ratios else NAMELESS_LINK_GB_PER_S
        return min(max(usual, LEAST), MOST) if isfinite(usual) else MOST

    def _cluster(self) -> Cluster:
        record = self._record
        memory_gib = min(max(record.maxSizePerFPGA / 2**30, LEAST), MOST)
        counts = {ACCELERATOR: record.maxFPGAs, CPU: record.maxCPUs}
        devices = [
            Device(name=f"{kind}{index}", type=kind)
            for kind, count in counts.items()
            for index in range(count)
        ]
        kinds = {ACCELERATOR: _device_type(memory_gib), CPU: _device_type(CPU_MEMORY_GIB)}
        return Cluster(
            name=self._name,
            device_types={kind: kinds[kind] for kind, count in counts.items() if count},
            devices=tuple(devices),
            switches=(HOST,),
            links=tuple(
                Link(
                    between=(device.name, HOST),
                    bandwidth_gb_per_s=self._bandwidth_gb_per_s,
                    source="assumed",
                )
                for device in devices
            ),
        )

    def _notes(self) -> Iterator[str]:
        yield "times are read as milliseconds, as in the authors' layer graphs"
        yield (
            f"links carry {self._bandwidth_gb_per_s:.6g} GB/s, from the edges' cost and size"
            if any(edge.size and edge.cost for edge in self._record.edges)
            else f"no edge has a cost and a size: links carry {NAMELESS_LINK_GB_PER_S:g} GB/s and "
            "tensors as many bytes as take the edge's cost"
        )
        yield (
            "a node's size is memory its layer always holds; accelerators have all of "
            "maxSizePerFPGA for it, CPUs have no limit"
        )
        yield from self._merge_notes()
        if any(node.isBackwardNode for node in self._record.nodes):
            yield "the whole backward counts as input gradient: the file does not split it"
        only = sum(not node.supportedOnFpga for node in self._record.nodes)
        if only:
            yield f"{plural(only, 'node')} for no accelerator: their layers run on CPUs only"
        dropped = self._dropped_edges()
        if dropped:
            yield (
                f"{plural(dropped, 'edge')} from a forward node to a backward node of another "
                "layer left out: a layer graph has no such transfers"
            )

    def _merge_notes(self) -> Iterator[str]:
        colors = [node.colorClass for node in self._record.nodes]
        shared = len({color for color in colors if color is not None}) + colors.count(None)
        if shared < len(colors):
            yield (
                f"{plural(len(colors), 'node')} are {plural(shared, 'layer')}: nodes of one "
                "colour class share one"
            )
        if len(self._groups) < shared:
            yield (
                f"{shared} layers became {len(self._groups)}: some colour classes need each "
                "other's outputs in a circle and can only be one layer"
            )

    def _dropped_edges(self) -> int:
        nodes = self._record.nodes
        return sum(
            not nodes[first].isBackwardNode
            and nodes[second].isBackwardNode
            and self._group[first] != self._group[second]
            for first, second in self._edges()
        )

    def _edges(self) -> Iterator[tuple[int, int]]:
        """Edges by the positions of their nodes."""
        position = self._instance.position
        return ((position[source], position[target]) for source, target in self._instance.edges)


def _size_name(layer: str) -> str:
    return f"{layer}.size"[:400]


def _times(latencies: list[tuple[bool, float]]) -> MeasuredTimes:
    """Forward and backward of a layer's nodes, from pairs (is backward, milliseconds)."""
    totals = [
        sum(time for is_backward, time in latencies if is_backward == direction) * SECONDS
        for direction in (False, True)
    ]
    return MeasuredTimes(forward_s=totals[0], input_gradient_s=totals[1], weight_gradient_s=0.0)


def _device_type(memory_gib: float) -> DeviceType:
    """A type whose speed is in the layers' measured times; its own figures only fill the form."""
    return DeviceType(
        memory_gib=memory_gib,
        memory_bandwidth_gb_per_s=1.0,
        peak_tflop_per_s={PRECISION: 1.0},
        reserved_gib=0.0,
        source="assumed",
    )
