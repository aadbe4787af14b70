"""Groups of devices for the stages of a plan whose machines changed: repairs, by simple rules.

A stage keeps its devices that are left. One that has none is dropped, or gets a spare device, or
one that another stage can do without. Spare devices (new ones, and those the plan left idle) stay
out, join the stages that have most to do, or become a stage of their own. Slow devices stay or go.
A stage's replicas may also become two stages, which hold all they need already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from planner.replanning.recut import Groups
from planner.search.partition.chain import Chain

MOST_PLACES = 12
"""The most positions between old stages at which a new one is tried."""


@dataclass(frozen=True)
class OldStage:
    """A stage of the old plan.

    Attributes:
        devices: of it that are left.
        work_s: forward and backward seconds of one microbatch on the fastest type.
    """

    devices: tuple[str, ...]
    work_s: float


@dataclass(frozen=True)
class Repairs:
    """Groups for the stages of one plan.

    Attributes:
        chain: of the new problem.
        stages: of the old plan.
        spares: devices that no stage has.
        slowed: devices that became slower.
        max_stages: the most groups.
    """

    chain: Chain
    stages: tuple[OldStage, ...]
    spares: tuple[str, ...]
    slowed: Collection[str]
    max_stages: int

    def groups(self) -> Iterator[Groups]:
        """Yield groups, each once, in the order of how little they change."""
        known: set[Groups] = set()
        for found in self._all():
            if 0 < len(found) <= self.max_stages and found not in known:
                known.add(found)
                yield found

    def _all(self) -> Iterator[Groups]:
        for filled in self._filled():
            used = {device for group in filled for device in group}
            spares = [device for device in self.spares if device not in used]
            groups = tuple(group for group in filled if group)
            for kept in dict.fromkeys((groups, self._without_slow(groups))):
                yield kept
                if spares:
                    yield from self._with_spares(kept, spares)
                yield from divided(kept)

    # --- stages that lost all devices ---------------------------------------------------------

    def _filled(self) -> Iterator[Groups]:
        """Yield the stages' groups, those without devices filled in several ways, or left empty."""
        left = tuple(stage.devices for stage in self.stages)
        empty = [place for place, group in enumerate(left) if not group]
        if empty and len(self.spares) >= len(empty):
            yield self._from_spares(left, empty)
        if empty and self._may_give(left):
            yield self._given(left, empty, once=True)
            yield self._given(left, empty, once=False)
        yield left

    def _from_spares(self, left: Groups, empty: Sequence[int]) -> Groups:
        """Give each empty stage spare devices near its neighbours, in rounds while they last."""
        groups, spares = [list(group) for group in left], list(self.spares)
        usual = max((len(group) for group in left), default=1) or 1
        for _ in range(usual if self.chain.problem.job.replication else 1):
            if len(spares) < len(empty):
                break
            for place in empty:
                nearest = min(spares, key=partial(self._distance, groups=left, place=place))
                spares.remove(nearest)
                groups[place].append(nearest)
        return self._ordered(groups)

    def _may_give(self, groups: Groups) -> bool:
        return any(len(group) > 1 for group in groups)

    def _given(self, left: Groups, empty: Sequence[int], *, once: bool) -> Groups:
        """Give empty stages devices of the largest groups: one each, or until all are alike."""
        groups = [list(group) for group in left]
        while True:
            place = min(empty, key=lambda p: len(groups[p]))
            donor = max(range(len(groups)), key=lambda k: (len(groups[k]), -abs(k - place)))
            is_served = all(groups[p] for p in empty)
            if len(groups[donor]) < 2 or (is_served and once):
                break
            if is_served and len(groups[donor]) - len(groups[place]) < 2:
                break
            giving = min(groups[donor], key=partial(self._distance, groups=left, place=place))
            groups[donor].remove(giving)
            groups[place].append(giving)
        return self._ordered(groups)

    def _distance(self, device: str, groups: Groups, place: int) -> tuple[float, int]:
        """Return seconds a byte to the neighbouring stages, then the place in the file."""
        numbers, table = self.chain.problem.cluster.numbers, self.chain.problem.cluster.link_table
        others = [d for k in (place - 1, place + 1) if 0 <= k < len(groups) for d in groups[k]]
        rows = [numbers[other] for other in others]
        widths = table.s_per_byte[numbers[device], rows] if rows else None
        return (float(widths.mean()) if widths is not None else 0.0), numbers[device]

    # --- spare and slow devices ---------------------------------------------------------------

    def _with_spares(self, groups: Groups, spares: Sequence[str]) -> Iterator[Groups]:
        replication = self.chain.problem.job.replication
        if replication and groups:
            yield self._joined(groups, spares)
        new = tuple(spares) if replication else tuple(spares[:1])
        places = range(len(groups) + 1)
        for place in places[:: -(-len(places) // MOST_PLACES)]:
            yield (*groups[:place], new, *groups[place:])
        yield from self._exchanged(groups, spares)

    def _joined(self, groups: Groups, spares: Sequence[str]) -> Groups:
        """Put each spare device into the group that has most to do for its size."""
        grown = [list(group) for group in groups]
        work = self._work_of(groups)
        for device in spares:
            place = max(range(len(grown)), key=lambda k: (work[k] / len(grown[k]), -k))
            grown[place].append(device)
        return self._ordered(grown)

    def _work_of(self, groups: Groups) -> list[float]:
        """Return the work of each group's old stage; equal where stages are gone."""
        of = {device: stage.work_s for stage in self.stages for device in stage.devices}
        return [of.get(group[0], 1.0) for group in groups]

    def _exchanged(self, groups: Groups, spares: Sequence[str]) -> Iterator[Groups]:
        """Put spare devices in the place of slow ones."""
        slow = [device for group in groups for device in group if device in self.slowed]
        image = dict(zip(slow, spares, strict=False))
        if image:
            yield self._ordered([[image.get(d, d) for d in group] for group in groups])

    def _without_slow(self, groups: Groups) -> Groups:
        """Leave out slow devices where others of the group are not slow."""
        return tuple(
            tuple(device for device in group if device not in self.slowed) or group
            for group in groups
        )

    def _ordered(self, groups: Sequence[Collection[str]]) -> Groups:
        """Sort the devices of each group in the cluster's order."""
        place: Callable[[str], int] = self.chain.problem.cluster.numbers.__getitem__
        return tuple(tuple(sorted(group, key=place)) for group in groups)


def divided(groups: Groups) -> Iterator[Groups]:
    """Yield the groups with one of them cut in two: both parts hold what either needs."""
    for place, group in enumerate(groups):
        half = len(group) // 2
        if half:
            yield (*groups[:place], group[:half], group[half:], *groups[place + 1 :])
