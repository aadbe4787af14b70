"""Trainable parameters of all layers in tables, from which reductions of any stages are made."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.costs.layer_arrays import Ints
from planner.costs.stage_table import StageTable
from planner.plan.problem import Problem
from planner.program.compiled import Block, block
from planner.program.program import INT, REAL
from planner.program.stage_rows import rows_for

_LONG = np.dtype(np.int64)
(
    GRADIENTS, BYTES, GATHERED, TIED, TIED_START, TIED_USERS, COLLECTIVE_S, STAGE_OF, TIE_START,
    TIE_STAGES, TIE_BYTES, TIE_GATHERED, STAGES, MEMBERS, MEMBER_NUMBERS, MESSAGE_LATENCY_S,
    MESSAGE_GB_PER_S, SHARING,
) = block(
    "table in_turn has_buckets ties ring_messages tree_messages members",
    reals="bucket_bytes",
    bytes=_LONG, gathered=_LONG, tied=INT, tied_start=INT, tied_users=INT, collective_s=REAL,
    stage_of=INT, tie_start=INT, tie_stages=INT, tie_bytes=_LONG, tie_gathered=_LONG, stages=INT,
    members=INT, member_numbers=INT, message_latency_s=REAL, message_gb_per_s=REAL, sharing=INT,
)  # fmt: skip
"""The gradients of N layers on K types, beside the block of the :class:`StageTable` (``table``).

BYTES of the gradient: K x parameters, 0 of those that backwards scatter themselves; GATHERED: of
the parameter, if devices share the optimizer's state. TIED: parameters of several layers; the
layers of each parameter are TIED_USERS from its TIED_START on, ascending.

To work in: COLLECTIVE_S: N x 2, the seconds in which replicas put the weights of each layer
together, and scatter its gradients; STAGE_OF: the stage of each layer; TIE_STAGES from TIE_START
on: sets of stages that hold tied parameters of TIE_BYTES and TIE_GATHERED; STAGES and MEMBERS:
stages of a reduction, and its devices, with their MEMBER_NUMBERS in the cluster; MESSAGE_LATENCY_S
and MESSAGE_GB_PER_S: unlike messages of a step of a ring, then of a tree; SHARING: messages on each
directed link, all 0 between calls.
"""


def gradient_tables(table: StageTable, bucket_bytes: float | None, stages: int) -> Block:
    """Return the tables of a problem.

    Args:
        table: of its layers.
        bucket_bytes: the size of buckets that are reduced while the last backwards still run; None:
            all gradients of a stage are reduced at once.
        stages: that there are at most.
    """
    problem, arrays = table.problem, table.arrays
    names = list(problem.graph.parameters)
    divided = np.isin(names, list(problem.divided_parameters))
    trainable = np.any(arrays.gradient > 0, axis=0, keepdims=True)[0]
    users = _users(arrays.held_start, arrays.held, len(names))
    tied = [n for n, row in enumerate(users) if len(row) > 1 and trainable[n]]
    devices, links = len(problem.cluster.devices), 2 * len(problem.cluster.links)
    rows: dict[int, Any] = {
        BYTES: np.where(divided, 0, arrays.gradient),
        GATHERED: _gathered(problem),
        TIED: tied,
        TIED_START: np.cumsum([0, *map(len, users)]),
        TIED_USERS: [layer for row in users for layer in row],
    }
    sizes = {number: np.size(row) for number, row in rows.items()}
    sizes |= dict.fromkeys((TIE_BYTES, TIE_GATHERED), len(tied) + 1)
    sizes |= dict.fromkeys((MEMBERS, MEMBER_NUMBERS), devices)
    sizes |= dict.fromkeys((MESSAGE_LATENCY_S, MESSAGE_GB_PER_S), 2 * devices)
    sizes |= {STAGE_OF: len(table.layers), COLLECTIVE_S: 2 * len(table.layers)}
    sizes |= {TIE_START: len(tied) + 2, TIE_STAGES: sizes[TIED_USERS] + 1}
    found = Block(GRADIENTS, {**sizes, STAGES: stages, SHARING: links})
    for number, row in rows.items():
        found[number][:] = np.ravel(row)
    found.numbers["table"] = table.block.header.ctypes.data
    found.numbers["in_turn"] = problem.runtime.tied == "in_turn"
    set_buckets(found, bucket_bytes)
    return found


def _gathered(problem: Problem) -> Ints:
    """Return the bytes of each parameter by type that are gathered after the optimizer's step."""
    graphs = [problem.graph.on(name) for name in problem.cluster.device_types]
    rows = [[row.bytes for row in graph.parameters.values()] for graph in graphs]
    return np.array(rows, np.int64) * problem.job.shards_state


def set_buckets(gradients: Block, bucket_bytes: float | None) -> None:
    """Have gradients reduced in buckets of a size, or at once; see :func:`gradient_tables`."""
    gradients.numbers["has_buckets"] = bucket_bytes is not None
    gradients.numbers["bucket_bytes"] = bucket_bytes or 0.0


def _users(start: Ints, held: Ints, parameters: int) -> list[list[int]]:
    """Return the layers that use each parameter."""
    users: list[list[int]] = [[] for _ in range(parameters)]
    for layer in range(len(start) - 1):
        for entry in range(start[layer], start[layer + 1]):
            users[held[entry]].append(layer)
    return users


def gradient_rows(
    table: StageTable, gradients: Block, wires: Block, stages: int, replicas: int, microbatches: int
) -> Block:
    """Return tables of stages with room for all reductions of any stages.

    Args:
        table: of the problem.
        gradients: of the problem.
        wires: of its network.
        stages: that there are at most.
        replicas: that all stages have at most.
        microbatches: of an iteration.
    """
    devices, route = int(wires.numbers["devices"]), int(wires.numbers["longest_route"])
    limit, buckets = float(gradients.numbers["bucket_bytes"]), stages
    if gradients.numbers["has_buckets"]:
        # Two buckets that follow each other have more bytes than one may have. A tied gradient may
        # be in buckets of all stages that hold it.
        used, count = table.arrays.held, len(table.problem.graph.parameters)
        rows = gradients[BYTES].reshape(-1, max(1, count))
        total = int(rows.max(axis=0, initial=0)[used].sum())
        buckets += min(len(used), int(2 * total / limit)) if limit > 0 else len(used)
    ties = len(gradients[TIED]) * (devices if gradients.numbers["in_turn"] else 1)
    reductions = buckets + ties
    members, makers = reductions * devices, buckets * devices + ties * replicas
    sizes = reductions, members, members * route, makers
    return rows_for(stages, replicas, devices, microbatches, 1, *sizes)
