"""Candidates with several stages a device: the stages go round the devices more than once."""

from collections.abc import Iterator
from dataclasses import replace

from planner.partition.chain import Chain, Partition, StageChoice
from planner.partition.dynamic_program import partitions_along


def looped_partitions(chain: Chain, order: tuple[str, ...], rounds: int) -> Iterator[Partition]:
    """Partitions into ``rounds`` stages a device, placed as in interleaved 1F1B.

    Narayanan et al. 2021, "Efficient large-scale language model training", section 2.2: stage i
    lies on device i modulo the number of devices. The boundaries balance the stages as if each
    had a device of its own; devices of different speed get different stages that way only in
    the first round, so mixed clusters are better served by one stage a device.
    """
    job = chain.problem.job.model_copy(update={"replication": False})
    single = Chain(replace(chain.problem, job=job))
    most = min(chain.length, job.max_stages or chain.length)
    for used in range(2, len(order) + 1):
        count = used * rounds
        if count > most:
            return
        virtual = order[:used] * rounds
        for partition in partitions_along(single, virtual, count):
            if len(partition) == count:
                yield _on(partition, virtual)


def _on(partition: Partition, devices: tuple[str, ...]) -> Partition:
    return tuple(
        StageChoice(stage.begin, stage.end, (device,))
        for stage, device in zip(partition, devices, strict=True)
    )
