"""The work of one point: the same function on this machine and on any other.

A point of fewer devices than the cluster has chooses among a few sets of them, since no rule is
right for every model and network: sets that grow from one device by taking the best connected one,
the fastest or the largest next. Each is planned for a short time, then the best goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cluster.group_packing import packed
from planner.costs.roofline import layer_times
from planner.errors import InfeasibleError, PipeplanError
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.sweep_index import Point, SweepSettings, SweptPoint
from planner.search.result import Result
from planner.search.solve import solve
from planner.units import plural
from planner.variants.problems import restricted_to

CHOICE_SHARE = 0.3
"""Share of a point's time to plan for each set of devices where there are several."""


@dataclass(frozen=True)
class Task:
    """A point to solve.

    Attributes:
        point: which.
        problem: with the whole cluster.
        settings: of the search.
        workers: threads of the solver.
    """

    point: Point
    problem: Problem
    settings: SweepSettings
    workers: int


@dataclass(frozen=True)
class PointOutcome:
    """The result of a point, and the plan if there is one."""

    found: SweptPoint
    plan: Plan | None


def solve_task(task: Task) -> PointOutcome:
    """Solve a point; where no plan fits, the outcome says why.

    Raises:
        KeyboardInterrupt: on Ctrl-C; a search that was cut short counts for nothing.
    """
    try:
        result = _solve(task)
    except PipeplanError as error:
        return PointOutcome(without_plan(task.point, "; ".join(error.problems)), None)
    plan = result.plan
    found = SweptPoint(
        **task.point._asdict(),
        plan=task.point.plan_name,
        iteration_time_s=result.iteration_time_s,
        lower_bound_s=result.lower_bound_s,
        chosen=plan.cluster.device_names,
        used=plan.rank_devices,
        degree=plan.degrees[0] if len(plan.degrees) == 1 else plan.degrees,
    )
    return PointOutcome(found, plan)


def without_plan(point: Point, reason: str) -> SweptPoint:
    """Return a point that has no plan."""
    return SweptPoint(**point._asdict(), reason=reason)


def _solve(task: Task) -> Result:
    """Solve on the devices of the fastest plan found in a short time, or all if there is no choice.

    Raises:
        PipeplanError: if no plan fits.
    """
    have = len(task.problem.cluster.devices)
    if task.point.devices > have:
        raise InfeasibleError(f"the cluster has only {plural(have, 'device')}")
    problems = _possible(task)
    if len(problems) == 1:
        return _search(task, problems[0], 1.0)
    first = _fastest(task, problems)
    rest = 1 - CHOICE_SHARE
    if first is None:
        # The last one has most memory.
        return _search(task, problems[-1], rest)
    if first.ended in ("proved", "gap limit"):
        return first
    return _search(task, first.plan.single_device_problem, rest, [first.plan])


def _possible(task: Task) -> list[Problem]:
    """Return the restricted problems whose devices can run every layer and form its groups."""
    found, reasons = [], []
    degree = task.problem.job.tensor_parallel
    for devices in device_choices(task.problem, task.point.devices):
        try:
            problem = restricted_to(task.problem, devices)
            if degree not in (1, "any"):
                packed(problem.cluster, int(degree))
        except PipeplanError as error:
            reasons.append(error)
        else:
            found.append(problem)
    if not found:
        raise reasons[-1]
    return found


def _fastest(task: Task, problems: Sequence[Problem]) -> Result | None:
    """Return the fastest result of short searches; None if none found a plan."""
    found = []
    for problem in problems:
        try:
            found.append(_search(task, problem, CHOICE_SHARE / len(problems)))
        except InfeasibleError:
            continue
    return min(found, key=lambda result: result.iteration_time_s) if found else None


def _search(task: Task, problem: Problem, share: float, warm_starts: Sequence[Plan] = ()) -> Result:
    settings = task.settings
    search = partial(solve, problem, warm_starts=warm_starts, workers=task.workers)
    result = search(
        time_limit_s=settings.time_limit_s * share,
        gap_limit=settings.gap_limit,
        seed=settings.seed,
        deterministic=settings.deterministic,
    )
    if result.ended == "interrupted":
        raise KeyboardInterrupt
    return result


FloatArray = NDArray[np.float64]


class _Figures(NamedTuple):
    """Figures of all devices, by their numbers.

    ``width_gb_per_s`` and ``nearness_s`` (latency, negative) are between all pairs.
    """

    speed: FloatArray
    capacity_bytes: FloatArray
    width_gb_per_s: FloatArray
    nearness_s: FloatArray


_Rank = Callable[[_Figures, int, float, float], tuple[float, ...]]
"""The rank of a device to take next, given its width and nearness to those taken; largest first."""


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
    cluster, figures = problem.cluster, _figures(problem)
    # The widths from each device to the best connected others.
    best = -np.sort(-figures.width_gb_per_s, axis=1)[:, : max(1, number - 1)]
    joined = np.minimum(best, 1e15).sum(axis=1)
    for kind in dict.fromkeys(device.type for device in cluster.devices):
        own = [index for index, row in enumerate(cluster.devices) if row.type == kind]
        yield _grow(figures, max(own, key=lambda d: float(joined[d])), number, _rank_by_width)
    for rank in (_rank_by_speed, _rank_by_memory):
        start = max(range(len(joined)), key=lambda d: rank(figures, d, float(joined[d]), 0.0))
        yield _grow(figures, start, number, rank)


def _grow(figures: _Figures, start: int, number: int, rank: _Rank) -> list[int]:
    """Grow a set from one device; of equally good devices the first in the file is taken."""
    taken, left = [start], [d for d in range(len(figures.speed)) if d != start]
    width, nearness = figures.width_gb_per_s[start].copy(), figures.nearness_s[start].copy()
    while len(taken) < number:
        found = max(left, key=lambda d: rank(figures, d, float(width[d]), float(nearness[d])))
        left.remove(found)
        taken.append(found)
        np.maximum(width, figures.width_gb_per_s[found], out=width)
        np.maximum(nearness, figures.nearness_s[found], out=nearness)
    return taken


def _rank_by_width(figures: _Figures, device: int, width: float, near: float) -> tuple[float, ...]:
    return width, float(figures.speed[device]), near


def _rank_by_speed(figures: _Figures, device: int, width: float, near: float) -> tuple[float, ...]:
    return float(figures.speed[device]), width, near


def _rank_by_memory(figures: _Figures, device: int, width: float, near: float) -> tuple[float, ...]:
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
    """Return the layers a second of those that this type may run; 0 if it may run none."""
    device, precision = problem.cluster.device_types[kind], problem.job.precision
    layers = [row for row in problem.graph.on(kind).record.layers if row.may_run_on(kind)]
    seconds = 0.0
    for layer in layers:
        times = layer_times(layer, kind, device, precision)
        seconds += times.forward_s + times.backward_s
    return len(layers) / max(seconds, 1e-15)
