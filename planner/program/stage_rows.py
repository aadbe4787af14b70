"""Placed stages in tables for compiled code: all figures of stages that a program is made from.

A *replica* is one device of one stage. Operations have the kinds B, F, I, W, numbered 0 to 3 as
their letters sort. A *class* of microbatches has times and messages of its own; where all
microbatches have one length there is one class.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.plan.runtime_rules import RuntimeBehaviour
from planner.program.compiled import Block, block
from planner.program.program import INT, REAL

EXCHANGES = ("single", "neighbour", "together", "pairs")
RULES = ("bucket", "stage", "device", "flush")
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


def set_rules(rows: Block, behaviour: RuntimeBehaviour) -> None:
    """Write the rules of a runtime into the header."""
    rows.numbers["send_blocks"] = behaviour.send == "blocking"
    rows.numbers["receive_blocks"] = behaviour.receive == "blocking"
    rows.numbers["exchange"] = EXCHANGES.index(behaviour.exchange)
    rows.numbers["one_stream"] = behaviour.streams == "one"
    rows.numbers["reduction_rule"] = RULES.index(behaviour.reduction)
