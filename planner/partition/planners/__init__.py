"""The classic planners, one interface: what Pipeplan is measured against, and takes hints from."""

from __future__ import annotations

from collections.abc import Iterator

from planner.errors import InfeasibleError
from planner.partition.chain import Chain, Partition
from planner.partition.planners.autopipe import AUTOPIPE
from planner.partition.planners.dapple import DAPPLE
from planner.partition.planners.even import EVEN, EVEN_REPLICATED
from planner.partition.planners.pipedream import PIPEDREAM
from planner.partition.planners.planner import Planner
from planner.partition.planners.spp import SPP

PLANNERS = {
    planner.name: planner for planner in (EVEN, EVEN_REPLICATED, AUTOPIPE, DAPPLE, PIPEDREAM, SPP)
}
"""By name, the quickest first."""


def classic_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """What the classic planners choose, without repetitions, those that find nothing left out.

    Args:
        chain: the layers.
        max_stages: partitions with more stages are left out.
    """
    seen: set[Partition] = set()
    for planner in PLANNERS.values():
        try:
            partition = planner.plan(chain)
        except InfeasibleError:
            continue
        if len(partition) <= max_stages and partition not in seen:
            seen.add(partition)
            yield partition


__all__ = ["PLANNERS", "Planner", "classic_partitions"]
