"""Assigns ranks to averaging groups: they ask, and get a group once the scheduler has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from executor.coordinator.messages import Answer, Ask, Generations, Take
from executor.coordinator.pipelines import PipelineRecord, Pipelines
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
            if ask.step > pipeline.expected.get(ask.place, pipeline.joined_step):
                # Its question before died with an earlier coordinator, and it went on by itself.
                yield from self._goes_on_alone(ask.pipeline, ask.step, now_s)
            pipeline.asked[ask.place] = ask.step
            pipeline.expected[ask.place] = ask.step + 1
            request = GroupRequest(ask.pipeline, ask.place, ask.step)
            yield from self._schedule([request], now_s)

    def before_share(self, take: Take, now_s: float) -> Iterator[Answer]:
        """A rank asks for a share: it has its average, unless that goes on behind the share."""
        if not self._overlapped_averages:
            yield from self._is_through(take, now_s)

    def _is_through(self, message: Take | Ask, now_s: float) -> Iterator[Answer]:
        """A rank is done with the group of an earlier step, or waits for it no more."""
        pipeline = self._pipelines[message.pipeline]
        if pipeline.asked.pop(message.place, None) is not None:
            yield from self._goes_on_alone(message.pipeline, message.step, now_s)
        yield from self._end_group(message.pipeline, message.place, message.reduced, now_s)
        self.failed[message.pipeline] += not message.reduced

    def _goes_on_alone(self, number: int, step: int, now_s: float) -> Iterator[Answer]:
        """It did not wait for its group, this coordinator having been away."""
        pipeline = self._pipelines[number]
        yield from self._release(number)
        pipeline.first_step = step
        yield from self._schedule([Left(number)], now_s)
        yield from self.join(number, step, now_s)

    def leave(self, number: int, now_s: float) -> Iterator[Answer]:
        """A pipeline asks for none for a while; what its ranks have asked for, they do alone."""
        yield from self._release(number)
        yield from self._schedule([Left(number)], now_s)

    def join(self, number: int, step: int, now_s: float) -> Iterator[Answer]:
        """A pipeline asks for groups again, or for the first time, from this step on."""
        self._pipelines[number].join_groups_at(step)
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
