"""Small changes of a partition: shift a boundary, move or swap devices, split or merge stages."""

from collections.abc import Iterator
from dataclasses import replace

from planner.partition.chain import Chain, Partition, StageChoice, without_recompute


def neighbours(chain: Chain, partition: Partition, max_stages: int) -> Iterator[Partition]:
    """All partitions one step away, with one stage a device and nothing recomputed."""
    partition = without_recompute(partition)
    yield from _shifted_boundaries(partition)
    yield from _swapped_devices(chain, partition)
    yield from _merged_stages(partition)
    if chain.problem.job.replication:
        yield from _moved_devices(chain, partition)
    if len(partition) < max_stages:
        yield from _split_stages(chain, partition)


def _shifted_boundaries(partition: Partition) -> Iterator[Partition]:
    for j in range(len(partition) - 1):
        first, second = partition[j], partition[j + 1]
        for step in (-4, -2, -1, 1, 2, 4):
            cut = first.end + step
            if first.begin < cut < second.end:
                yield _with(
                    partition, {j: replace(first, end=cut), j + 1: replace(second, begin=cut)}
                )


def _swapped_devices(chain: Chain, partition: Partition) -> Iterator[Partition]:
    """Exchange two devices of different stages, or one with an unused one."""
    for j, stage in enumerate(partition):
        for device in stage.devices:
            for other in _unused(chain, partition):
                yield _with(partition, {j: _replaced(chain, stage, device, other)})
            for k in range(j + 1, len(partition)):
                for other in partition[k].devices:
                    yield _with(
                        partition,
                        {
                            j: _replaced(chain, stage, device, other),
                            k: _replaced(chain, partition[k], other, device),
                        },
                    )


def _moved_devices(chain: Chain, partition: Partition) -> Iterator[Partition]:
    """Add an unused device to a stage, drop a replica, or give one to another stage."""
    for j, stage in enumerate(partition):
        for device in _unused(chain, partition):
            yield _with(partition, {j: _on(chain, stage, {*stage.devices, device})})
        if len(stage.devices) == 1:
            continue
        for device in stage.devices:
            less = _on(chain, stage, set(stage.devices) - {device})
            yield _with(partition, {j: less})
            for k, target in enumerate(partition):
                if k != j:
                    more = _on(chain, target, {*target.devices, device})
                    yield _with(partition, {j: less, k: more})


def _merged_stages(partition: Partition) -> Iterator[Partition]:
    """Join two neighbouring stages on the devices of either; on both only if replicated."""
    for j in range(len(partition) - 1):
        first, second = partition[j], partition[j + 1]
        for devices in (first.devices, second.devices):
            merged = StageChoice(first.begin, second.end, devices)
            yield (*partition[:j], merged, *partition[j + 2 :])


def _split_stages(chain: Chain, partition: Partition) -> Iterator[Partition]:
    """Cut a stage at three places; the new stage gets an unused device or half the replicas."""
    for j, stage in enumerate(partition):
        quarters = {stage.begin + (stage.end - stage.begin) * part // 4 for part in (1, 2, 3)}
        for cut in sorted(quarters - {stage.begin}):
            for kept, given in _device_splits(chain, partition, stage):
                yield (
                    *partition[:j],
                    StageChoice(stage.begin, cut, kept),
                    StageChoice(cut, stage.end, given),
                    *partition[j + 1 :],
                )


def _device_splits(
    chain: Chain, partition: Partition, stage: StageChoice
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    for device in _unused(chain, partition):
        yield stage.devices, (device,)
        yield (device,), stage.devices
    half = len(stage.devices) // 2
    if half:
        yield stage.devices[:half], stage.devices[half:]


def _unused(chain: Chain, partition: Partition) -> list[str]:
    used = {device for stage in partition for device in stage.devices}
    return [device for device in chain.problem.cluster.device_names if device not in used]


def _on(chain: Chain, stage: StageChoice, devices: set[str]) -> StageChoice:
    names = chain.problem.cluster.device_names
    return replace(stage, devices=tuple(name for name in names if name in devices))


def _replaced(chain: Chain, stage: StageChoice, old: str, new: str) -> StageChoice:
    return _on(chain, stage, (set(stage.devices) - {old}) | {new})


def _with(partition: Partition, changes: dict[int, StageChoice]) -> Partition:
    return tuple(changes.get(j, stage) for j, stage in enumerate(partition))
