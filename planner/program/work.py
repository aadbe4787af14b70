"""What a replay works out: one block, made once for the largest program and used for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import Block, block
from planner.program.program import INT, ORDER, REAL, Program, record

OK, DEADLOCK, HEAP_FULL, TOO_SMALL, NEVER_ENDS, TOO_LONG = range(6)

STATE = record(f8="start_s end_s", i4="left cause")
"""Of a task: how many it still waits for; ``cause`` is the task that its start waited for last.

Until a task on a device starts, ``start_s`` is when it could."""

FLOWING = record(
    f8="due_s share since_s gb_per_s most",
    i4="line_node link_node slowed_by seen",
    i1="is_active meets",
)
"""Of a flow: ``due_s`` is when it would end if it had all its rate from now on, ``share`` what it
has of that since ``since_s``; ``gb_per_s`` is the rate that it has at most, ``most`` times its
way's. ``meets`` tells that it shares links, or has shared them."""

MACHINE = record(
    # Where the device is slowed by others: the progress of what it runs, as of a flow.
    f8="free_at_s done_s due_s share since_s end_s left_s",
    i8="held_bytes peak_bytes",
    # `count` tasks were chosen, `last` was started last, `running` while it is slowed; `pending`
    # waits for its group; `under_way` flows that slow it, `held_by` messages that hold it; `left_s`
    # is what it has still to compute.
    i4="count last running pending under_way held_by moment",
    i1="is_dirty",
)
REPLICA_STATE = record(i4="left in_flight owed")
QUEUE = record(i4="first head tail")
MADE = record(f8="due_s made_s")
LINK = record(f8="room used demand", i4="head tail users seen", i1="is_changed is_full was_full")
"""Of a link: ``demand`` is what its flows would take if each had all its rate, ``is_full`` and
``was_full`` whether this is more than its bandwidth, and was so when it was last divided."""
LINE = record(i4="head tail")
LINE_NODE = record(i4="next flow")
LINK_NODE = record(i4="next before flow")
EVENT = record(f8="time_s", i8="code")

(
    WORK, STATES, FLOWS, MACHINES, REPLICA_STATES, QUEUES, QUEUED, MADES, LINKS, LINES, LINE_NODES,
    LINK_NODES, EVENTS, CHANGED, STACK, FOUND, RISING, RATES, FULL_LINKS, DIRTY, TOUCHED, READY,
    RAN, GROUP_LEFT, RUNNING, SLOWED, AT_WORK,
) = block(
    # Rows in use of EVENTS, CHANGED, FOUND, FULL_LINKS, DIRTY, TOUCHED, READY, RUNNING, SLOWED and
    # of the two kinds of nodes; `stamp` and `moment` are raised instead of clearing marks.
    # `tells_links` asks which link slowed a flow, for which nothing else needs to be known.
    # `computations` of the program, of which so many were `started`.
    "status n_events n_changed n_found n_dirty n_touched n_ready n_running n_slowed n_line_nodes"
    " n_link_nodes n_full stamp moment load_changed tells_links computations started",
    # A replay ends once it is certain that it takes longer than `most_s`.
    reals="time_s most_s",
    states=STATE, flows=FLOWING, machines=MACHINE, replica_states=REPLICA_STATE, queues=QUEUE,
    queued=INT, mades=MADE, links=LINK, lines=LINE, line_nodes=LINE_NODE, link_nodes=LINK_NODE,
    events=EVENT, changed=INT, stack=INT, found=INT, rising=INT, rates=REAL, full_links=INT,
    dirty=INT, touched=INT, ready=INT, ran=INT, group_left=INT, running=INT, slowed=INT,
    at_work=INT,
)  # fmt: skip


class Work(Block):
    """Memory for replays of a program, and of any that is not larger.

    Args:
        program: the largest.
        events: that may be announced at once; None: four for each task that could run at once.
    """

    def __init__(self, program: Program, events: int | None = None) -> None:
        numbers = program.numbers
        sizes = {str(name): int(numbers[name]) for name in numbers.dtype.names}
        tasks, devices, links = sizes["tasks"], sizes["devices"], sizes["links"]
        replicas, uses = sizes["replicas"], sizes["link_uses"]
        super().__init__(
            WORK,
            {
                STATES: tasks, FLOWS: tasks, FOUND: tasks, RISING: tasks, RATES: tasks,
                QUEUED: 3 * tasks, READY: tasks, SLOWED: tasks,
                MACHINES: devices, DIRTY: devices, TOUCHED: devices, RUNNING: devices,
                REPLICA_STATES: replicas, QUEUES: 3 * replicas, MADES: sizes["makers"],
                LINKS: links, CHANGED: links, FULL_LINKS: links, LINES: sizes["lines"],
                LINE_NODES: sizes["line_nodes"], LINK_NODES: sizes["link_nodes"],
                EVENTS: events if events is not None else 2 * tasks + sizes["makers"] + 64,
                STACK: max(links + uses, 3 * tasks),
                RAN: len(program[ORDER]), GROUP_LEFT: sizes["groups"], AT_WORK: sizes["hosts"],
            },
        )  # fmt: skip
        self.numbers["most_s"] = np.inf

    def table(self, number: int, rows: int) -> np.ndarray[Any, Any]:
        """Return the first rows of a table."""
        return self[number][:rows]
