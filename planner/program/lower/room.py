"""What the passes share: numbers of tasks, edges between them, and room to work in.

Each pass knows one feature. It fills in its tasks and adds edges from a task to those that wait for
it, in the order in which they are to be released; :func:`join_edges` makes successors of all. A
task that waits for itself never runs: nobody makes what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.program.compiled import Block, block, compiled, header, inlined, items, row
from planner.program.lower.wires import SLOWDOWN
from planner.program.program import (
    AHEAD,
    DEVICE_REPLICAS,
    DEVICES,
    EFFECTS,
    GROUP_DEVICES,
    GROUPS,
    HOSTS,
    INT,
    LINK_GB_PER_S,
    LINK_NUMBERS,
    MAKERS,
    ORDER,
    PROGRAM,
    REPLICAS,
    SLOWDOWNS,
    SUCCESSORS,
    TASKS,
    WAY_DEVICES,
    WAY_LINES,
    WAY_LINKS,
    WAY_ONCE,
    WAYS,
    Program,
    record,
)  # fmt: skip
from planner.program.stage_rows import (
    DEVICE,
    LENGTH_OF,
    MAKER,
    REDUCTION,
    REDUCTION_DEVICE,
    REDUCTION_LINK,
    REPLICA,
    SECONDS,
    STAGE,
)  # fmt: skip

EDGE = record(i4="source target")
WAY_USE = record(f8="seconds", i4="source target pair flows reduction")
LINK_USE = record(i4="place last_way number")
LINK_CLASS = record(i4="last_way child users narrowest")
(
    ROOM, OPERATION_TASK, MESSAGE_TASK, SENT_JOIN, NEEDED_JOIN, EDGES, NEXT_SUCCESSOR, GRID,
    LINE_OF_PAIR, WAY_USES, LINK_USES, LINKS_USED, LINK_CLASSES,
) = block(
    "n_edges n_links_used n_link_classes message_ways reduction_ways copy_ways way_lines"
    " way_links way_once way_devices stream_lines copy_lines pair_lines first_copy"
    " first_exchange first_join",
    operation_task=INT, message_task=INT, sent_join=INT, needed_join=INT, edges=EDGE,
    next_successor=INT, grid=INT, line_of_pair=INT, way_uses=WAY_USE, link_uses=LINK_USE,
    links_used=INT, link_classes=LINK_CLASS,
)  # fmt: skip
"""OPERATION_TASK: the task of each operation's code, -1 for none; MESSAGE_TASK: that of the message
before a backward or a forward of a stage's microbatch, at (stage * 2 + is_forward) * M +
microbatch; SENT_JOIN and NEEDED_JOIN: the ends of the exchanges of their sender and receiver, -1
for none. GRID: the ways between replicas of two stages; LINE_OF_PAIR: D x D, one more than the line
of messages from a device to another. WAY_USES: seconds of messages on a way, -1 where they take
none, its source and target in the cluster, how many tasks take it, and its row of REDUCTION.
LINK_USES: of directed links, those in use listed in LINKS_USED, and what is equal for those of one
place in LINK_CLASSES."""


@inlined
def edge(work: Any, source: int, target: int) -> None:
    """Have a task wait for another."""
    state = header(work, ROOM)
    added = row(work, EDGES, state.n_edges)
    added.source, added.target = source, target
    state.n_edges += 1


@compiled
def new_task(program: Any, n: int, role: int, resource: int) -> None:
    """Clear a task: it waits for nothing and holds nothing."""
    task = row(program, TASKS, n)
    task.role, task.resource = role, resource
    task.seconds = 0.0
    task.priority = 0
    task.effect = task.at_start = task.group = task.replica = task.microbatch = -1
    task.makes = task.stage = -1
    task.kind = task.slot = 0
    task.waits = 0


@compiled
def join_edges(program: Any, work: Any) -> None:
    """Make the successors of all tasks from the edges, in the order in which they were added."""
    state, numbers = header(work, ROOM), header(program, PROGRAM)
    at, successors = items(work, NEXT_SUCCESSOR), items(program, SUCCESSORS)
    for n in range(numbers.tasks):
        at[n] = 0
    for i in range(state.n_edges):
        added = row(work, EDGES, i)
        at[added.source] += 1
        row(program, TASKS, added.target).waits += 1
    first = 0
    for n in range(numbers.tasks):
        task, count = row(program, TASKS, n), at[n]
        task.successor = at[n] = first
        first += count
        task.successor_end = first
    for i in range(state.n_edges):
        added = row(work, EDGES, i)
        successors[at[added.source]] = added.target
        at[added.source] += 1


@inlined
def new_way(program: Any, work: Any, latency_s: float, gb_per_s: float) -> int:
    """Add a way without lines and links; return its number."""
    numbers = header(program, PROGRAM)
    n = numbers.ways
    numbers.ways = n + 1
    way = row(program, WAYS, n)
    way.latency_s, way.gb_per_s = latency_s, gb_per_s
    way.link = way.link_end = way.once = way.once_end = 0
    way.line = way.line_end = way.device = way.device_end = 0
    use = row(work, WAY_USES, n)
    use.seconds, use.source, use.target, use.pair, use.flows = -1.0, -1, -1, 0, 0
    return int(n)


@inlined
def add_line(program: Any, work: Any, way: int, line: int) -> None:
    """Have the flows of the last way stand in one more line."""
    state, found = header(work, ROOM), row(program, WAYS, way)
    if found.line == found.line_end:
        found.line = state.way_lines
    items(program, WAY_LINES)[state.way_lines] = line
    state.way_lines += 1
    found.line_end = state.way_lines


@inlined
def add_device(program: Any, work: Any, way: int, device: int) -> None:
    """Note that a device communicates on the last way."""
    state, found = header(work, ROOM), row(program, WAYS, way)
    if found.device == found.device_end:
        found.device = state.way_devices
    items(program, WAY_DEVICES)[state.way_devices] = device
    state.way_devices += 1
    found.device_end = state.way_devices


# --- how much there can be ------------------------------------------------------------------------


def room_for(rows: Block, wires: Block, names: Sequence[str] = ()) -> tuple[Program, Block]:
    """Return room for the program of any schedule of stages, and for the passes that make it.

    Args:
        rows: tables of stages, or of the most and largest that there will be.
        wires: of the network.
        names: of the devices, where there are no others.
    """
    stages, replicas, devices = len(rows[STAGE]), len(rows[REPLICA]), len(rows[DEVICE])
    microbatches, reductions, makers = len(rows[LENGTH_OF]), len(rows[REDUCTION]), len(rows[MAKER])
    classes, members = len(rows[SECONDS]) // (4 * replicas), len(rows[REDUCTION_DEVICE])
    each, links = stages * microbatches, int(wires.numbers["links"])
    messages = 2 * (stages - 1) * microbatches
    message_ways = min(messages, 2 * classes * replicas**2)
    ways = message_ways + 2 * reductions + replicas  # Of reductions and all-gathers, and copies.
    crossings = message_ways * int(wires.numbers["longest_route"]) + 2 * len(rows[REDUCTION_LINK])
    # Operations, copies and messages; ends of exchanges and of devices; reductions, steps, gathers.
    tasks = 5 * each + messages + 6 * each + 2 * devices + 2 * reductions + 2 * devices
    edges = 26 * each + 3 * members + devices + reductions
    program = Program(
        {
            TASKS: tasks, SUCCESSORS: edges, DEVICES: devices, ORDER: 3 * each,
            DEVICE_REPLICAS: replicas, REPLICAS: replicas, MAKERS: makers,
            AHEAD: 2 * classes * makers, EFFECTS: 6 * replicas + message_ways, WAYS: ways,
            WAY_LINKS: crossings, WAY_ONCE: crossings,
            WAY_LINES: crossings + 3 * message_ways + 2 * members + replicas,
            WAY_DEVICES: 2 * message_ways + 2 * members, LINK_GB_PER_S: links, LINK_NUMBERS: links,
            GROUPS: 4 * stages, GROUP_DEVICES: replicas, HOSTS: int(wires.numbers["hosts"]),
            SLOWDOWNS: len(wires[SLOWDOWN]),
        },
        tuple(names),
    )  # fmt: skip
    room = Block(
        ROOM,
        {
            OPERATION_TASK: 4 * each, MESSAGE_TASK: 2 * each, SENT_JOIN: 2 * each,
            NEEDED_JOIN: 2 * each, EDGES: edges, NEXT_SUCCESSOR: tasks,
            GRID: classes * replicas**2, LINE_OF_PAIR: devices**2, WAY_USES: ways,
            LINK_USES: links, LINKS_USED: links, LINK_CLASSES: crossings + 1,
        },
    )  # fmt: skip
    return program, room
