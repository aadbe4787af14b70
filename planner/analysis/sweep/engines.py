"""How points are solved: one after the other in this process, or on the machines of a Ray cluster.

Ray (https://docs.ray.io) is an optional extra.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from planner.analysis.sweep.devices import device_choices
from planner.analysis.sweep.points import Point
from planner.cluster.group_packing import packed
from planner.errors import InfeasibleError, PipeplanError
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.search.result import Result
from planner.search.settings import DEFAULT_WORKERS, check_settings
from planner.search.solve import solve
from planner.units import plural
from planner.variants.problems import restricted_to

CHOICE_SHARE = 0.3
"""Share of a point's time to plan for all sets of devices where there are several."""
MOST_WORKERS = 8
"""All that CP-SAT's strategies make use of."""
CONNECT_S = 10.0
"""How long a Ray cluster may take to accept a connection."""
IN_FLIGHT = 2
"""Tasks given to Ray for each that can run at once, so that no machine waits."""


@dataclass(frozen=True)
class Limits:
    """The settings of every point's search, see :func:`planner.search.solve.solve`.

    Raises:
        PipeplanError: naming what is out of range; the time limit is finite.
    """

    time_limit_s: float
    seed: int
    deterministic: bool

    def __post_init__(self) -> None:
        check_settings(self.time_limit_s, 0.0, self.seed, 1)
        if not math.isfinite(self.time_limit_s):
            raise PipeplanError(
                f"time_limit_s: {self.time_limit_s} is not a finite number of seconds; give a "
                "limit for each point, such as 10"
            )


@dataclass(frozen=True)
class Task:
    """A point to solve, its problem with the whole cluster, and the settings of the search."""

    point: Point
    problem: Problem
    limits: Limits


Outcomes = Generator[tuple[Point, Plan | str], None, None]
"""Points with their plans, or the reasons why there are none."""


def in_turn(tasks: Sequence[Task]) -> Outcomes:
    """Yield the outcome of one task after the other."""
    for task in tasks:
        yield solved(task, 1 if task.limits.deterministic else DEFAULT_WORKERS)


def on_ray(tasks: Sequence[Task], address: str) -> Outcomes:
    """Solve points as tasks of a Ray cluster, each on as many cores as the solver has threads.

    Pipeplan has to be installed on its machines, in the version that is here; the model does not:
    layer graphs travel with the tasks. A Ray that the program started itself is used as it is;
    otherwise the connection is closed at the end, and tasks that still run are ended.

    Args:
        tasks: to solve.
        address: ``auto`` for the cluster this machine belongs to, ``local`` to start one here,
            ``ray://HOST:PORT`` or ``HOST:PORT`` for another.

    Yields:
        Outcomes in the order in which the tasks end.

    Raises:
        PipeplanError: if Ray is not installed, there is no cluster, or a task was lost with its
            machine.
    """
    ray = _require_ray()
    is_own = not ray.is_initialized()
    if is_own:
        _connect(ray, address)
    cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    is_one = any(task.limits.deterministic for task in tasks)
    workers = 1 if is_one else max(1, min(MOST_WORKERS, int(max(cores, default=0))))
    remote = ray.remote(solved).options(num_cpus=workers)
    waiting, running = [*reversed(tasks)], list[Any]()
    try:
        while waiting or running:
            # Machines may join meanwhile.
            room = IN_FLIGHT * int(ray.cluster_resources().get("CPU", 0) // workers)
            while waiting and len(running) < max(1, room):
                running.append(remote.remote(waiting.pop(), workers))
            done, running = ray.wait(running)
            yield ray.get(done[0])
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
    except ray.exceptions.RayError as error:
        raise PipeplanError(
            f"Ray lost a point ({type(error).__name__}: {error}); what was found is kept: run "
            "the sweep again"
        ) from None
    finally:
        for task in running:
            ray.cancel(task, force=True)
        if is_own:
            ray.shutdown()


def _require_ray() -> Any:
    try:
        return import_module("ray")
    except ModuleNotFoundError:
        raise PipeplanError(
            'ray: it is not installed; pip install "pipeplan[ray]", or leave ray out'
        ) from None


def _connect(ray: Any, address: str) -> None:
    # A cluster that is started here sends no usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():
            # Ray itself waits for minutes if nothing listens there.
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise PipeplanError(
            f"ray: no cluster at {address!r} ({reason}); start one with `ray start --head`, or "
            "give 'local' to start one on this machine"
        ) from None


# --- one point, here or on any other machine ------------------------------------------------------


def solved(task: Task, workers: int) -> tuple[Point, Plan | str]:
    """Solve a point; where no plan fits, the outcome says why.

    Raises:
        KeyboardInterrupt: on Ctrl-C; the result of an interrupted search is not used.
    """
    try:
        return task.point, _solve(task, workers).plan
    except PipeplanError as error:
        return task.point, "; ".join(error.problems)


def _solve(task: Task, workers: int) -> Result:
    """Solve on the devices of the fastest plan found in a short time, or all if there is no choice.

    Raises:
        PipeplanError: if no plan fits.
    """

    def search(problem: Problem, share: float, *warm_starts: Plan) -> Result:
        limits = {**vars(task.limits), "time_limit_s": share * task.limits.time_limit_s}
        result = solve(problem, warm_starts=warm_starts, workers=workers, **limits)
        if result.ended == "interrupted":
            raise KeyboardInterrupt
        return result

    problems = _possible(task)
    if len(problems) == 1:
        return search(problems[0], 1.0)
    found = []
    for problem in problems:
        try:
            found.append(search(problem, CHOICE_SHARE / len(problems)))
        except InfeasibleError:
            continue
    if not found:
        # The last set has the most memory.
        return search(problems[-1], 1 - CHOICE_SHARE)
    first = min(found, key=lambda result: result.iteration_time_s)
    if first.ended in ("proved", "gap limit"):
        return first
    return search(first.plan.single_device_problem, 1 - CHOICE_SHARE, first.plan)


def _possible(task: Task) -> list[Problem]:
    """Return the restricted problems whose devices can run every layer and form its groups."""
    have = len(task.problem.cluster.devices)
    if task.point.devices > have:
        raise InfeasibleError(f"the cluster has only {plural(have, 'device')}")
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
