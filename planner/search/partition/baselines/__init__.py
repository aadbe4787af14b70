"""The published planners Pipeplan is measured against and takes starting points from.

``BASELINES`` has them by name, and ``classic_partitions`` yields what they choose for a chain:
``even`` (equal numbers of layers), ``grid`` (every even layout), ``autopipe``, ``dapple`` (with its
latency model in ``dapple_latency``), ``pipedream`` and ``spp``. ``baseline`` is their interface;
``stage_costs`` has the costs of stages, channels and reductions in their models; ``chunks`` cuts
what they choose into two chunks a device.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.errors import InfeasibleError
from planner.search.partition.baselines.autopipe import AUTOPIPE
from planner.search.partition.baselines.baseline import Baseline
from planner.search.partition.baselines.dapple import DAPPLE
from planner.search.partition.baselines.even import EVEN, EVEN_REPLICATED
from planner.search.partition.baselines.grid import GRID
from planner.search.partition.baselines.pipedream import PIPEDREAM
from planner.search.partition.baselines.spp import SPP
from planner.search.partition.chain import Chain, Partition

BASELINES = {
    baseline.name: baseline
    for baseline in (EVEN, EVEN_REPLICATED, GRID, AUTOPIPE, DAPPLE, PIPEDREAM, SPP)
}
"""By name, the quickest first."""


def classic_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Yield what the baselines choose, without repetitions, leaving out those that find nothing.

    The grid is left out: other steps of a search try even stages with replicas.

    Args:
        chain: the layers.
        max_stages: partitions with more stages are left out.
    """
    seen: set[Partition] = set()
    for baseline in BASELINES.values():
        if baseline is GRID:
            continue
        try:
            partition = baseline.partition(chain, quick=True)
        except InfeasibleError:
            continue
        if len(partition) <= max_stages and partition not in seen:
            seen.add(partition)
            yield partition


__all__ = ["BASELINES", "GRID", "Baseline", "classic_partitions"]
