"""Placed stages in tables for compiled code: all figures of stages that a program is made from.

A *replica* is one device of one stage. Operations have the kinds B, F, I, W, numbered 0 to 3 as
their letters sort. A *class* of microbatches has times and messages of its own; where all
microbatches have one length there is one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import copy_s
from planner.plan.runtime_rules import RuntimeBehaviour
from planner.program.compiled import Block, block
from planner.program.program import KINDS

Array = NDArray[Any]
EXCHANGES = ("single", "neighbour", "together", "pairs")
RULES = ("bucket", "stage", "device", "flush")
INT, REAL = np.dtype(np.int32), np.dtype(np.float64)
MOST_BYTES = 2**62
"""Devices whose memory is to have no limit have more; sums of a few still fit into 64 bits."""


def _record(whole: str, real: str = "") -> np.dtype[Any]:
    return np.dtype([(x, np.int64) for x in whole.split()] + [(x, REAL) for x in real.split()])


_STAGE = _record(
    "first last begin end rerun is_together stash_bytes weight_stash_bytes input_bytes"
    " output_bytes input_gradient_bytes output_gradient_bytes offload_bytes"
)
_REPLICA = _record("stage device split_extra_bytes", "copy_s")
_DEVICE = _record("number static_bytes capacity_bytes", "optimizer_s")
_REDUCTION = _record(
    "first_device last_device first_link last_link first_maker last_maker gathers bytes"
    " gathered_bytes",
    "seconds latency_s gb_per_s gather_s gather_latency_s",
)
(
    ROWS, STAGE, REPLICA, DEVICE, SECONDS, RECEIVED_BYTES, RECEIVED_S, LENGTH_OF, REDUCTION,
    REDUCTION_DEVICE, REDUCTION_LINK, MAKER, AHEAD_S,
) = block(
    "stages replicas devices microbatches classes reductions makers send_blocks receive_blocks"
    " exchange one_stream reduction_rule",
    stage=_STAGE, replica=_REPLICA, device=_DEVICE, seconds=REAL, received_bytes=np.dtype(np.int64),
    received_s=REAL, length_of=INT, reduction=_REDUCTION, reduction_device=INT, reduction_link=INT,
    maker=INT, ahead_s=REAL,
)  # fmt: skip
"""The tables of S stages with R replicas on D devices, C classes and M microbatches.

