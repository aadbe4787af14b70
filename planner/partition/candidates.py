"""Partitions worth scheduling before any search: even, classic, balanced along orders, looped."""

from collections.abc import Iterator

from planner.partition.chain import Chain, Partition, StageChoice
from planner.partition.device_orders import device_orders
from planner.partition.dynamic_program import partitions_along
from planner.partition.looped import looped_partitions
from planner.partition.planners import classic_partitions

MAX_DEVICES_FOR_TABLES = 32
"""Programs with a table for every number of stages take too long beyond this."""
MOST_EVEN = 64
"""Even splits into more stages are left out."""


def quick_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Even splits and what the classic planners choose, the cheapest first."""
    for count in range(1, min(max_stages, MOST_EVEN) + 1):
        yield even_partition(chain, count)
    yield from classic_partitions(chain, max_stages)


def thorough_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Balanced partitions for every number of stages; several stages a device where allowed."""
    job = chain.problem.job
    if len(chain.problem.cluster.devices) > MAX_DEVICES_FOR_TABLES:
        return
    seconds = {
        name: float((chain.forward_s(name) + chain.backward_s(name)).sum()) for name in chain.types
    }
    for order in device_orders(chain.problem.cluster, seconds):
        yield from partitions_along(chain, order, max_stages)
        for rounds in range(2, job.max_stages_per_device + 1):
            yield from looped_partitions(chain, order, rounds)


def even_partition(chain: Chain, count: int) -> Partition:
    """Equal numbers of layers on the first devices: what is used when nothing is planned."""
    cuts = [round(chain.length * j / count) for j in range(count + 1)]
    devices = chain.problem.cluster.device_names
    return tuple(StageChoice(cuts[j], cuts[j + 1], (devices[j],)) for j in range(count))
