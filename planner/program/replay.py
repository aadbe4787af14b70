"""Replays for Python: the times of a program, or who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import DeadlockError, PipeplanError
from planner.plan.operations import Operation
from planner.program.kernel import replay_once
from planner.program.program import (
    BY_PRIORITY,
    FLOW,
    KINDS,
    LATE_FLOW,
    LINK_NUMBERS,
    ORDER,
    Program,
)
from planner.program.work import (
    DEADLOCK,
    EVENTS,
    FLOWS,
    HEAP_FULL,
    MACHINES,
    MADES,
    NEVER_ENDS,
    OK,
    RAN,
    STATES,
    Work,
)


@dataclass(frozen=True)
class Times:
    """When the tasks of a program run.

    Attributes:
        start_s, end_s: of each task, in seconds.
        cause: of each task, the one that its start waited for last; -1: none.
        slowed_by: of each task, the link of the network that gave a flow less than all its rate,
            the last time that one did; -1: none.
        requested: of each flow, its place in the order in which flows were requested.
        made_s: when the bucket of each maker was made.
        peak_bytes: most that each device holds.
        order: the tasks that devices ran, at the places that ``DEVICES`` give them.
        time_s: of the iteration.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    cause: NDArray[np.int32]
    slowed_by: NDArray[np.int32]
    requested: NDArray[np.int32]
    made_s: NDArray[np.float64]
    peak_bytes: NDArray[np.int64]
    order: NDArray[np.int32]
    time_s: float


def replay(program: Program, work: Work | None = None) -> Times:
    """Replay a program.

    Args:
        program: that :mod:`planner.program.lower` made.
        work: memory for it, to be used again; None: new.

    Raises:
        DeadlockError: if tasks wait for each other; the message names every waiting device.
        PipeplanError: if the time of a task is not finite, or a reduction never begins.
    """
    work = Work(program) if work is None else work
    work.numbers["tells_links"] = 1
    while (status := replay_once(program.header, work.header)) == HEAP_FULL:
        work = Work(program, events=4 * len(work[EVENTS]))
    if status == DEADLOCK:
        raise DeadlockError(f"the orders deadlock: {', '.join(_waiting(program, work))}")
    if status == NEVER_ENDS:
        raise PipeplanError(
            "a computation or message of the plan never ends: its time or bandwidth is not a finite"
            " number, or no path joins the devices; check cluster.links and the costs of the layers"
        )
    if status != OK:
        raise ValueError("the memory for a replay was made for a smaller program")
    times = _times(program, work)
    if (times.end_s[program.tasks["role"] == LATE_FLOW] == np.inf).any():
        raise PipeplanError(
            "orders: a reduction waits for gradients that no operation makes; `pipeplan verify` "
            "names the operations that are missing"
        )
    return times


def _times(program: Program, work: Work) -> Times:
    numbers = program.numbers
    states = work.table(STATES, numbers["tasks"])
    links = work.table(FLOWS, numbers["tasks"])["slowed_by"]
    is_flow = np.isin(program.tasks["role"], (FLOW, LATE_FLOW)) & (states["start_s"] < np.inf)
    slowed_by = np.full(len(links), -1, np.int32)
    slowed = np.flatnonzero(is_flow & (links >= 0))
    slowed_by[slowed] = program[LINK_NUMBERS][links[slowed]]
    ran = max(program.devices["order_end"])
    is_ordered = numbers["mode"] != BY_PRIORITY
    return Times(
        start_s=states["start_s"].copy(),
        end_s=states["end_s"].copy(),
        cause=states["cause"].copy(),
        slowed_by=slowed_by,
        requested=work.table(FLOWS, numbers["tasks"])["line_node"].copy(),
        made_s=work.table(MADES, numbers["makers"])["made_s"].copy(),
        peak_bytes=work.table(MACHINES, numbers["devices"])["peak_bytes"].copy(),
        order=(program if is_ordered else work)[ORDER if is_ordered else RAN][:ran].copy(),
        time_s=float(work.numbers["time_s"]),
    )


def operation(program: Program, n: int) -> Operation:
    """Return the operation that a task is, or that needs the message that it is."""
    return operations(program, np.array([n]))[0]


def operations(program: Program, tasks: NDArray[np.integer]) -> list[Operation]:
    """Return the operations that tasks are, see :func:`operation`."""
    columns = (program.tasks[name][tasks].tolist() for name in ("stage", "kind", "microbatch"))
    return [Operation(s, KINDS[kind], m) for s, kind, m in zip(*columns, strict=True)]  # type: ignore[arg-type]


def _waiting(program: Program, work: Work) -> Iterator[str]:
    """Describe what each device waits at that has not run all its tasks."""
    for d, (name, device) in enumerate(zip(program.names, program.devices, strict=True)):
        at = device["order"] + work[MACHINES][d]["count"]
        if at < device["order_end"]:
            if program.numbers["mode"] == BY_PRIORITY:
                yield f"{name} has {device['order_end'] - at} operations left"
            else:
                yield f"{name} waits at {operation(program, program[ORDER][at])}"
    for d, name in enumerate(program.names):
        if (pending := work[MACHINES][d]["pending"]) >= 0:
            yield f"{name} waits at {operation(program, pending)} for replicas"
