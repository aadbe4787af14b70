"""Who runs what, and in which order, in tables for compiled code.

Operations are written as ``(stage * 4 + kind) * M + microbatch`` (:func:`operation_code`), kinds
numbered as in :mod:`planner.program.program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.errors import DeadlockError, PipeplanError
from planner.plan.operations import Operation, Orders
from planner.program.compiled import Block, block
from planner.program.program import INT, KINDS, REAL

FIXED, BACKWARD_FIRST, FORWARD_FIRST, RHYTHM = range(4)
"""Rules of order: the given orders, or list scheduling by one of three priorities."""
_LONG = np.dtype(np.int64)
(
    SCHEDULE, OWNER, ORDER_START, ORDER_CODES, IS_SPLIT, LIMIT, MOST_OWED,
    RESERVE_BYTES, DUE_S, PERIOD_S,
) = block(
    "rule",
    owner=INT, order_start=INT, order_codes=INT, is_split=INT, limit=INT, most_owed=REAL,
    reserve_bytes=_LONG, due_s=REAL, period_s=REAL,
)  # fmt: skip
"""A schedule of S stages with R replicas on D devices, M microbatches.

OWNER: S x M, the replica that runs each stage's microbatch, -1 for none. With the rule FIXED: the
codes of the operations of each device, from ORDER_START of it up to that of the next. Else IS_SPLIT
says by stage whether backwards run as input and weight gradients. LIMIT: by replica, microbatches
in flight; MOST_OWED: by replica, weight gradients that wait; RESERVE_BYTES: by device, kept free.
RHYTHM: 4 x S seconds after which a kind of a stage is due, and the seconds from one microbatch to
the next.
"""


def schedule_for(stages: int, replicas: int, devices: int, microbatches: int) -> Block:
    """Return an empty schedule with room for so much."""
    each = stages * microbatches
    sizes = {OWNER: each, ORDER_START: devices + 1, ORDER_CODES: 3 * each, IS_SPLIT: stages}
    sizes |= {LIMIT: replicas, MOST_OWED: replicas, RESERVE_BYTES: devices}
    return Block(SCHEDULE, {**sizes, DUE_S: 4 * stages, PERIOD_S: 1})


def operation_code(operation: Operation, microbatches: int) -> int:
    """Return the number that an operation is written as."""
    stage, kind, microbatch = operation
    return (stage * 4 + KINDS.index(kind)) * microbatches + microbatch


def fixed_orders(
    orders: Orders, stages: Sequence[Sequence[str]], devices: Sequence[str], microbatches: int
) -> Block:
    """Return the schedule of given orders.

    Args:
        orders: operations by device.
        stages: the devices of each stage.
        devices: all, in the order of the stages' tables.
        microbatches: of an iteration.

    Raises:
        PipeplanError: if a device is to run an operation that none of its stages has.
        DeadlockError: if it is to run one that never can: a second time, or where another device
            runs the rest of the microbatch's stage.
    """
    pairs = [(stage, name) for stage, names in enumerate(stages) for name in names]
    number = {pair: n for n, pair in enumerate(pairs)}
    replica_of = np.array([[number.get((s, d), -1) for d in devices] for s in range(len(stages))])
    kinds, at = {kind: number for number, kind in enumerate(KINDS)}, 4 * microbatches
    rows = [
        [s * at + kinds[kind] * microbatches + m for s, kind, m in orders.get(name, ())]
        for name in devices
    ]
    codes = np.array([code for row in rows for code in row], dtype=np.int64)
    counts = [len(row) for row in rows]
    if codes.max(initial=0) >= len(stages) * at or len(codes) < sum(map(len, orders.values())):
        _refuse(orders, pairs)
    found = schedule_for(len(stages), len(pairs), len(devices), microbatches)
    owner: Any = found[OWNER]
    owner[:] = -1
    cells = codes // at * microbatches + codes % microbatches
    whose = replica_of[codes // at, np.repeat(np.arange(len(devices)), counts)]
    owner[cells] = whose
    if len(np.unique(codes)) < len(codes) or (whose < 0).any() or (owner[cells] != whose).any():
        _refuse(orders, pairs)
    found[ORDER_START][:] = np.cumsum([0, *counts])
    found[ORDER_CODES][: len(codes)] = codes
    return found


def _refuse(orders: Orders, pairs: Sequence[tuple[int, str]]) -> None:
    """Name the first operation that cannot run; see :func:`fixed_orders`."""
    owner = {(r.stage, r.microbatch): name for name, row in orders.items() for r in row}
    seen: set[Operation] = set()
    for name, row in orders.items():
        for operation in row:
            if (operation.stage, name) not in pairs:
                raise PipeplanError(
                    f"orders: {name} runs {operation}, but it has no stage {operation.stage}; "
                    "correct the order or the stages' devices"
                )
            if operation in seen or owner[operation.stage, operation.microbatch] != name:
                raise DeadlockError(f"the orders deadlock: {name} waits at {operation}")
            seen.add(operation)
