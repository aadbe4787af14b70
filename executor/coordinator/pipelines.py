"""Pipelines as the coordinator sees them: incarnations, and the answers to their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from executor.coordinator.messages import Address, Answer
from planner.sync.groups.events import Group

Incarnations = tuple[tuple[int, int], ...]
"""Pipelines with the numbers of their incarnations."""


@dataclass
class PipelineRecord:
    """One pipeline's incarnation.

    Attributes:
        incarnation_id: of this incarnation; empty before the first.
        incarnation: counts them, from 1.
        greeted: by place that has said hello, the address at which it serves tensors.
        left: places that have said goodbye.
        is_there: whether groups may hold it.
        is_idle: whether it waits for others to end, at all places.
        since: orders the pipelines that are there by when they came.
        first_step: of this incarnation; groups of steps before it are not waited for.
        taken: by place, the last step whose share was asked for.
        shares: by step; None: the work is over.
        waiting: by place, the step whose share is asked for and not yet told.
        asked: by place, the step whose group is asked for and not yet told.
        told: by place and kind, the last answer.
        running: by place, the group it is in.
        snapshots: steps before which it puts its weights aside for others.
        loss: of its last step; None if it has none.
    """

    incarnation_id: str = ""
    incarnation: int = 0
    greeted: dict[int, str] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    is_there: bool = False
    is_idle: bool = False
    since: int = 0
    first_step: int = 1
    taken: dict[int, int] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    told: dict[tuple[int, str], Answer] = field(default_factory=dict)
    running: dict[int, Group] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)
    loss: float | None = None

    @property
    def next_step(self) -> int:
        """The first step that no place has asked a share for."""
        return max([self.first_step - 1, *self.taken.values()]) + 1


class Pipelines:
    """All pipelines, by number.

    Args:
        number: how many.
        places: of each.
    """

    def __init__(self, number: int, places: int) -> None:
        self.places = places
        self._pipelines = [PipelineRecord() for _ in range(number)]
        self._ended: set[tuple[int, str]] = set()

    def __len__(self) -> int:
        return len(self._pipelines)

    def __iter__(self) -> Iterator[PipelineRecord]:
        return iter(self._pipelines)

    def __getitem__(self, number: int) -> PipelineRecord:
        return self._pipelines[number]

    def begin_incarnation(
        self, number: int, incarnation_id: str, incarnation: int
    ) -> PipelineRecord:
        """Forget all that was of an earlier incarnation, or of this one."""
        before = self._pipelines[number].incarnation_id
        if before != incarnation_id:
            self._ended.add((number, before))
        self._pipelines[number] = PipelineRecord(incarnation_id, incarnation)
        return self._pipelines[number]

    def has_ended(self, number: int, incarnation_id: str) -> bool:
        """Return whether another has begun since, which a late greeting must not end."""
        return (number, incarnation_id) in self._ended

    @property
    def there(self) -> dict[str, int]:
        """Incarnations of the pipelines that take part, by number, in the order they came."""
        found = [(p.since, n) for n, p in enumerate(self._pipelines) if p.is_there]
        return {str(number): self._pipelines[number].incarnation for _, number in sorted(found)}

    def watched(self) -> list[Address]:
        """Return the ranks that have said hello and not goodbye."""
        return [
            (number, place, pipeline.incarnation_id)
            for number, pipeline in enumerate(self._pipelines)
            for place in sorted(pipeline.greeted.keys() - pipeline.left)
        ]

    def is_given_up(self, number: int, incarnation_id: str) -> bool:
        """Return whether an incarnation was lost, or another has begun since."""
        pipeline = self._pipelines[number]
        is_current = pipeline.incarnation_id == incarnation_id
        return self.has_ended(number, incarnation_id) or (is_current and not pipeline.greeted)

    def addresses(self, place: int) -> list[tuple[int, int, str]]:
        """Return number, incarnation and address of the pipelines that take part, as they came."""
        if place >= self.places:
            return []
        rows = ((int(number), incarnation) for number, incarnation in self.there.items())
        return [(n, incarnation, self[n].greeted[place]) for n, incarnation in rows]

    def incarnations_of(self, numbers: Iterable[int]) -> Incarnations:
        """These pipelines with their incarnations."""
        return tuple((number, self._pipelines[number].incarnation) for number in numbers)

    def wake(self, number: int) -> Iterator[Answer]:
        """Have the ranks that wait at all places put their weights aside."""
        pipeline = self._pipelines[number]
        for place, step in sorted(pipeline.waiting.items()):
            address = number, place, pipeline.incarnation_id
            yield Answer(address, {"kind": "snapshot", "step": step})

    def tell_all(self, number: int, body: dict[str, Any]) -> Iterator[Answer]:
        """Tell all places of a pipeline the same, and which incarnation this is."""
        pipeline = self._pipelines[number]
        for place in range(self.places):
            yield self.tell(number, place, {**body, "incarnation": pipeline.incarnation})

    def tell(self, number: int, place: int, body: dict[str, Any]) -> Answer:
        """Tell one rank, which may ask for it again."""
        pipeline = self._pipelines[number]
        answer = Answer((number, place, pipeline.incarnation_id), body)
        pipeline.told[place, body["kind"]] = answer
        return answer
