"""The assignment of microbatches to the replicas of each stage.

A balanced assignment gives a microbatch to whichever replica would finish it first. Where links
between nodes are slow, a local one keeps it from stage to stage inside a node, or inside one of
several equal groups of devices, each of which is then a pipeline.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage

Islands = Mapping[str, int]
"""By device, the number of the group that a microbatch should not leave."""
Assignment = Mapping[tuple[int, int], str]
"""The device that runs each (stage, microbatch)."""
_Heap = list[tuple[float, int, float]]
"""When each worker would finish one thing more, its number, and its seconds for each."""
_INSTANT_S = 1e-15


def assignments(pipeline: PlacedPipeline) -> list[Assignment]:
    """Return assignments worth trying: those that are local, then the balanced one."""
    balanced = balanced_assignment(pipeline)
    found: list[Assignment] = []
    if pipeline.has_replicas:
        for islands in islands_of(pipeline):
            found.append(local_assignment(pipeline, islands))
            found.append(_following(pipeline, islands, balanced))
        found.append(local_assignment(pipeline, equal_groups(pipeline)))
    found.append(balanced)
    return [owner for place, owner in enumerate(found) if owner not in found[:place]]


def balanced_assignment(pipeline: PlacedPipeline) -> Assignment:
    """Give each microbatch to the replica that would finish it first.

    Replicas of different speed take different numbers of microbatches; for one stage alone this
    greedy rule minimises the slowest replica's load.
    """
    return local_assignment(pipeline, dict.fromkeys(pipeline.devices, 0))


def local_assignment(pipeline: PlacedPipeline, islands: Islands) -> Assignment:
    """Give each microbatch an island, and at every stage to a replica there if there is one.

    An island's share is in proportion to the speed of its slowest stage; its replicas share as in
    :func:`balanced_assignment`.
    """
    slowest_s: dict[int, float] = defaultdict(float)
    for stage in pipeline.stages:
        for island, seconds in _seconds_by_island(stage, islands).items():
            slowest_s[island] = max(slowest_s[island], seconds)
    heap = [(seconds, island, seconds) for island, seconds in slowest_s.items()]
    heapq.heapify(heap)
    homes = [_first_to_finish(heap) for _ in range(pipeline.microbatches)]
    owner: dict[tuple[int, int], str] = {}
    for index, stage in enumerate(pipeline.stages):
        heaps = _heaps(stage, islands)
        for microbatch, home in enumerate(homes):
            replicas = heaps.get(home) or min(heaps.values())
            owner[index, microbatch] = stage.spec.devices[_first_to_finish(replicas)]
    return owner


def _following(pipeline: PlacedPipeline, islands: Islands, balanced: Assignment) -> Assignment:
    """Keep each microbatch in its island as far as replicas have as much to do as if balanced.

    Where a stage has more of its speed in another island than the stage before, some move there,
    spread evenly over the microbatches.
    """
    owner: dict[tuple[int, int], str] = {}
    microbatches = range(pipeline.microbatches)
    homes = [islands[balanced[0, m]] for m in microbatches]
    for index, stage in enumerate(pipeline.stages):
        homes = _moved(homes, Counter(islands[balanced[index, m]] for m in microbatches))
        heaps = _heaps(stage, islands)
        for microbatch, home in enumerate(homes):
            owner[index, microbatch] = stage.spec.devices[_first_to_finish(heaps[home])]
    return owner


def _moved(homes: Sequence[int], shares: Mapping[int, int]) -> list[int]:
    """Return the next islands of the microbatches, of which each island has its share in all.

    None is ahead of its share by more than one at any time, nor behind at the end.
    """
    count, used, moved = len(homes), Counter[int](), []
    for number, home in enumerate(homes):
        due = {island: share * (number + 1) / count for island, share in shares.items()}
        if used[home] >= min(shares.get(home, 0), due.get(home, 0.0) + 1):
            home = max(shares, key=lambda i: (used[i] < shares[i], due[i] - used[i], -i))
        used[home] += 1
        moved.append(home)
    return moved


def _heaps(stage: PlacedStage, islands: Islands) -> dict[int, _Heap]:
    """Return the replicas of each island, by the time they would finish one microbatch."""
    heaps: dict[int, _Heap] = {}
    for position, device in enumerate(stage.spec.devices):
        seconds = _each_s(stage, device)
        heaps.setdefault(islands[device], []).append((seconds, position, seconds))
    for heap in heaps.values():
        heapq.heapify(heap)
    return heaps


def _first_to_finish(heap: _Heap) -> int:
    """Give one thing more to the worker that would finish it first, and return its number."""
    finish, number, seconds = heap[0]
    heapq.heapreplace(heap, (finish + seconds, number, seconds))
    return number


def _each_s(stage: PlacedStage, device: str) -> float:
    return stage.times[device].forward_s + stage.times[device].backward_s


def _seconds_by_island(stage: PlacedStage, islands: Islands) -> dict[int, float]:
    """Return the seconds of a microbatch more on each island, whose replicas share the work."""
    speed: dict[int, float] = defaultdict(float)
    for device in stage.spec.devices:
        speed[islands[device]] += 1 / max(_each_s(stage, device), _INSTANT_S)
    return {island: 1 / total for island, total in speed.items()}


# --- islands --------------------------------------------------------------------------------------


def islands_of(pipeline: PlacedPipeline) -> list[Islands]:
    """Return groups of devices that are nearer to each other than to the rest, such as nodes.

    Those joined by wide links, and those at the same switches; none where all devices are one
    group.
    """
    cluster, devices = pipeline.problem.cluster, pipeline.devices
    found: list[Islands] = []
    if (by_links := cluster.link_table.groups) is not None:
        found.append({d: int(by_links[cluster.numbers[d]]) for d in devices})
    switches, numbers = frozenset(cluster.switches), dict[frozenset[str], int]()
    attached = {d: switches.intersection(cluster.graph[d]) for d in devices}
    found.append({d: numbers.setdefault(attached[d], len(numbers)) for d in devices})
    return [islands for islands in found if len(set(islands.values())) > 1]


def equal_groups(pipeline: PlacedPipeline) -> Islands:
    """Return the most groups with as many replicas of each type in every stage, in file order.

    Each runs equally many microbatches. A device of several stages has the group of its last one.
    """
    cluster, rows = pipeline.problem.cluster, list[list[str]]()
    for stage in pipeline.stages:
        by_type: dict[str, list[str]] = {}
        for device in sorted(stage.spec.devices, key=cluster.numbers.__getitem__):
            by_type.setdefault(cluster.type_of(device), []).append(device)
        rows += by_type.values()
    count = math.gcd(pipeline.microbatches, *map(len, rows))
    return {d: place * count // len(row) for row in rows for place, d in enumerate(row)}


def microbatches_by_replica(owner: Assignment) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return the microbatches each replica runs, in order; replicas that run none are left out."""
    rows: dict[tuple[int, str], list[int]] = {}
    for (stage, microbatch), device in sorted(owner.items()):
        rows.setdefault((stage, device), []).append(microbatch)
    return {replica: tuple(row) for replica, row in rows.items()}
