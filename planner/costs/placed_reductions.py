"""The reductions of given stages: compiled code makes them, and here they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from planner.costs.network_table import NetworkTable
from planner.costs.reductions import CollectiveLoad, Collectives, GradientReduction
from planner.costs.stage_table import StageTable
from planner.program.compiled import Block, entry, pointer
from planner.program.lower.gradient_tables import COLLECTIVE_S, gradient_rows, gradient_tables
from planner.program.lower.gradients import fill_gradients
from planner.program.lower.weights import fill_collectives
from planner.program.lower.wires import wires_of
from planner.program.stage_rows import (
    AHEAD_S,
    DEVICE,
    MAKER,
    REDUCTION,
    REDUCTION_DEVICE,
    REDUCTION_LINK,
    REPLICA,
    STAGE,
)

Pairs = Sequence[tuple[int, str]]
"""The replicas of all stages: numbers of stages, names of devices."""


@entry
def reduce_stages(rows: Any, table: Any, gradients: Any, wires: Any) -> bool:
    """Fill in the collectives around layers, and all reductions; the arguments are headers."""
    blocks = pointer(rows), pointer(table), pointer(gradients), pointer(wires)
    is_joined = fill_collectives(blocks[0], blocks[1], blocks[2], blocks[3])
    return fill_gradients(blocks[0], blocks[2], blocks[3]) and is_joined


def placed_reductions(
    table: StageTable, bucket_bytes: float | None
) -> tuple[tuple[GradientReduction, ...], list[dict[str, Collectives]]]:
    """Return the reductions of an iteration, and the collectives around layers by stage.

    First come the reductions of each stage, in the order in which backwards fill its buckets, then
    those of tied parameters. What is reduced in turn (``tied`` of the runtime) is among those of
    each stage that holds it, and then reduced among these stages replica by replica, whole even
    where replicas share the optimizer's state (Megatron-LM, ``finalize_model_grads.py``). Seconds
    are infinite where two of the devices have no path.

    Args:
        table: of the stages.
        bucket_bytes: the size of buckets reduced while the last backwards still run; None: all
            gradients of a stage are reduced at once, after its last backward.
    """
    stages, cluster = table.stages, table.problem.cluster
    pairs = [(s, name) for s, stage in enumerate(stages) for name in stage.devices]
    names = list(dict.fromkeys(name for _, name in pairs))
    wires = wires_of(NetworkTable.of(cluster))
    gradients = gradient_tables(table, bucket_bytes, len(stages))
    rows = gradient_rows(table, gradients, wires, len(stages), len(pairs), 1)
    _fill(rows, table, pairs, names)
    reduce_stages(rows.header, table.block.header, gradients.header, wires.header)
    seconds = gradients[COLLECTIVE_S].reshape(-1, 2).tolist()
    divides = table.arrays.divided_weights
    collectives = [
        {
            table.layers[n]: Collectives(*seconds[n])
            for n in range(*span)
            if divides[n] and len(stage.devices) > 1
        }
        for stage, span in zip(stages, table.cuts, strict=True)
    ]
    return tuple(_reductions(rows, pairs, names)), collectives


def _fill(rows: Block, table: StageTable, pairs: Pairs, names: Sequence[str]) -> None:
    stages, numbers = table.stages, table.problem.cluster.numbers
    for name, count in zip(
        ("stages", "replicas", "devices", "classes"),
        (len(stages), len(pairs), len(names), 1),
        strict=True,
    ):
        rows.numbers[name] = count
    ends = np.cumsum([0, *(len(stage.devices) for stage in stages)])
    rows[STAGE]["first"], rows[STAGE]["last"] = ends[:-1], ends[1:]
    rows[STAGE]["begin"], rows[STAGE]["end"] = np.array(table.cuts).T
    rows[STAGE]["rerun"] = 1
    places = {name: place for place, name in enumerate(names)}
    rows[REPLICA]["stage"] = [stage for stage, _ in pairs]
    rows[REPLICA]["device"] = [places[name] for _, name in pairs]
    rows[DEVICE]["number"][: len(names)] = [numbers[name] for name in names]


def _reductions(rows: Block, pairs: Pairs, names: Sequence[str]) -> Iterator[GradientReduction]:
    bucket, before = 0, ()
    for row in rows[REDUCTION][: rows.numbers["reductions"]]:
        made = slice(row["first_maker"], row["last_maker"])
        makers = [pairs[replica] for replica in rows[MAKER][made].tolist()]
        ahead_s = map(tuple, rows[AHEAD_S].reshape(-1, 2)[made].tolist())
        members = rows[REDUCTION_DEVICE][row["first_device"] : row["last_device"]]
        links = rows[REDUCTION_LINK][row["first_link"] : row["last_link"]]
        stages = tuple(dict.fromkeys(stage for stage, _ in makers))
        bucket = bucket + 1 if stages == before and len(stages) == 1 else 0
        before = stages
        yield GradientReduction(
            stages=stages,
            devices=tuple(names[device] for device in members.tolist()),
            bytes=int(row["bytes"]),
            seconds=float(row["seconds"]),
            load=CollectiveLoad(
                latency_s=float(row["latency_s"]),
                gb_per_s=float(row["gb_per_s"]),
                gather_latency_s=float(row["gather_latency_s"]),
                links=tuple(links.tolist()),
            ),
            bucket=bucket,
            ahead=dict(zip(makers, ahead_s, strict=True)),
            gathered_bytes=int(row["gathered_bytes"]),
            gather_s=float(row["gather_s"]),
        )
