"""Partitions worth scheduling before any search: even, classic, balanced along orders, looped."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from planner.partition.chain import Chain, Partition, StageChoice
from planner.partition.device_orders import device_orders
from planner.partition.dynamic_program import partitions_along
from planner.partition.looped import looped_partitions

MAX_DEVICES_FOR_TABLES = 32
MAX_LAYERS_FOR_TABLES = 800
"""Programs with a table for every number of stages take too long beyond this."""
GRIDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Numbers of stages of the grids."""
MOST_EVEN = 64
"""Even splits into more stages are left out."""


def simple_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Equal work on equal numbers of devices, and even splits: no search at all."""
    yield from grid_partitions(chain, max_stages)
    for count in range(1, min(max_stages, MOST_EVEN) + 1):
        yield even_partition(chain, count)


def grid_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Equal numbers of neighbouring devices a stage, equal work: what people draw on paper."""
    names = chain.problem.cluster.device_names
    if not chain.problem.job.replication:
        return
    seconds = chain.work_s.max(axis=0)
    done = np.cumsum(seconds + seconds.sum() / chain.length * 1e-6)
    for count in GRIDS:
        if count > min(max_stages, len(names)) or len(names) % count:
            continue
        shares = done[-1] * np.arange(1, count) / count
        cuts = [0, *(int(x) + 1 for x in np.searchsorted(done, shares)), chain.length]
        if all(first < second for first, second in pairwise(cuts)):
            held = len(names) // count
            yield tuple(
                StageChoice(cuts[j], cuts[j + 1], names[j * held : (j + 1) * held])
                for j in range(count)
            )


def thorough_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Balanced partitions for every number of stages; several stages a device where allowed."""
    job = chain.problem.job
    if len(chain.problem.cluster.devices) > MAX_DEVICES_FOR_TABLES:
        return
    if chain.length > MAX_LAYERS_FOR_TABLES:
        return
    seconds = dict(zip(chain.types, chain.work_s.sum(axis=1).tolist(), strict=True))
    for order in device_orders(chain.problem.cluster, seconds):
        yield from partitions_along(chain, order, max_stages)
        for rounds in range(2, job.max_stages_per_device + 1):
            yield from looped_partitions(chain, order, rounds)


def even_partition(chain: Chain, count: int) -> Partition:
    """Equal numbers of layers on the first devices: what is used when nothing is planned."""
    cuts = [round(chain.length * j / count) for j in range(count + 1)]
    devices = chain.problem.cluster.device_names
    return tuple(StageChoice(cuts[j], cuts[j + 1], (devices[j],)) for j in range(count))
