"""The sets of devices that a point of fewer devices than the cluster has chooses among.

No rule is right for every model and network: sets grow from one device by taking the best connected
one, the fastest or the largest next. Each is planned for a short time, then the best goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.costs.roofline import layer_times
from planner.plan.problem import Problem

Floats = NDArray[np.float64]


def device_choices(problem: Problem, number: int) -> tuple[tuple[str, ...], ...]:
    """Return sets of so many devices worth planning for, each in file order.

    Three kinds, each set once:

    * around the best joined device of each type, always the device with the widest link to any of
      those taken; of equally wide ones the fastest;
    * always the fastest; of equally fast ones the one with the widest link to those taken;
    * always the one with most memory, then as before.

    Args:
        problem: with the whole cluster; speed is that at the whole model.
        number: of devices, at least 1 and at most as many as there are.
    """
    names = problem.cluster.device_names
    if number >= len(names):
        return (names,)
    sets = dict.fromkeys(tuple(sorted(taken)) for taken in _grown_sets(problem, number))
    return tuple(tuple(names[device] for device in taken) for taken in sets)


def _grown_sets(problem: Problem, number: int) -> Iterator[list[int]]:
    """Yield each set as the numbers of its devices in the file."""
    cluster, table = problem.cluster, problem.cluster.link_table
    with np.errstate(divide="ignore"):
        width = np.where(np.isfinite(table.s_per_byte), 1e-9 / table.s_per_byte, 0.0)
    np.fill_diagonal(width, 0.0)
    kinds = [device.type for device in cluster.devices]
    speed = {kind: _speed(problem, kind) for kind in dict.fromkeys(kinds)}
    figures = {
        "speed": np.array([speed[kind] for kind in kinds]),
        "memory": np.array([float(cluster.device_types[kind].capacity_bytes) for kind in kinds]),
    }
    # The sum of the widths from each device to the others that it is best connected to.
    best = -np.sort(-width, axis=1)[:, : max(1, number - 1)]
    first = figures | {"width": np.minimum(best, 1e15).sum(axis=1), "near": np.zeros(len(kinds))}

    def grown(order: Sequence[str], start: int) -> list[int]:
        taken = [start]
        while len(taken) < number:
            near = {"width": width[taken].max(axis=0), "near": -table.latency_s[taken].min(axis=0)}
            free = sorted(set(range(len(kinds))).difference(taken))
            taken.append(_best(figures | near, order, free))
        return taken

    for kind in speed:
        alike = [number for number, its in enumerate(kinds) if its == kind]
        yield grown(("width", "speed", "near"), _best(first, ("width",), alike))
    for order in (("speed", "width", "near"), ("memory", "speed", "width", "near")):
        yield grown(order, _best(first, order, range(len(kinds))))


def _best(figures: Mapping[str, Floats], order: Sequence[str], among: Sequence[int]) -> int:
    """Return the device with the lexicographically largest figures, the first of equal ones."""
    return max(among, key=lambda device: [figures[name][device] for name in order])


def _speed(problem: Problem, kind: str) -> float:
    """Return the layers a second of those that this type may run; 0 if it may run none."""
    device, precision = problem.cluster.device_types[kind], problem.job.precision
    layers = [row for row in problem.graph.on(kind).record.layers if row.may_run_on(kind)]
    times = [layer_times(layer, kind, device, precision) for layer in layers]
    return len(layers) / max(sum(time.forward_s + time.backward_s for time in times), 1e-15)
