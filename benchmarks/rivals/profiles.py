"""Profiles of PipeDream (Narayanan et al. 2019) and DAPPLE (Fan et al. 2021) as layer graphs.

A file has lines ``nodeK -- name -- forward_compute_time=…, backward_compute_time=…,
activation_size=…, parameter_size=…`` in milliseconds and bytes, and lines ``nodeA -- nodeB``. What
it does not say: a layer keeps its output for its backward; a backward with parameters is half input
and half weight gradient, as in a matrix product; parameters are float32; times are of a V100.
Inputs take no time, since loading data was measured there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import networkx as nx

from planner.cluster.presets import DEVICES
from planner.errors import PipeplanError
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import Boundary, GraphRecord, Layer, Parameter
from planner.model.layer_graph import LayerGraph

DEVICE, PRECISION, BYTES_PER_ELEMENT = "V100-16GB", "float32", 4
_NODE = re.compile(
    r"\s*(\S+) -- (.*?) -- forward_compute_time=([\d.]+), backward_compute_time=([\d.]+), "
    r"activation_size=(\[[^\]]*\]|[\d.]+), parameter_size=([\d.]+)(?: -- stage_id=\d+)?\s*"
)
_EDGE = re.compile(r"\s*(\S+) -- (\S+)\s*")
_BATCH = re.compile(r"pbs-(\d+)")
_ITEM: Final = re.compile(r"__getitem__\((\d+)\)")


class Node(NamedTuple):
    """A node line; bytes of each tensor that it makes."""

    name: str
    forward_s: float
    backward_s: float
    output_bytes: tuple[int, ...]
    parameter_bytes: int


def read_profile(path: Path) -> LayerGraph:
    """Read a profile; the batch that was measured is one microbatch.

    Raises:
        PipeplanError: naming a line that is neither a node nor an edge.
    """
    graph, nodes = nx.DiGraph(), dict[str, Node]()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if found := _NODE.fullmatch(line):
            nodes[found[1]] = _node(*found.groups()[1:])
            graph.add_node(found[1])
        elif found := _EDGE.fullmatch(line):
            graph.add_edge(found[1], found[2])
        elif line.strip():
            raise PipeplanError(f"{path}: line {number}: is neither a node nor an edge; correct it")
    return _layer_graph(path, graph, nodes)


def _node(name: str, forward_ms: str, backward_ms: str, sizes: str, parameters: str) -> Node:
    each = re.split("[;,]", sizes.strip("[]")) if sizes.strip("[]") else ["0"]
    is_input = name.startswith("Input")
    return Node(
        name.strip(),
        0.0 if is_input else float(forward_ms) * 1e-3,
        0.0 if is_input else float(backward_ms) * 1e-3,
        tuple(-int(-float(size) // 1) for size in each),
        -int(-float(parameters) // 1),
    )


def _layer_graph(path: Path, graph: nx.DiGraph, nodes: dict[str, Node]) -> LayerGraph:
    carries: dict[str, bool] = {}
    for key in nx.topological_sort(graph):
        own = nodes[key].parameter_bytes > 0 or nodes[key].backward_s > 0
        carries[key] = own or any(carries[before] for before in graph.predecessors(key))
    read = {key: _read(graph, nodes, key) for key in nodes}
    order = _narrow_order(graph, nodes, read)
    names = {key: f"{key}:{node.name.partition('(')[0]}"[:80] for key, node in nodes.items()}
    batch = _BATCH.search(path.stem)
    return LayerGraph.from_record(
        GraphRecord(
            name=path.resolve().parent.name if path.stem == "graph" else path.stem,
            samples_per_microbatch=int(batch[1]) if batch else 1,
            precision=PRECISION,
            layers=tuple(_layer(graph, nodes[key], key, names, carries) for key in order),
            boundaries=tuple(
                _boundary(nodes, key, users, elements, names, carries)
                for key in order
                for users, elements in read[key].items()
            ),
            parameters=tuple(
                Parameter(
                    name=f"{names[key]}.parameters",
                    elements=-(-nodes[key].parameter_bytes // BYTES_PER_ELEMENT),
                    bytes=nodes[key].parameter_bytes,
                )
                for key in order
                if nodes[key].parameter_bytes
            ),
            flop_coverage=0.0,
        )
    )


def _read(
    graph: nx.DiGraph, nodes: dict[str, Node], key: str
) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the elements of a node's output by the nodes that read them."""
    count = len(nodes[key].output_bytes)
    readers: list[list[str]] = [[] for _ in range(count)]
    for user in graph.successors(key):
        item = _ITEM.fullmatch(nodes[user].name)
        is_one = item is not None and int(item[1]) < count
        for element in [int(item[1])] if item is not None and is_one else range(count):
            readers[element].append(user)
    elements: dict[tuple[str, ...], tuple[int, ...]] = {}
    for element, users in enumerate(readers):
        if users:
            elements[tuple(users)] = (*elements.get(tuple(users), ()), element)
    return elements


