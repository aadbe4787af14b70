"""The instance in whole numbers, with nodes that must share a device merged into blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, frexp, fsum, inf, ldexp, ulp

import networkx as nx
import numpy as np

from benchmarks.placement.solver.instance import DeviceClass, LoadInstance

TOTAL_BITS = 46
"""All times together stay below 2**46 steps: their sums are exact in int64 and in float64."""
UNLIMITED = 2**52


@dataclass(frozen=True)
class Net:
    """A producer with its consumers, or several with the same blocks.

    Every device that holds some but not all of its pins pays its cost.

    Attributes:
        pins: the blocks, ascending, at least two.
        cost: of one transfer, in steps.
    """

    pins: tuple[int, ...]
    cost: int


@dataclass(frozen=True)
class Blocks:
    """A placement problem on blocks.

    Attributes:
        members: the nodes of every block, by position in the instance.
        times: ``[class][block]`` in steps, rounded down.
        allowed: ``[class][block]``.
        memory: of every block in the unit of ``limits``, rounded up.
        limits: memory of a device of each class.
        nets: what transfers may cost.
        precedences: pairs of blocks of which the first may not be in a later stage; none unless
            stages are to be contiguous.
        classes: the kinds of devices; their counts at most the number of nodes.
        step: the unit of time; a figure in steps is at most ``step`` below each time it stands for.
    """

    members: tuple[tuple[int, ...], ...]
    times: tuple[tuple[int, ...], ...]
    allowed: tuple[tuple[bool, ...], ...]
    memory: tuple[int, ...]
    limits: tuple[int, ...]
    nets: tuple[Net, ...]
    precedences: frozenset[tuple[int, int]]
    classes: tuple[DeviceClass, ...]
    step: float

    @property
    def size(self) -> int:
        """The number of blocks."""
        return len(self.members)

    @cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """The nets of every block."""
        found: list[list[int]] = [[] for _ in self.members]
        for number, net in enumerate(self.nets):
            for pin in net.pins:
                found[pin].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The blocks that may not be in an earlier stage, by block."""
        found: list[list[int]] = [[] for _ in self.members]
        for before, after in sorted(self.precedences):
            found[before].append(after)
        return tuple(map(tuple, found))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The blocks that may not be in a later stage, by block."""
        found: list[list[int]] = [[] for _ in self.members]
        for before, after in sorted(self.precedences):
            found[after].append(before)
        return tuple(map(tuple, found))

    def joined(self, pairs: Iterable[tuple[int, int]]) -> Blocks:
        """These blocks with each pair in one block, and with the circles that this closes."""
        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.size))
        graph.add_edges_from(self.precedences)
        for first, second in pairs:
            graph.add_edges_from(((first, second), (second, first)))
        parts = sorted(sorted(part) for part in nx.strongly_connected_components(graph))
        block_of = {block: number for number, part in enumerate(parts) for block in part}
        return Blocks(
            members=tuple(
                tuple(sorted(node for block in part for node in self.members[block]))
                for part in parts
            ),
            times=tuple(tuple(sum(row[b] for b in part) for part in parts) for row in self.times),
            allowed=tuple(
                tuple(all(row[b] for b in part) for part in parts) for row in self.allowed
            ),
            memory=tuple(sum(self.memory[b] for b in part) for part in parts),
            limits=self.limits,
            nets=join_nets(
                (tuple(block_of[pin] for pin in net.pins), net.cost) for net in self.nets
            ),
            precedences=frozenset(
                (block_of[first], block_of[second])
                for first, second in self.precedences
                if block_of[first] != block_of[second]
            ),
            classes=self.classes,
            step=self.step,
        )

    def spread(self, devices: Iterable[int]) -> tuple[int, ...]:
        """The device of every node, from that of every block."""
        of_node = {
            node: int(device)
            for members, device in zip(self.members, devices, strict=True)
            for node in members
        }
        return tuple(of_node[node] for node in range(len(of_node)))

    def gathered(self, assignment: Iterable[int]) -> tuple[int, ...] | None:
        """The device of every block, from that of every node; None if a block is torn."""
        of_node = tuple(assignment)
        devices = [{of_node[node] for node in members} for members in self.members]
        if any(len(found) > 1 for found in devices):
            return None
        return tuple(found.pop() for found in devices)


def join_nets(found: Iterable[tuple[Iterable[int], int]]) -> tuple[Net, ...]:
    """Nets of at least two pins and a cost, those with the same pins added up."""
    costs: dict[tuple[int, ...], int] = {}
    for pins, cost in found:
        key = tuple(sorted(set(pins)))
        if len(key) > 1 and cost > 0:
            costs[key] = costs.get(key, 0) + cost
    return tuple(Net(pins, cost) for pins, cost in sorted(costs.items()))


def step_of(instance: LoadInstance) -> float:
    """A power of two such that all times and transfers together stay below 2**46 steps."""
    total = fsum(max(node.times) + node.transfer_time for node in instance.nodes)
    return max(ldexp(1.0, frexp(total)[1] - TOTAL_BITS), ulp(0.0)) if total > 0 else 1.0


def make_blocks(
    instance: LoadInstance,
    group: Sequence[int],
    precedences: Iterable[tuple[int, int]],
) -> Blocks:
    """Blocks from groups of nodes.

    Args:
        instance: the graph.
        group: the block of every node, by position; blocks are numbered from 0.
        precedences: pairs of blocks; pairs of the same block are left out.
    """
    members: list[list[int]] = [[] for _ in range(max(group) + 1)]
    for node in range(len(instance.nodes)):
        members[group[node]].append(node)
    step = step_of(instance)
    memory, limits = _memory_units(instance)
    return Blocks(
        members=tuple(map(tuple, members)),
        times=tuple(
            tuple(sum(floor(instance.nodes[n].times[c] / step) for n in part) for part in members)
            for c in range(len(instance.classes))
        ),
        allowed=tuple(
            tuple(all(instance.nodes[n].allowed[c] for n in part) for part in members)
            for c in range(len(instance.classes))
        ),
        memory=tuple(sum(memory[n] for n in part) for part in members),
        limits=limits,
        nets=join_nets(_nets(instance, group, step)),
        precedences=frozenset((a, b) for a, b in precedences if a != b),
        classes=tuple(
            replace(kind, count=min(kind.count, len(instance.nodes))) for kind in instance.classes
        ),
        step=step,
    )


def _nets(
    instance: LoadInstance, group: Sequence[int], step: float
) -> Iterable[tuple[set[int], int]]:
    pins: dict[int, set[int]] = {}
    for source, target in instance.edges:
        producer = instance.position[source]
        pins.setdefault(producer, {group[producer]}).add(group[instance.position[target]])
    for producer, blocks in sorted(pins.items()):
        yield blocks, floor(instance.nodes[producer].transfer_time / step)


def _memory_units(instance: LoadInstance) -> tuple[list[int], tuple[int, ...]]:
    """Memory in whole units: bytes, unless all of it would overflow 52 bits.

    Sizes are rounded up and limits down, so no device is ever overfilled; nothing is rounded
    where sizes are whole bytes, as they are in every file of the authors. Where all nodes fit on
    any one device, they take nothing.
    """
    total = fsum(node.memory_bytes for node in instance.nodes)
    unit = ldexp(1.0, max(0, frexp(total)[1] - 52))
    sizes = [-floor(-node.memory_bytes / unit) for node in instance.nodes]
    limits = [inf if kind.memory_bytes is None else kind.memory_bytes for kind in instance.classes]
    if total <= min(limits):
        sizes = [0] * len(sizes)
    return sizes, tuple(UNLIMITED if x >= UNLIMITED * unit else floor(x / unit) for x in limits)


def block_loads(blocks: Blocks, devices: np.ndarray) -> np.ndarray:
    """The load of every device in steps.

    Args:
        blocks: the problem.
        devices: the device of every block, shape ``(blocks,)``.
    """
    kinds = [number for number, kind in enumerate(blocks.classes) for _ in range(kind.count)]
    loads = np.zeros(len(kinds), dtype=np.int64)
    for block, device in enumerate(devices):
        loads[device] += blocks.times[kinds[device]][block]
    for net in blocks.nets:
        touched = {int(devices[pin]) for pin in net.pins}
        if len(touched) > 1:
            for device in touched:
                if blocks.classes[kinds[device]].pays_transfers:
                    loads[device] += net.cost
    return loads
