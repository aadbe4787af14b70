"""Placements by brute force, from the words of the paper and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from benchmarks.placement.solver.instance import LoadInstance


def best_load(instance: LoadInstance, *, contiguous: bool) -> float | None:
    """The least largest load over all placements; None if none is valid."""
    loads = [
        max(load_of(instance, placement, device) for device in range(len(instance.devices)))
        for placement in placements(instance)
        if is_allowed(instance, placement) and (not contiguous or has_order(instance, placement))
    ]
    return min(loads, default=None)


def placements(instance: LoadInstance) -> Iterator[tuple[int, ...]]:
    """Every placement that keeps colours together."""
    colors = [node.color if node.color is not None else f"own {node.id}" for node in instance.nodes]
    distinct = list(dict.fromkeys(colors))
    for chosen in product(range(len(instance.devices)), repeat=len(distinct)):
        device = dict(zip(distinct, chosen, strict=True))
        yield tuple(device[color] for color in colors)


def load_of(instance: LoadInstance, placement: Sequence[int], device: int) -> float:
    """One device's load: it asks of every node whether its output crosses the border."""
    kind = instance.devices[device]
    inside = {n.id for n, d in zip(instance.nodes, placement, strict=True) if d == device}
    load = sum(node.times[kind] for node in instance.nodes if node.id in inside)
    if not instance.classes[kind].pays_transfers:
        return load
    for node in instance.nodes:
        users = [target for source, target in instance.edges if source == node.id]
        if any((user in inside) != (node.id in inside) for user in users):
            load += node.transfer_time
    return load


def is_allowed(instance: LoadInstance, placement: Sequence[int]) -> bool:
    """Memory and permissions."""
    for device, kind in enumerate(instance.devices):
        held = [n for n, d in zip(instance.nodes, placement, strict=True) if d == device]
        limit = instance.classes[kind].memory_bytes
        if limit is not None and sum(node.memory_bytes for node in held) > limit:
            return False
        if not all(node.allowed[kind] for node in held):
            return False
    return True


def has_order(instance: LoadInstance, placement: Sequence[int]) -> bool:
    """Whether some order of the devices lets no forward edge go back.

    A colour of backward nodes alone is ordered by their edges the other way round.
    """
    of = {node.id: index for index, node in enumerate(instance.nodes)}
    forward = {n.color for n in instance.nodes if not n.is_backward and n.color is not None}
    pairs = []
    for source, target in instance.edges:
        ends = [instance.nodes[of[source]], instance.nodes[of[target]]]
        devices = (placement[of[source]], placement[of[target]])
        if not ends[0].is_backward and not ends[1].is_backward:
            pairs.append(devices)
        elif all(end.is_backward for end in ends) and any(e.color not in forward for e in ends):
            pairs.append(devices[::-1])
    return any(
        all(order.index(first) <= order.index(second) for first, second in pairs)
        for order in permutations(range(len(instance.devices)))
    )
