"""The memory of a search over orders: one block that its compiled functions read and write.

Compiled functions take the pointer ``o`` to it. It holds the addresses of the blocks that lowering
and replay work on, and of T tasks, L lines and D devices:

- STEPS: T, what a longest path needs of the tasks that are operations; LANES: D, how far each
  device has come; ARRIVAL_S: T, when what an operation makes has come to who needs it; LINE_FREE_S:
  L; STACK: D, devices that may go on;
- MICROBATCH: M; BEST_CODES: the best order; RANDOM: the state of random numbers.
"""

from __future__ import annotations

import numpy as np

from planner.program.compiled import Block, block
from planner.program.program import (
    DEVICES,
    GROUPS,
    HOSTS,
    INT,
    LINK_GB_PER_S,
    MAKERS,
    REAL,
    REPLICAS,
    TASKS,
    Program,
    record,
)
from planner.program.stage_rows import (
    DEVICE,
    LENGTH_OF,
    REDUCTION_DEVICE,
    REDUCTION_LINK,
    REPLICA,
    STAGE,
)
from planner.program.work import Work
from planner.search.orders.calls import Apart

STEP = record(i8="start_bytes end_bytes", f8="seconds message_s", i4="source target line device")
"""An operation: what it adds to its device at its start and end, but for tensors on their way;
the operation whose result it needs, -1 for none or one of its device; the device that may wait for
its result; the line and the seconds of the message with it."""
LANE = record(
    i8="held_bytes static_bytes capacity_bytes way_bytes",
    f8="free_s idle_s load_s tail_s",
    i4="at end is_queued",
)
"""A device: ``load_s`` of its operations, ``tail_s`` behind them, ``way_bytes`` of all tensors that
could ever be on their way from and to it at once."""
(ORDERS, STEPS, LANES, ARRIVAL_S, LINE_FREE_S, STACK, MICROBATCH, BEST_CODES, RANDOM) = block(
    # Addresses of blocks, and of the function that replays.
    "rows schedule wires program room work replay_at"
    # `equal`: whether stages form equal pipelines, which run alike; `blocks`: whether messages
    # block, so that a change of order is lowered anew; `lowers`: whether the next replay is.
    " equal blocks lowers"
    # Of the longest path: whether it is at most the time of a replay, whether it equals that, and
    # whether the last one certainly fits memory.
    " is_quick is_exact is_roomy"
    # Work in tasks; `most_s`: replays of what takes longer end early.
    " tasks",
    reals="best_s energy_s path_s mean_load_s most_s",
    steps=STEP, lanes=LANE, arrival_s=REAL, line_free_s=REAL, stack=INT, microbatch=INT,
    best_codes=INT, random=np.dtype(np.uint64),
)  # fmt: skip


class OrderMemory(Block):
    """Memory for searches over orders; it keeps the blocks alive that it names.

    Args:
        rows: tables of stages, or of the most and largest that there will be.
        schedule: with room for their orders.
        wires: of the network.
        program: with room for their program.
        room: for the passes that make it.
        replay: :func:`planner.search.orders.replay.replay_schedule`.

    Attributes:
        work: memory for replays.
    """

    def __init__(
        self,
        rows: Block,
        schedule: Block,
        wires: Block,
        program: Program,
        room: Block,
        replay: Apart,
    ) -> None:
        self.work = work_for(program, rows, wires)
        devices, each = len(rows[DEVICE]), len(rows[STAGE]) * len(rows[LENGTH_OF])
        tasks, lines = len(program[TASKS]), int(program.numbers["lines"])
        sizes = {
            STEPS: tasks, ARRIVAL_S: tasks, LANES: devices, STACK: devices, LINE_FREE_S: lines,
            BEST_CODES: 3 * each, RANDOM: 1, MICROBATCH: len(rows[LENGTH_OF]),
        }  # fmt: skip
        super().__init__(ORDERS, sizes)
        self.parts = {"rows": rows, "schedule": schedule, "wires": wires, "program": program}
        self.parts |= {"room": room, "work": self.work}
        for name, part in self.parts.items():
            self.numbers[name] = part.header.ctypes.data
        self.numbers["replay_at"] = replay.address
        self.numbers["lowers"] = 1
        self.numbers["best_s"] = self.numbers["most_s"] = np.inf


def seed_random(memory: Block, table: int, seed: int) -> None:
    """Set the state of random numbers in a table of one number."""
    memory[table][0] = np.uint64((2 * seed + 1) * 0x9E3779B97F4A7C15 % 2**64)


def work_for(program: Program, rows: Block, wires: Block) -> Work:
    """Return memory for replays of every program that there is room for."""
    numbers = program.numbers
    tables = (TASKS, DEVICES, REPLICAS, MAKERS, LINK_GB_PER_S, GROUPS, HOSTS)
    names = ("tasks", "devices", "replicas", "makers", "links", "groups", "hosts")
    for name, table in zip(names, tables, strict=True):
        numbers[name] = len(program[table])
    messages = 2 * len(rows[LENGTH_OF]) * len(rows[STAGE])
    members, route = len(rows[REDUCTION_DEVICE]), int(wires.numbers["longest_route"])
    numbers["lines"] = numbers["devices"] * (numbers["devices"] + 3)
    numbers["line_nodes"] = 3 * messages + members + len(rows[REPLICA]) * len(rows[LENGTH_OF])
    numbers["link_nodes"] = numbers["link_uses"] = messages * route + len(rows[REDUCTION_LINK])
    return Work(program)
