"""Cost and validity of an assignment, straight from the definition.

It shares no code with the solvers, and every answer passes it before it is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import fsum

import networkx as nx

from benchmarks.placement.solver.instance import LoadInstance

Assignment = Sequence[int]
"""The device of every node, by the node's position in the instance."""


def device_loads(instance: LoadInstance, assignment: Assignment) -> tuple[float, ...]:
    """Return the load of every device, in the instance's unit of time.

    Its nodes' times, plus, where the class pays for transfers, the transfer time of every node
    with an edge that crosses the device's border, once a node, whichever side the node is on
    (Tarnawski et al. 2020, section 3; the authors' ``throughput-ip/ip.py`` counts the same).
    """
    parts: list[list[float]] = [[] for _ in instance.devices]
    for node, device in zip(instance.nodes, assignment, strict=True):
        parts[device].append(node.times[instance.devices[device]])
    touched: dict[int, set[int]] = {}
    for source, target in instance.edges:
        ends = {assignment[instance.position[source]], assignment[instance.position[target]]}
        if len(ends) == 2:
            touched.setdefault(source, set()).update(ends)
    for source, devices in touched.items():
        for device in devices:
            if instance.classes[instance.devices[device]].pays_transfers:
                parts[device].append(instance.nodes[instance.position[source]].transfer_time)
    return tuple(fsum(part) for part in parts)


def objective(instance: LoadInstance, assignment: Assignment) -> float:
    """The largest load."""
    return max(device_loads(instance, assignment))


def assignment_problems(
    instance: LoadInstance, assignment: Assignment, *, contiguous: bool
) -> Iterator[str]:
    """Return a line for each rule that an assignment breaks; empty if it is valid.

    Args:
        instance: the graph and the devices.
        assignment: the device of every node.
        contiguous: whether the devices must have an order in which no forward edge goes back:
            see :func:`stage_order`.
    """
    if len(assignment) != len(instance.nodes):
        yield f"it places {len(assignment)} nodes, the graph has {len(instance.nodes)}"
        return
    wrong = [device for device in assignment if not 0 <= device < len(instance.devices)]
    if wrong:
        yield f"there is no device {wrong[0]}"
        return
    yield from _device_rules(instance, assignment)
    yield from _colors(instance, assignment)
    if contiguous and not nx.is_directed_acyclic_graph(stage_order(instance, assignment)):
        yield "the devices wait for each other in a circle: the stages are not contiguous"


def _device_rules(instance: LoadInstance, assignment: Assignment) -> Iterator[str]:
    held: list[list[float]] = [[] for _ in instance.devices]
    for node, device in zip(instance.nodes, assignment, strict=True):
        held[device].append(node.memory_bytes)
        if not node.allowed[instance.devices[device]]:
            kind = instance.classes[instance.devices[device]]
            yield f"node {node.id} cannot run on device {device} ({kind.name})"
    for device, sizes in enumerate(held):
        limit = instance.classes[instance.devices[device]].memory_bytes
        if limit is not None and fsum(sizes) > limit:
            yield f"device {device} holds {fsum(sizes)} bytes, it has {limit}"


def _colors(instance: LoadInstance, assignment: Assignment) -> Iterator[str]:
    home: dict[int, int] = {}
    for node, device in zip(instance.nodes, assignment, strict=True):
        if node.color is not None and home.setdefault(node.color, device) != device:
            yield f"node {node.id} is not with the others of its colour {node.color}"


def stage_order(instance: LoadInstance, assignment: Assignment) -> nx.DiGraph:
    """Return which device precedes which, as the authors' dynamic program orders them.

    Only the forward pass counts; a backward node goes where its colour goes. A colour without any
    forward node is ordered by its backward edges, turned round (``createArtificialForwardNodes``
    of the authors' ``throughput-dp/dp.cpp``).
    """
    forward_colors = {node.color for node in instance.nodes if not node.is_backward}
    order = nx.DiGraph()
    order.add_nodes_from(range(len(instance.devices)))
    for source, target in instance.edges:
        ends = [instance.position[source], instance.position[target]]
        nodes = [instance.nodes[end] for end in ends]
        if all(node.is_backward for node in nodes):
            orphans = [node.color is None or node.color not in forward_colors for node in nodes]
            ends = ends[::-1] if any(orphans) else []
        elif any(node.is_backward for node in nodes):
            ends = []
        if ends and assignment[ends[0]] != assignment[ends[1]]:
            order.add_edge(assignment[ends[0]], assignment[ends[1]])
    return order
