"""Partitions worth scheduling before any search: even, classic, balanced along orders, looped."""

from collections.abc import Iterator

from planner.partition.chain import Chain, Partition, StageChoice
from planner.partition.device_orders import device_orders
from planner.partition.dynamic_program import partitions_along
from planner.partition.looped import looped_partitions
from planner.partition.planners import classic_partitions


def candidate_partitions(chain: Chain, max_stages: int) -> Iterator[Partition]:
    """Distinct candidates; the first ones are cheap and always there."""
    seen: set[Partition] = set()
    for partition in _all(chain, max_stages):
        if partition not in seen:
            seen.add(partition)
            yield partition


def _all(chain: Chain, max_stages: int) -> Iterator[Partition]:
    job = chain.problem.job
    for count in range(1, max_stages + 1):
        yield even_partition(chain, count)
    yield from classic_partitions(chain, max_stages)
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