STAGE: replicas from ``first`` up to ``last``, and the bytes of
:class:`planner.costs.placed_pipeline.PlacedStage`; only where reductions are made in compiled code,
its layers from ``begin`` up to ``end`` and the limit ``rerun`` on those that it recomputes.
REPLICA: in the order of a stage's devices; ``device`` is a row of DEVICE, ``copy_s`` moves the
offloaded part of a stash. DEVICE: in the order of stages; ``number`` is that of the cluster.
SECONDS: C x R x 4, of operations. RECEIVED_BYTES: C x S x 2, of the messages that a stage receives
before a backward, and before a forward; 0: none.
RECEIVED_S: C x R x 2, seconds of these messages besides the route's, in which no link is used: host
time, and gathering in a tensor-parallel group. LENGTH_OF: the class of each microbatch. REDUCTION:
ranges of REDUCTION_DEVICE (rows of DEVICE), REDUCTION_LINK (the directed links that its edges
cross, as often as they do) and MAKER (replicas that make its gradients); AHEAD_S: C x makers x 2,
how long before the end of its last B, or W, each has made them. ``reduction_rule`` and
``exchange`` are places in RULES and EXCHANGES.
"""


def rows_for(
    stages: int,
    replicas: int,
    devices: int,
    microbatches: int,
    classes: int = 1,
    reductions: int = 0,
    members: int = 0,
    links: int = 0,
    makers: int = 0,
) -> Block:
    """Return empty tables with room for so much; members are all devices of all reductions."""
    sizes = {
        STAGE: stages, REPLICA: replicas, DEVICE: devices, SECONDS: classes * replicas * 4,
        RECEIVED_BYTES: classes * stages * 2, RECEIVED_S: classes * replicas * 2,
        LENGTH_OF: microbatches, REDUCTION: reductions, REDUCTION_DEVICE: members,
        REDUCTION_LINK: links, MAKER: makers, AHEAD_S: classes * makers * 2,
    }  # fmt: skip
    return Block(ROWS, sizes)


def stage_rows(
    placed: PlacedPipeline,
    by_length: Sequence[PlacedPipeline] = (),
    length_of: Sequence[int] = (),
) -> Block:
    """Return the tables of placed stages.

    Args:
        placed: the stages.
        by_length: the same stages with the times and messages of each length of microbatches.
        length_of: which of these each microbatch has.

    Raises:
        PipeplanError: if neighbouring stages have no path.
    """
    classes = tuple(by_length) or (placed,)
    pairs = [(s, name) for s, row in enumerate(placed.stages) for name in row.spec.devices]
    members, makers = _members(placed, pairs)
    links = [row.load.links for row in placed.synchronisations]
    counts = [len(placed.stages), len(pairs), len(placed.devices), placed.microbatches]
    counts += [len(classes), len(members)]
    found = rows_for(*counts, *(sum(map(len, rows)) for rows in (members, links, makers)))
    names = "stages replicas devices microbatches classes reductions makers".split()
    for name, count in zip(names, [*counts, len(found[MAKER])], strict=True):
        found.numbers[name] = count
    set_rules(found, placed.behaviour)
    _fill_stages(found, placed, pairs)
    found[SECONDS][:] = np.ravel([_seconds(row, pairs) for row in classes])
    found[RECEIVED_BYTES][:] = [
        row.received(stage, kind)[0]
        for row in classes
        for stage, kind in product(range(len(row.stages)), "BF")
    ]
    found[RECEIVED_S][:] = [
        row.received_s(stage, kind, name)
        for row in classes
        for (stage, name), kind in product(pairs, "BF")
    ]
    found[LENGTH_OF][:] = list(length_of) or 0
    _fill_reductions(found, placed, members, links, makers)
    found[AHEAD_S][:] = np.ravel(
        [
            row.ahead[pairs[maker]]
            for timed in classes
            for row, own in zip(timed.synchronisations, makers, strict=True)
            for maker in own
        ]
    )
    return found


def set_rules(rows: Block, behaviour: RuntimeBehaviour) -> None:
    """Write the rules of a runtime into the header."""
    rows.numbers["send_blocks"] = behaviour.send == "blocking"
    rows.numbers["receive_blocks"] = behaviour.receive == "blocking"
    rows.numbers["exchange"] = EXCHANGES.index(behaviour.exchange)
    rows.numbers["one_stream"] = behaviour.streams == "one"
    rows.numbers["reduction_rule"] = RULES.index(behaviour.reduction)


def _fill_stages(rows: Block, placed: PlacedPipeline, pairs: Sequence[tuple[int, str]]) -> None:
    cluster, first = placed.problem.cluster, 0
    places = {name: number for number, name in enumerate(placed.devices)}
    for row, stage in zip(rows[STAGE], placed.stages, strict=True):
        count = len(stage.spec.devices)
        for field in _STAGE.names or ():
            if field.endswith("_bytes"):
                row[field] = min(getattr(stage, field), MOST_BYTES)
        row["first"], row["last"] = first, first + count
        row["is_together"] = bool(stage.collective_s) and count > 1
        first += count
    for row, (number, name) in zip(rows[REPLICA], pairs, strict=True):
        offload = placed.stages[number].offload_bytes
        row["stage"], row["device"] = number, places[name]
        row["split_extra_bytes"] = placed.split_extra_bytes(number, name)
        row["copy_s"] = copy_s(placed.problem, name, offload) if offload else 0.0
    for row, name in zip(rows[DEVICE], placed.devices, strict=True):
        row["number"], row["optimizer_s"] = cluster.numbers[name], placed.optimizer_s[name]
        row["static_bytes"] = min(placed.static_bytes(name), MOST_BYTES)
        row["capacity_bytes"] = min(placed.capacity_bytes(name), MOST_BYTES)


def _seconds(placed: PlacedPipeline, pairs: Sequence[tuple[int, str]]) -> list[list[float]]:
    times = [placed.stages[stage].times[name] for stage, name in pairs]
    return [[row.seconds(kind) for kind in KINDS] for row in times]


def _members(
    placed: PlacedPipeline, pairs: Sequence[tuple[int, str]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the devices and the makers of each reduction."""
    places = {name: number for number, name in enumerate(placed.devices)}
    replicas = {pair: number for number, pair in enumerate(pairs)}
    syncs = placed.synchronisations
    members = [[places[name] for name in row.devices] for row in syncs]
    return members, [[replicas[pair] for pair in row.ahead] for row in syncs]


def _fill_reductions(
    rows: Block,
    placed: PlacedPipeline,
    members: list[list[int]],
    links: Sequence[Sequence[int]],
    makers: list[list[int]],
) -> None:
    for name, table, found in (
        ("device", REDUCTION_DEVICE, members),
        ("link", REDUCTION_LINK, links),
        ("maker", MAKER, makers),
    ):
        ends = np.cumsum([0, *map(len, found)])
        rows[REDUCTION][f"first_{name}"], rows[REDUCTION][f"last_{name}"] = ends[:-1], ends[1:]
        rows[table][:] = [number for row in found for number in row]
    for row, sync in zip(rows[REDUCTION], placed.synchronisations, strict=True):
        row["seconds"], row["gathers"], row["gather_s"] = sync.seconds, sync.gathers, sync.gather_s
        row["bytes"], row["gathered_bytes"] = sync.bytes, sync.gathered_bytes
        row["latency_s"], row["gb_per_s"], row["gather_latency_s"], _ = sync.load
