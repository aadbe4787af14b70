"""Data of the problem: place a DNN's nodes on devices so that the largest load is least.

The model of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators"
(NeurIPS 2020), section 3: with many samples in flight the time per sample is the largest load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import networkx as nx

from planner.errors import PipeplanError, shorten

MOST_DEVICES = 100_000


@dataclass(frozen=True)
class DeviceClass:
    """Devices that are all alike.

    Attributes:
        name: such as ``"accelerator"`` or ``"cpu"``.
        count: how many there are.
        memory_bytes: what the nodes on one device may take; None is no limit.
        pays_transfers: whether moving data in and out takes the device's own time. A CPU of the
            paper's model pays nothing: the data is in its memory already.
    """

    name: str
    count: int
    memory_bytes: float | None
    pays_transfers: bool


@dataclass(frozen=True)
class LoadNode:
    """One operator or layer.

    Attributes:
        id: its number in the file it came from, unique.
        times: of computing it, one for each device class, in the instance's unit of time.
        allowed: whether a device of each class can compute it.
        memory_bytes: what it takes of a device's memory.
        transfer_time: of its output between a device and the host; a device pays it once if some
            consumer is on the other side of the device's border, however many there are.
        color: nodes of one colour share a device; None is a colour of its own.
        is_backward: whether it belongs to the backward pass.
        name: for messages.
    """

    id: int
    times: tuple[float, ...]
    allowed: tuple[bool, ...]
    memory_bytes: float = 0.0
    transfer_time: float = 0.0
    color: int | None = None
    is_backward: bool = False
    name: str = ""


@dataclass(frozen=True)
class LoadInstance:
    """A graph and the devices it goes on.

    Attributes:
        name: of the graph.
        classes: the kinds of devices. Devices are numbered class by class.
        nodes: in any order.
        edges: pairs of node ids, from a producer to a consumer of its output.

    Raises:
        PipeplanError: naming everything wrong with it, see :func:`instance_problems`.
    """

    name: str
    classes: tuple[DeviceClass, ...]
    nodes: tuple[LoadNode, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        problems = list(instance_problems(self))
        if problems:
            raise PipeplanError(f"{self.name}: {problem}" for problem in problems)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The class of every device, by device number."""
        return tuple(number for number, kind in enumerate(self.classes) for _ in range(kind.count))

    @cached_property
    def position(self) -> dict[int, int]:
        """Return the index of an id in ``nodes``."""
        return {node.id: index for index, node in enumerate(self.nodes)}


def instance_problems(instance: LoadInstance) -> Iterator[str]:
    """Return a line for each error in an instance: figures, ids, cycles, backward edges."""
    if not instance.nodes:
        yield "there are no nodes; a graph needs at least one"
    for kind in instance.classes:
        yield from _class_problems(kind)
    if sum(max(kind.count, 0) for kind in instance.classes) == 0:
        yield "there are no devices; give at least one"
    for node in instance.nodes:
        yield from _node_problems(node, instance)
    backward = {node.id for node in instance.nodes if node.is_backward}
    yield from graph_problems([node.id for node in instance.nodes], backward, instance.edges)


def _class_problems(kind: DeviceClass) -> Iterator[str]:
    if not 0 <= kind.count <= MOST_DEVICES:
        yield f"{kind.name}: a count of {kind.count}; expected 0 to {MOST_DEVICES}"
    if kind.memory_bytes is not None and not _is_amount(kind.memory_bytes):
        yield f"{kind.name}: memory {shorten(kind.memory_bytes)}; expected 0 or more bytes"


def _node_problems(node: LoadNode, instance: LoadInstance) -> Iterator[str]:
    if len(node.times) != len(instance.classes) or len(node.allowed) != len(instance.classes):
        yield f"node {node.id}: expected a time and a permission for every device class"
    figures = [*node.times, node.memory_bytes, node.transfer_time]
    for figure in figures:
        if not _is_amount(figure):
            yield f"node {node.id}: {shorten(figure)} is no time or size; expected 0 or more"


def _is_amount(figure: float) -> bool:
    return isfinite(figure) and figure >= 0


def graph_problems(
    ids: Sequence[int], backward: Container[int], edges: Iterable[tuple[int, int]]
) -> Iterator[str]:
    """Return a line for each error in nodes and edges.

    Args:
        ids: of all nodes.
        backward: ids of the nodes of the backward pass.
        edges: from producers to consumers.
    """
    known = set(ids)
    for id_, count in Counter(ids).items():
        if count > 1:
            yield f"node {id_}: {count} nodes have this id; ids must be unique"
    graph = nx.DiGraph()
    for source, target in edges:
        for end in (source, target):
            if end not in known:
                yield f"edge {source} -> {target}: there is no node {end}; correct the id"
        if source in backward and target in known and target not in backward:
            yield (
                f"edge {source} -> {target}: it leads from a backward node to a forward node; "
                "correct isBackwardNode or the edge"
            )
        graph.add_edge(source, target)
    if not nx.is_directed_acyclic_graph(graph):
        circle = [edge[0] for edge in nx.find_cycle(graph)]
        shown = " -> ".join(map(str, [*circle[:20], circle[0]]))
        yield f"edges: they form a cycle ({shown}); a node cannot wait for itself"
