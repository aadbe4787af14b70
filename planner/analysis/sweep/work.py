"""The work of one point: the same function on this machine and on any other.

A point of fewer devices than the cluster has chooses among a few sets of them, since no rule is
right for every model and network: sets that grow from one device by taking the best connected one,
the fastest or the largest next. Each is planned for a short time, then the best goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
"""Share of a point's time to plan for all sets of devices where there are several."""

FloatArray = NDArray[np.float64]


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


def solve_task(task: Task) -> tuple[SweptPoint, Plan | None]:
    """Solve a point; where no plan fits, the result says why.

    Raises:
        KeyboardInterrupt: on Ctrl-C; the result of an interrupted search is not used.
    """
    point = task.point._asdict()
    try:
        result = _solve(task)
    except PipeplanError as error:
        return SweptPoint(**point, reason="; ".join(error.problems)), None
    plan = result.plan
    found = SweptPoint(
        **point,
        plan=task.point.plan_name,
        iteration_time_s=result.iteration_time_s,
        lower_bound_s=result.lower_bound_s,
        chosen=plan.cluster.device_names,
        used=plan.rank_devices,
        degree=plan.degrees[0] if len(plan.degrees) == 1 else plan.degrees,
    )
    return found, plan


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
    found = []
    for problem in problems:
        try:
            found.append(_search(task, problem, CHOICE_SHARE / len(problems)))
        except InfeasibleError:
            continue
    if not found:
        # The last set has the most memory.
        return _search(task, problems[-1], 1 - CHOICE_SHARE)
    first = min(found, key=lambda result: result.iteration_time_s)
    if first.ended in ("proved", "gap limit"):
        return first
    return _search(task, first.plan.single_device_problem, 1 - CHOICE_SHARE, [first.plan])


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


def _search(task: Task, problem: Problem, share: float, warm_starts: Sequence[Plan] = ()) -> Result:
    settings = dict(task.settings)
    settings["time_limit_s"] *= share
    result = solve(problem, warm_starts=warm_starts, workers=task.workers, **settings)
    if result.ended == "interrupted":
        raise KeyboardInterrupt
    return result


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
    """Yield each set as the indices of its devices in the file."""
    cluster, table = problem.cluster, problem.cluster.link_table
    with np.errstate(divide="ignore"):
        width = np.where(np.isfinite(table.s_per_byte), 1e-9 / table.s_per_byte, 0.0)
    np.fill_diagonal(width, 0.0)
    near = -table.latency_s
    types = np.array([device.type for device in cluster.devices])
    speeds = {kind: _speed(problem, kind) for kind in dict.fromkeys(types.tolist())}
    figures = {
        "speed": np.array([speeds[kind] for kind in types]),
        "memory": np.array(
            [float(cluster.device_type(n).capacity_bytes) for n in cluster.device_names]
        ),
    }
    # The sum of the widths from each device to the others that it is best connected to.
    best = -np.sort(-width, axis=1)[:, : max(1, number - 1)]
    joined = figures | {"width": np.minimum(best, 1e15).sum(axis=1), "near": np.zeros(len(types))}
    for kind in speeds:
        start = _best({"width": np.where(types == kind, joined["width"], -np.inf)}, ("width",))
        yield _grow(figures, width, near, start, number, ("width", "speed", "near"))
    for order in (("speed", "width", "near"), ("memory", "speed", "width", "near")):
        yield _grow(figures, width, near, _best(joined, order), number, order)


def _grow(
    figures: Mapping[str, FloatArray],
    width: FloatArray,
    near: FloatArray,
    start: int,
    number: int,
    order: tuple[str, ...],
) -> list[int]:
    """Grow a set from one device, always by the device that is best in the figures of an order.

    Args:
        figures: ``speed`` and ``memory`` of each device.
        width: GB/s between all pairs of devices.
        near: latency in s between all pairs, negative.
        start: index of the first device.
        number: of devices.
        order: names of figures, the most important first; ``width`` and ``near`` are those to the
            best connected device that was taken.
    """
    taken = [start]
    while len(taken) < number:
        to_taken = {"width": width[taken].max(axis=0), "near": near[taken].max(axis=0)}
        columns = {**figures, **to_taken}
        columns[order[0]] = columns[order[0]].copy()
        columns[order[0]][taken] = -np.inf
        taken.append(_best(columns, order))
    return taken


def _best(figures: Mapping[str, FloatArray], order: tuple[str, ...]) -> int:
    """Return the device with the lexicographically largest figures, the first of equal ones."""
    return int(np.lexsort([-figures[name] for name in reversed(order)])[0])


def _speed(problem: Problem, kind: str) -> float:
    """Return the layers a second of those that this type may run; 0 if it may run none."""
    device, precision = problem.cluster.device_types[kind], problem.job.precision
    layers = [row for row in problem.graph.on(kind).record.layers if row.may_run_on(kind)]
    times = [layer_times(layer, kind, device, precision) for layer in layers]
    return len(layers) / max(sum(time.forward_s + time.backward_s for time in times), 1e-15)
