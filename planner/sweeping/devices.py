"""Which of a cluster's devices a point of fewer devices may use.

No rule is right for every model and network, so a few are tried: sets that grow from one device by
taking the best joined one, the fastest or the largest next. :mod:`planner.sweeping.work` plans for
each of them for a short time and goes on with the one of the fastest plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.artifacts.cluster import Cluster
from planner.artifacts.problem import Problem
from planner.costs.roofline import layer_times

FloatArray = NDArray[np.float64]


class _Figures(NamedTuple):
    """Of all devices, by their numbers.

    ``width_gb_per_s`` and ``nearness_s`` (latency, negative) are between all pairs.
    """

    speed: FloatArray
    capacity_bytes: FloatArray
    width_gb_per_s: FloatArray
    nearness_s: FloatArray


_Rank = Callable[[_Figures, int, float, float], tuple[float, ...]]
"""What to take next, most first: of a device, its width and its nearness to those taken."""


def device_choices(problem: Problem, number: int) -> tuple[tuple[str, ...], ...]:
    """Sets of so many devices worth planning for, each in file order.

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


def part_of(cluster: Cluster, devices: tuple[str, ...]) -> Cluster:
    """A cluster with some of its devices only.

    Devices forward nothing, so the routes among those kept are as they were.
    """
    gone = set(cluster.device_names) - set(devices)
    if not gone:
        return cluster
    return cluster.model_copy(
        update={
            "devices": tuple(row for row in cluster.devices if row.name not in gone),
            "links": tuple(link for link in cluster.links if gone.isdisjoint(link.between)),
        }
    )


def _grown_sets(problem: Problem, number: int) -> Iterator[list[int]]:
    cluster, figures = problem.cluster, _figures(problem)
    # Of each device to the best joined others.
    best = -np.sort(-figures.width_gb_per_s, axis=1)[:, : max(1, number - 1)]
    joined = np.minimum(best, 1e15).sum(axis=1)
    for kind in dict.fromkeys(device.type for device in cluster.devices):
        own = [index for index, row in enumerate(cluster.devices) if row.type == kind]
        yield _grow(figures, max(own, key=lambda d: float(joined[d])), number, _best_joined)
    for rank in (_fastest, _largest):
        start = max(range(len(joined)), key=lambda d: rank(figures, d, float(joined[d]), 0.0))
        yield _grow(figures, start, number, rank)


def _grow(figures: _Figures, start: int, number: int, rank: _Rank) -> list[int]:
    """Of equally good devices the first in the file."""
    taken, left = [start], [d for d in range(len(figures.speed)) if d != start]
    width, nearness = figures.width_gb_per_s[start].copy(), figures.nearness_s[start].copy()
    while len(taken) < number:
        found = max(left, key=lambda d: rank(figures, d, float(width[d]), float(nearness[d])))
        left.remove(found)
        taken.append(found)
        np.maximum(width, figures.width_gb_per_s[found], out=width)
        np.maximum(nearness, figures.nearness_s[found], out=nearness)
    return taken


def _best_joined(figures: _Figures, device: int, width: float, near: float) -> tuple[float, ...]:
    return width, float(figures.speed[device]), near


def _fastest(figures: _Figures, device: int, width: float, near: float) -> tuple[float, ...]:
    return float(figures.speed[device]), width, near


def _largest(figures: _Figures, device: int, width: float, near: float) -> tuple[float, ...]:
    speed = float(figures.speed[device])
    return float(figures.capacity_bytes[device]), speed, width, near


def _figures(problem: Problem) -> _Figures:
    cluster, table = problem.cluster, problem.cluster.link_table
    names = cluster.device_names
    speeds = {kind: _speed(problem, kind) for kind in {row.type for row in cluster.devices}}
    with np.errstate(divide="ignore"):
        width = np.where(np.isfinite(table.s_per_byte), 1e-9 / table.s_per_byte, 0.0)
    np.fill_diagonal(width, 0.0)
    return _Figures(
        speed=np.array([speeds[cluster.type_of(name)] for name in names]),
        capacity_bytes=np.array([float(cluster.device_type(n).capacity_bytes) for n in names]),
        width_gb_per_s=width,
        nearness_s=-table.latency_s,
    )


def _speed(problem: Problem, kind: str) -> float:
    """Layers a second, of those that this type may run; a type that may run none has no speed."""
    device, precision = problem.cluster.device_types[kind], problem.job.precision
    layers = [layer for layer in problem.graph.record.layers if layer.may_run_on(kind)]
    seconds = 0.0
    for layer in layers:
        times = layer_times(layer, kind, device, precision)
        seconds += times.forward_s + times.backward_s
    return len(layers) / max(seconds, 1e-15)
