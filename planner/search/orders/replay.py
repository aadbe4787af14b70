"""Replays of the schedule in the memory of a search over orders, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, pointer_at, row
from planner.program.kernel import replay_in
from planner.program.lower.lower import lower
from planner.program.lower.room import ROOM
from planner.program.lower.wires import WIRES
from planner.program.program import DEVICES, PROGRAM
from planner.program.schedule import SCHEDULE
from planner.program.stage_rows import ROWS
from planner.program.work import MACHINES, OK, WORK
from planner.search.orders.calls import Apart
from planner.search.orders.memory import ORDERS


@Apart
def replay_schedule(o: Any) -> float:
    """Lower the schedule to a program and replay it; infinite if it cannot run, or is too long.

    Where ``lowers`` is 0, the program is there.

    Args:
        o: pointer to the memory of a search over orders.
    """
    h = header(o, ORDERS)
    program, work = pointer_at(h.program, PROGRAM), pointer_at(h.work, WORK)
    state = header(work, WORK)
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    room = pointer_at(h.room, ROOM)
    state.most_s = h.most_s * (1 + 1e-9)  # Sums of what is left are rounded.
    if h.lowers and not lower(rows, schedule, pointer_at(h.wires, WIRES), program, room):
        return np.inf
    status = replay_in(program, work)
    h.tasks += int(state.started / max(1, state.computations) * header(program, PROGRAM).tasks)
    return state.time_s if status == OK else np.inf


@compiled
def fits(o: Any) -> bool:
    """Return whether no device ever held more than it has room for in the last replay."""
    h = header(o, ORDERS)
    program, work = pointer_at(h.program, PROGRAM), pointer_at(h.work, WORK)
    for d in range(header(program, PROGRAM).devices):
        if row(work, MACHINES, d).peak_bytes > row(program, DEVICES, d).capacity_bytes:
            return False
    return True
