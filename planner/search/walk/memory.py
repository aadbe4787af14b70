"""The memory of a walk: one block that holds all that its compiled functions read and write.

Compiled functions take the pointer ``w`` to it. Of N layers, K types, D devices, S stages and R
replicas at most, M microbatches:

- freedoms: MAY_CUT: N + 1, whether stages may begin and end there; ALLOWED_LAYERS: D x (N + 1), how
  many of the first layers each device may hold; APART: D x D, whether two devices may not hold the
  same stage, where ``has_apart``; UNLINKED: D x D, whether no path joins them; CLASS_OF: D,
  devices of one class are alike in all that layers take on them; PLACE_OF: D, node or island;
  NODE_OF and PRICE: D, for ``most_nodes`` and ``most_price``; ISLANDS: ``places`` x D, groups of
  devices that microbatches should not leave;
- costs: TYPE_OF and others: D, of :class:`planner.costs.network_table.NetworkTable`;
- of the layout that is judged: PLACE: D, the row of each device, -1: not in use; DEVICE_OF: R;
  FIRST: S + 1, the first replica of each stage; EACH_S: R, seconds of a forward and a backward;
  STAGE_FIGURES: S x K; NEEDS: D, bytes;
- OWNERS: assignments x (S x M), replicas worth trying; LINK_S: of each directed link, what messages
  take of it; ORDER, STARTS, FIRST_STAGE: the order of one
  of several pipelines; WHOLE and PIPELINE: blocks of stages with all limits chosen;
- the walk: HERE, TRIED, BEST: blocks of stages; KEYS, KNOWN_S: digests and seconds of layouts that
  were judged; RANDOM: the state of random numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.costs.stage_table import FIGURES
from planner.program.compiled import block

_BYTE, _INT, _LONG, _REAL = (np.dtype(kind) for kind in (np.int8, np.int32, np.int64, np.float64))
(
    WALK, MAY_CUT, ALLOWED_LAYERS, APART, UNLINKED, CLASS_OF, PLACE_OF, NODE_OF, PRICE, ISLANDS,
    TYPE_OF,
    CAPACITY_BYTES, OPTIMIZER_GB_PER_S, HOST_LINK_GB_PER_S, GATHER_LATENCY_S, GATHER_GB_PER_S,
    SUM_LATENCY_S, SUM_GB_PER_S, GROUP_DEVICES, HOST_S, RULES, PLACE,
    DEVICE_OF, FIRST, EACH_S, STAGE_FIGURES, NEEDS, OWNERS, ISLAND, COUNTS, FINISH_S,
    SLOWEST_S, HOMES, SHARE, USED, LINK_S, MICROBATCH, ORDER, STARTS, FIRST_STAGE, HELD, WHOLE,
    PIPELINE, HERE, TRIED, BEST, KEYS, KNOWN_S, RANDOM,
) = block(
    # freedoms
    "layers types devices min_stages max_stages most_on_device replicates least_equal placement"
    " microbatches most_nodes has_apart has_unlinked has_rules has_sizes places"
    # schedules
    " may_split may_stay_whole is_1f1b blocks may_rerun may_offload in_blocks"
    # costs
    " shares_state divides problem_copies copies"
    # addresses of other blocks, and of functions
    " table rows schedule wires gradients program work prepare_at"
    " judge_at orders"
    # arguments of these: of a layout or of one pipeline, and the microbatches it runs
    " of_pipeline share"
    # whether the next layout is scheduled in all ways, or as it says
    " looks_closely"
    # tasks to replay until which a close look goes on
    " until_tasks"
    # counts: layouts judged, changes
    " layouts tasks",
    reals="most_price here_s best_s most_s",
    may_cut=_BYTE, allowed_layers=_INT, apart=_BYTE, unlinked=_BYTE, class_of=_INT,
    place_of=_INT, node_of=_INT,
    price=_REAL, islands=_INT, type_of=_INT, capacity_bytes=_LONG, optimizer_gb_per_s=_REAL,
    host_link_gb_per_s=_REAL, gather_latency_s=_REAL, gather_gb_per_s=_REAL, sum_latency_s=_REAL,
    sum_gb_per_s=_REAL, group_devices=_LONG,
    # HOST_S: twice (computation, message, bytes of a message copied a second), for one stage a
    # device and for several; RULES: twice the numbers of a runtime's rules in the tables of rows,
    # and whether gradients are reduced in buckets.
    host_s=_REAL, rules=_LONG,
    place=_INT, device_of=_INT, first=_INT, each_s=_REAL,
    stage_figures=FIGURES, needs=_REAL,
    owners=_INT, island=_INT, counts=_INT, finish_s=_REAL, slowest_s=_REAL, homes=_INT, share=_INT,
    used=_INT, link_s=_REAL, microbatch=_INT, order=_INT, starts=_INT, first_stage=_INT,
    held=_INT, whole=_INT, pipeline=_INT, here=_INT, tried=_INT, best=_INT,
    keys=np.dtype(np.uint64), known_s=_REAL, random=np.dtype(np.uint64),
)  # fmt: skip
ANY, LOOP_OR_V, LOOP = 0, 1, 2
"""Values of ``placement``."""
MOST_OWNERS = 6


def write(memory: Any, table: int, values: Any) -> None:
    """Write a table of a block from its start."""
    row = np.ravel(np.asarray(values))
    memory[table][: len(row)] = row
