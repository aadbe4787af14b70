"""Tensor-parallel groups after a change of machines: those that are left, and new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from planner.cluster.cluster import Cluster
from planner.cluster.group_packing import packed
from planner.cluster.tensor_groups import TensorGroup
from planner.errors import PipeplanError
from planner.plan.tensor_parallel import TensorParallel
from planner.variants.clusters import without


def kept_groups(
    groups: Sequence[TensorGroup], survivors: Collection[str]
) -> tuple[TensorGroup, ...]:
    """Return the groups that have all their devices, and so hold whole layers."""
    return tuple(group for group in groups if set(survivors).issuperset(group.devices))


def regrouped(
    parallel: TensorParallel, kept: Sequence[TensorGroup], cluster: Cluster
) -> TensorParallel:
    """Return groups of the same size: those that are kept, and new ones of all other devices.

    Args:
        parallel: the groups before, of one size.
        kept: those of them that stay.
        cluster: of single devices, after the change.

    Raises:
        PipeplanError: if there are none.
    """
    degree = parallel.degrees[0]
    groups = [*kept, *_new_groups(kept, cluster, degree)]
    if not groups:
        raise PipeplanError(
            f"no tensor-parallel group of {degree} devices is left, and the cluster has "
            f"no {degree} joined devices of one type for another; plan anew with "
            "`pipeplan plan --set tensor_parallel=any` on the new cluster"
        )
    place = cluster.numbers
    groups.sort(key=lambda group: min(place[device] for device in group.devices))
    return parallel.model_copy(update={"groups": tuple(groups)})


def _new_groups(
    kept: Sequence[TensorGroup], cluster: Cluster, degree: int
) -> Iterator[TensorGroup]:
    """Yield groups of the devices that are in none; none if they cannot form any."""
    taken = {device for group in kept for device in group.devices}
    if len(cluster.devices) - len(taken) < degree:
        return
    try:
        found = packed(without(cluster, taken) if taken else cluster, degree)
    except PipeplanError:
        return  # Too few of one type, or not joined: they stay idle.
    names = {group.name for group in kept}
    for group in found:
        name, number = group.name, 1
        while name in names:
            number += 1
            name = f"{group.name}:{number}"
        names.add(name)
        yield group.model_copy(update={"name": name})
