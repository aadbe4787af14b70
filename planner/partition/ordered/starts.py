"""Orders to start from, and the units in which large clusters are handed out."""

from __future__ import annotations

from collections.abc import Iterator

from planner.partition.chain import Chain
from planner.partition.device_orders import device_orders
from planner.partition.ordered.program import Order, Unit

MAX_UNITS = 128
"""Programs over more take too long; then neighbours in a group stay together."""
MAX_REPLICA_CHOICES = 16
"""Beyond this many units only some numbers of replicas are tried."""


def first_orders(chain: Chain) -> Iterator[Order]:
    """Distinct orders worth trying, in units, each worked out when it is asked for."""
    cluster = chain.problem.cluster
    seconds = dict(zip(chain.types, chain.work_s.sum(axis=1).tolist(), strict=True))
    size = unit_size(chain)
    found: dict[Order, None] = {}
    for names in device_orders(cluster, seconds):
        order = _units(chain, [cluster.numbers[name] for name in names], size)
        if order not in found:
            found[order] = None
            yield order
    last = interleaved(chain, next(iter(found)))
    if last not in found:
        yield last


def interleaved(chain: Chain, order: Order) -> Order:
    """The types spread evenly, so that stages with replicas have some of each.

    A microbatch's way through such stages is that of their fastest replicas.
    """
    cluster = chain.problem.cluster
    by_type: dict[str, list[Unit]] = {}
    for unit in order:
        by_type.setdefault(cluster.type_of(cluster.device_names[unit[0]]), []).append(unit)
    places = [
        ((number + 0.5) / len(units), unit)
        for units in by_type.values()
        for number, unit in enumerate(units)
    ]
    return tuple(unit for _, unit in sorted(places))


def unit_size(chain: Chain) -> int:
    """Devices in a unit: 1 for up to MAX_UNITS devices."""
    count = len(chain.problem.cluster.devices)
    return -(-count // MAX_UNITS) if chain.problem.job.replication else 1


def _units(chain: Chain, numbers: list[int], size: int) -> Order:
    """Runs of up to ``size`` devices of one group and type."""
    if size == 1:
        return tuple((number,) for number in numbers)
    cluster = chain.problem.cluster
    groups = cluster.link_table.groups
    units: list[Unit] = []
    home: object = None
    for number in numbers:
        kind = cluster.type_of(cluster.device_names[number])
        place = (kind, None if groups is None else int(groups.of[number]))
        if units and place == home and len(units[-1]) < size:
            units[-1] = (*units[-1], number)
        else:
            units.append((number,))
        home = place
    return tuple(units)


def replica_choices(chain: Chain) -> list[int]:
    """Numbers of units a stage may take."""
    if not chain.problem.job.replication:
        return [1]
    size = unit_size(chain)
    count = -(-len(chain.problem.cluster.devices) // size)
    microbatches = chain.problem.job.microbatches
    useful = [r for r in range(1, count + 1) if _is_useful(r * size, microbatches, size)]
    if count <= MAX_REPLICA_CHOICES:
        return useful
    # Steps of a quarter: 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, …
    kept = [1]
    for choice in useful:
        if choice >= min(kept[-1] + 1, kept[-1] * 5 // 4 + 1) and choice > kept[-1]:
            kept.append(choice)
    return kept


def _is_useful(replicas: int, microbatches: int, size: int) -> bool:
    """Whether one unit less would have the most loaded replica run more microbatches."""
    if replicas <= size:
        return True
    return -(-microbatches // replicas) < -(-microbatches // (replicas - size))