def _layer(
    graph: nx.DiGraph, node: Node, key: str, names: dict[str, str], carries: dict[str, bool]
) -> Layer:
    carried = any(carries[before] for before in graph.predecessors(key))
    share = 0.0 if not node.parameter_bytes else 0.5 if carried else 1.0
    times = MeasuredTimes(
        forward_s=node.forward_s,
        input_gradient_s=node.backward_s * (1 - share),
        weight_gradient_s=node.backward_s * share,
    )
    flop_per_s = DEVICES[DEVICE].peak_tflop_per_s[PRECISION] * 1e12 * DEVICES[DEVICE].efficiency
    return Layer(
        name=names[key],
        forward_flops=round(times.forward_s * flop_per_s),
        input_gradient_flops=round(times.input_gradient_s * flop_per_s),
        weight_gradient_flops=round(times.weight_gradient_s * flop_per_s),
        forward_traffic_bytes=0,
        input_gradient_traffic_bytes=0,
        weight_gradient_traffic_bytes=0,
        # An element of a list is a view of it.
        stash_bytes=0 if _ITEM.fullmatch(node.name) else sum(node.output_bytes),
        parameters=(f"{names[key]}.parameters",) if node.parameter_bytes else (),
        measured={DEVICE: times},
    )


def _boundary(
    nodes: dict[str, Node],
    key: str,
    users: tuple[str, ...],
    elements: tuple[int, ...],
    names: dict[str, str],
    carries: dict[str, bool],
) -> Boundary:
    bytes_ = sum(nodes[key].output_bytes[element] for element in elements)
    return Boundary(
        name=f"{names[key]}{list(elements)}",
        producer=names[key],
        users=tuple(names[user] for user in users),
        bytes=bytes_,
        shape=(-(-bytes_ // BYTES_PER_ELEMENT),),
        dtype=PRECISION,
        requires_grad=carries[key],
        saved_by=names[key],
    )


def _narrow_order(
    graph: nx.DiGraph,
    nodes: dict[str, Node],
    read: dict[str, dict[tuple[str, ...], tuple[int, ...]]],
) -> list[str]:
    """Return an executable order whose cuts are narrow in sum.

    The ready node after which least is live comes next; of equals the one that became ready last,
    so that a branch ends before the next one starts. Then single nodes move while that helps.
    """
    tensors = [
        (key, users, sum(nodes[key].output_bytes[element] for element in elements))
        for key, rows in read.items()
        for users, elements in rows.items()
    ]

    def width(order: list[str]) -> int:
        at = {key: place for place, key in enumerate(order)}
        return sum(
            bytes_ * (max(at[user] for user in users) - at[key]) for key, users, bytes_ in tensors
        )

    order = _least_live(graph, tensors)
    best, moved = width(order), True
    while moved:
        moved = False
        for key in tuple(order):
            rest = [other for other in order if other != key]
            first = max((rest.index(before) + 1 for before in graph.predecessors(key)), default=0)
            last = min((rest.index(user) for user in graph.successors(key)), default=len(rest))
            tried = [[*rest[:n], key, *rest[n:]] for n in range(first, last + 1)]
            narrowest = min(tried, key=width)
            if width(narrowest) < best:
                order, best, moved = narrowest, width(narrowest), True
    return order


def _least_live(graph: nx.DiGraph, tensors: list[tuple[str, tuple[str, ...], int]]) -> list[str]:
    left = [set(users) for _, users, _ in tensors]
    missing = dict(graph.in_degree())
    ready = [key for key, count in missing.items() if not count]
    order: list[str] = []

    def growth(key: str) -> int:
        made = sum(bytes_ for producer, _, bytes_ in tensors if producer == key)
        ended = (row[2] for row, users in zip(tensors, left, strict=True) if users == {key})
        return made - sum(ended)

    while ready:
        chosen = min(reversed(ready), key=growth)
        ready.remove(chosen)
        order.append(chosen)
        for users in left:
            users.discard(chosen)
        for user in graph.successors(chosen):
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return order
