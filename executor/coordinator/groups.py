"""Assigns ranks to averaging groups: they ask, and get a group once the scheduler has one."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator

from executor.coordinator.messages import Answer, Ask, Take
from executor.coordinator.pipelines import Incarnations, PipelineRecord, Pipelines
from planner.sync.groups.events import (
    Event,
    Finished,
    Group,
    GroupRequest,
    Joined,
    Left,
    Tick,
)
from planner.sync.groups.scheduler import Scheduler

KEPT = 32
"""Process groups that a rank keeps: each has connections to all its members, and a thread."""


class Generations:
    """Which generation of a process group all its members use.

    A rank keeps the process groups of the last sets of members it was in. Whoever meets a set again
    has to know whether all others have kept theirs too. The coordinator tells every rank its groups
    in order, so that it knows what each has kept.
    """

    def __init__(self) -> None:
        self._generation: dict[tuple[int, Incarnations], int] = defaultdict(int)
        self._kept: dict[tuple[int, int], OrderedDict[Incarnations, None]] = defaultdict(
            OrderedDict
        )

    def of(self, place: int, members: Incarnations) -> int:
        """Return the generation that all members use now.

        Args:
            place: of the pipelines.
            members: pipelines with their incarnations.
        """
        if len(members) < 2:
            return 0
        for number, _ in members:
            for dropped in keep(self._kept[number, place], members):
                self._generation[place, dropped] += 1
        return self._generation[place, members]

    def raise_(self, place: int, members: Incarnations) -> None:
        """Let all members make a new process group the next time: a reduction of theirs failed."""
        self._generation[place, members] += 1


def keep(kept: OrderedDict[Incarnations, None], members: Incarnations) -> list[Incarnations]:
    """Note that a set is used; return the least recently used ones, which are dropped for it."""
    kept[members] = None
    kept.move_to_end(members)
    return [kept.popitem(last=False)[0] for _ in range(max(0, len(kept) - KEPT))]


class GroupRequests:
    """The groups of all pipelines.

    Args:
        pipelines: that ask.
        scheduler: of the groups; None where nobody asks for any.
        overlapped_averages: as of :class:`~executor.coordinator.state.Coordinator`.

    Attributes:
        failed: by pipeline, averages that failed.
    """

    def __init__(
        self, pipelines: Pipelines, scheduler: Scheduler | None, *, overlapped_averages: bool
    ) -> None:
        self._pipelines = pipelines
        self._scheduler = scheduler
        self._overlapped_averages = overlapped_averages
        self._generations = Generations()
        self.failed: Counter[int] = Counter()

    @property
    def deadline_s(self) -> float | None:
        """Time after which the scheduler wants a message that it is late."""
        return None if self._scheduler is None else self._scheduler.deadline_s

    def ask(self, pipeline: PipelineRecord, ask: Ask, now_s: float) -> Iterator[Answer]:
        """A rank asks for its group of a step."""
        told = pipeline.told.get((ask.place, "group"))
        if told is not None and told.body["step"] == ask.step:
            yield told
            return
        if pipeline.asked.get(ask.place) == ask.step:
            return
        if self._overlapped_averages:
            yield from self._is_through(ask, now_s)
        if ask.step < pipeline.first_step or pipeline.is_idle or self._scheduler is None:
            yield self._tell_alone(ask.pipeline, ask.place, ask.step)
        else:
            pipeline.asked[ask.place] = ask.step
            request = GroupRequest(ask.pipeline, ask.place, ask.step)
            yield from self._schedule([request], now_s)

    def before_share(self, take: Take, now_s: float) -> Iterator[Answer]:
        """A rank asks for a share: it has its average, unless that goes on behind the share."""
        if not self._overlapped_averages:
            yield from self._is_through(take, now_s)

    def _is_through(self, message: Take | Ask, now_s: float) -> Iterator[Answer]:
        """A rank is done with the group of an earlier step."""
        yield from self._end_group(message.pipeline, message.place, message.reduced, now_s)
        self.failed[message.pipeline] += not message.reduced

    def leave(self, number: int, now_s: float) -> Iterator[Answer]:
        """A pipeline asks for none for a while; what its ranks have asked for, they do alone."""
        yield from self._release(number)
        yield from self._schedule([Left(number)], now_s)

    def join(self, number: int, step: int, now_s: float) -> Iterator[Answer]:
        """A pipeline asks for groups again, or for the first time, from this step on."""
        yield from self._schedule([Joined(number, step)], now_s)

    def lose(self, number: int, pipeline: PipelineRecord, now_s: float) -> Iterator[Answer]:
        """An incarnation of a pipeline has ended, and with it its part in all groups."""
        for place in sorted(pipeline.running):
            yield from self._schedule([Finished(number, pipeline.running[place].number)], now_s)
        if not pipeline.is_idle:
            yield from self._schedule([Left(number)], now_s)

    def late(self, now_s: float) -> Iterator[Answer]:
        """The deadline has passed."""
        yield from self._schedule([Tick()], now_s)

    def _release(self, number: int) -> Iterator[Answer]:
        asked = self._pipelines[number].asked
        for place in sorted(asked):
            yield self._tell_alone(number, place, asked.pop(place))

    def _tell_alone(self, number: int, place: int, step: int) -> Answer:
        body = {"kind": "group", "step": step, "number": None, "members": [], "generation": 0}
        return self._pipelines.tell(number, place, body)

    def _schedule(self, events: Iterable[Event], now_s: float) -> Iterator[Answer]:
        """Tell the scheduler, and the members of every group that begins."""
        if self._scheduler is None:
            return
        for event in events:
            for group in self._scheduler.handle(event, now_s):
                yield from self._begin_group(group)

    def _begin_group(self, group: Group) -> Iterator[Answer]:
        incarnations = self._pipelines.incarnations_of(group.members)
        generation = self._generations.of(group.key, incarnations)
        for number, step in zip(group.members, group.iterations, strict=True):
            pipeline = self._pipelines[number]
            pipeline.asked.pop(group.key, None)
            pipeline.running[group.key] = group
            body = {"kind": "group", "step": step, "number": group.number}
            members = {"members": incarnations, "generation": generation}
            yield self._pipelines.tell(number, group.key, {**body, **members})

    def _end_group(self, number: int, place: int, reduced: bool, now_s: float) -> Iterator[Answer]:
        group = self._pipelines[number].running.pop(place, None)
        if group is None:
            return
        if not reduced:
            self._generations.raise_(group.key, self._pipelines.incarnations_of(group.members))
        yield from self._schedule([Finished(number, group.number)], now_s)
