"""Devices for the stages of an old plan after a change of machines, in ways that move few bytes.

A stage keeps its devices that are left. One that has none is dropped, or gets spare devices. Spare
devices (new ones, and those the plan left idle) stay out, join the stages that have most to do, or
become a stage of their own. Slow devices stay or go. A stage's replicas may also become two stages,
which hold all they need already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from planner.cluster.link_table import LinkTable
from planner.replanning.recut import Groups

MOST_PLACES = 12
"""The most positions between old stages at which a new one is tried."""


@dataclass(frozen=True)
class OldStage:
    """A stage of the old plan.

    Attributes:
        devices: numbers of its devices that are left.
        work_s: forward and backward seconds of one microbatch on the fastest type.
    """

    devices: tuple[int, ...]
    work_s: float


@dataclass(frozen=True)
class Repairs:
    """Groups of devices for the stages of one plan.

    Attributes:
        stages: of the old plan.
        devices: number of devices there are now.
        slowed: numbers of the devices that became slower.
        links: between the devices.
        max_stages: the most groups.
        most_on_device: the most stages on one device.
        replicates: whether a stage may have several devices.
    """

    stages: tuple[OldStage, ...]
    devices: int
    slowed: Collection[int]
    links: LinkTable
    max_stages: int
    most_on_device: int
    replicates: bool

    def groups(self) -> Iterator[Groups]:
        """Yield groups, each once, in the order of how little they change."""
        known: set[Groups] = set()
        for found in self._all():
            counts = Counter(device for group in found for device in group)
            is_doubled = any(len(set(group)) < len(group) for group in found)
            is_possible = 0 < len(found) <= self.max_stages and not is_doubled
            if is_possible and max(counts.values()) <= self.most_on_device and found not in known:
                known.add(found)
                yield found

    def _all(self) -> Iterator[Groups]:
        used = {device for stage in self.stages for device in stage.devices}
        unused = tuple(device for device in range(self.devices) if device not in used)
        for filled in self._filled(unused):
            held = {device for group in filled for device in group}
            spares = [device for device in unused if device not in held]
            groups = tuple(group for group in filled if group)
            for kept in dict.fromkeys((groups, self._without_slow(groups))):
                yield kept
                if spares:
                    yield from self._with_spares(kept, spares)
                yield from _divided(kept)

    # --- stages that lost all devices ---------------------------------------------------------

    def _filled(self, spares: Sequence[int]) -> Iterator[Groups]:
        """Yield the stages' groups, those without devices filled by spare ones, or left empty."""
        left = tuple(stage.devices for stage in self.stages)
        empty = [place for place, group in enumerate(left) if not group]
        if empty and len(spares) >= len(empty):
            yield self._from_spares(left, empty, spares)
        yield left

    def _from_spares(self, left: Groups, empty: Sequence[int], spares: Sequence[int]) -> Groups:
        """Give each empty stage spare devices near its neighbours, in rounds while they last."""
        groups, rest = [list(group) for group in left], list(spares)
        usual = max((len(group) for group in left), default=1) or 1
        for _ in range(usual if self.replicates else 1):
            if len(rest) < len(empty):
                break
            for index in empty:
                nearest = min(rest, key=partial(self._distance, groups=left, index=index))
                rest.remove(nearest)
                groups[index].append(nearest)
        return _ordered(groups)

    def _distance(self, device: int, groups: Groups, index: int) -> tuple[float, int]:
        """Return seconds a byte to the neighbouring stages, then the place in the file."""
        others = [d for k in (index - 1, index + 1) if 0 <= k < len(groups) for d in groups[k]]
        return float(self.links.s_per_byte[device, others].mean()) if others else 0.0, device

    # --- spare and slow devices ---------------------------------------------------------------

    def _with_spares(self, groups: Groups, spares: Sequence[int]) -> Iterator[Groups]:
        if self.replicates and groups:
            yield self._joined(groups, spares)
        new = tuple(spares) if self.replicates else tuple(spares[:1])
        places = range(len(groups) + 1)
        for position in places[:: -(-len(places) // MOST_PLACES)]:
            yield (*groups[:position], new, *groups[position:])
        slow = [device for group in groups for device in group if device in self.slowed]
        image = dict(zip(slow, spares, strict=False))
        if image:
            yield _ordered([[image.get(d, d) for d in group] for group in groups])

    def _joined(self, groups: Groups, spares: Sequence[int]) -> Groups:
        """Put each spare device into the group that has most to do for its size."""
        grown = [list(group) for group in groups]
        work_of = {device: stage.work_s for stage in self.stages for device in stage.devices}
        work = [work_of.get(group[0], 1.0) for group in groups]
        for device in spares:
            index = max(range(len(grown)), key=lambda k: (work[k] / len(grown[k]), -k))
            grown[index].append(device)
        return _ordered(grown)

    def _without_slow(self, groups: Groups) -> Groups:
        """Leave out slow devices where others of the group are not slow."""
        return tuple(
            tuple(device for device in group if device not in self.slowed) or group
            for group in groups
        )


def _ordered(groups: Sequence[Collection[int]]) -> Groups:
    """Sort the devices of each group in the cluster's order."""
    return tuple(tuple(sorted(group)) for group in groups)


def _divided(groups: Groups) -> Iterator[Groups]:
    """Yield the groups with one of them cut in two: both parts hold what either needs."""
    for index, group in enumerate(groups):
        half = len(group) // 2
        if half:
            yield (*groups[:index], group[:half], group[half:], *groups[index + 1 :])
