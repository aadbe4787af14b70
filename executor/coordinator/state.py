"""The coordinator's decisions: messages in, answers out, without a clock, a socket or a thread.

A pipeline asks for a share of the data, trains on it, asks for a group, averages, and asks for the
next share. Shares of a pipeline that is lost go to others; the work is over once every share is
done. A pipeline that comes back copies the weights of another one, its donor, which puts them
aside between two steps, the same two at all its places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from executor.coordinator.generations import Generations
from executor.coordinator.messages import Answer, Ask, Hello, Late, Lost, Message, Take, groups_of
from executor.coordinator.messages import answers_of as queue_of
from planner.sync.groups.events import (
    Event,
    Finished,
    Group,
    Joined,
    Left,
    Request,
    Scheduler,
    Tick,
)
from planner.sync.ledger import ShareLedger

Rank = Hello | Take | Ask


@dataclass
class _Pipeline:
    """One pipeline's life.

    Attributes:
        nonce: of this life; empty before the first.
        life: counts them, from 1.
        greeted: places that have said hello.
        is_there: whether groups may hold it.
        is_idle: whether it waits for others to end, at all places.
        since: orders the pipelines that are there by when they came.
        first_step: of this life; groups of steps before it are not waited for.
        taken: by place, the last step whose share was asked for.
        shares: by step; None: the work is over.
        waiting: by place, the step whose share is asked for and not yet told.
        asked: by place, the step whose group is asked for and not yet told.
        told: by place and kind, the last answer.
        running: by place, the group it is in.
        snapshots: steps before which it puts its weights aside for others.
    """

    nonce: str = ""
    life: int = 0
    greeted: set[int] = field(default_factory=set)
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

    @property
    def next_step(self) -> int:
        """The first step that no place has asked a share for."""
        return max([self.first_step - 1, *self.taken.values()]) + 1


class Coordinator:
    """Tells pipelines their shares and groups.

    Args:
        pipelines: how many.
        places: of each.
        ledger: of the shares.
        scheduler: of the groups; None where nobody asks for any.
        averages_behind: whether ranks go on to the next share while they wait for a group, and
            average. A group has ended for a rank once it asks for the next one.
    """

    def __init__(
        self,
        pipelines: int,
        places: int,
        ledger: ShareLedger,
        scheduler: Scheduler | None,
        *,
        averages_behind: bool = False,
    ) -> None:
        self.places = places
        self.ledger = ledger
        self.scheduler = scheduler
        self.averages_behind = averages_behind
        self._pipelines = [_Pipeline() for _ in range(pipelines)]
        self._generations = Generations()
        self._failed: Counter[int] = Counter()
        self._joins = 0
        self._has_begun = False
        self._last: dict[str, int] | None = None

    @property
    def is_over(self) -> bool:
        """Whether every share is done."""
        return self._last is not None

    @property
    def is_stranded(self) -> bool:
        """Whether work is left, and nobody who has the weights: for good, as none is given them."""
        return (
            self._has_begun
            and self.ledger.remaining > 0
            # Who was welcomed may have copied them, and ask for its first share next.
            and not any(p.is_there or (0, "welcome") in p.told for p in self._pipelines)
        )

    @property
    def deadline_s(self) -> float | None:
        """When it wants to be told that it is late."""
        return None if self.scheduler is None else self.scheduler.deadline_s

    def handle(self, message: Message, now_s: float) -> list[Answer]:
        """Take in a message.

        Args:
            message: as it came; what is sent twice changes nothing.
            now_s: on a clock that never goes back.
        """
        match message:
            case Late():
                return list(self._schedule([Tick()], now_s))
            case Lost():
                return list(self._lost(message.pipeline, message.nonce, now_s))
            case Hello() | Take() | Ask():
                return list(self._from_rank(message, now_s))

    @property
    def there(self) -> dict[str, int]:
        """Lives of the pipelines that take part, by number, in the order in which they came."""
        found = [(p.since, n) for n, p in enumerate(self._pipelines) if p.is_there]
        return {str(number): self._pipelines[number].life for _, number in sorted(found)}

    def lives(self) -> Iterator[tuple[int, str, frozenset[int]]]:
        """Pipelines that are alive: number, nonce, and the places that have said hello."""
        for number, pipeline in enumerate(self._pipelines):
            if pipeline.greeted:
                yield number, pipeline.nonce, frozenset(pipeline.greeted)

    # --- ranks ---------------------------------------------------------------------------------

    def _from_rank(self, message: Rank, now_s: float) -> Iterator[Answer]:
        if message.pipeline >= len(self._pipelines) or message.place >= self.places:
            yield Answer(message.queue, {"kind": "refused", "why": "the plan has no such place"})
            return
        pipeline = self._pipelines[message.pipeline]
        if isinstance(message, Hello):
            yield from self._hello(pipeline, message, now_s)
        elif message.nonce != pipeline.nonce or not pipeline.greeted:
            yield Answer(message.queue, {"kind": "fenced"})
        elif isinstance(message, Take):
            yield from self._take(pipeline, message, now_s)
        else:
            yield from self._ask(pipeline, message, now_s)

    def _hello(self, pipeline: _Pipeline, hello: Hello, now_s: float) -> Iterator[Answer]:
        if hello.nonce != pipeline.nonce:
            yield from self._lost(hello.pipeline, pipeline.nonce, now_s)
            life = pipeline.life + 1
            pipeline = self._pipelines[hello.pipeline] = _Pipeline(hello.nonce, life)
        told = pipeline.told.get((hello.place, "welcome"))
        if told is not None:
            yield told
            return
        pipeline.greeted.add(hello.place)
        if len(pipeline.greeted) < self.places:
            return
        if self._has_begun:
            yield from self._welcome_back(hello.pipeline)
        elif all(len(other.greeted) == self.places for other in self._pipelines):
            self._has_begun = True
            for number, other in enumerate(self._pipelines):
                other.is_there = True
                yield from self._tell_all(number, {"kind": "welcome", "step": 1, "donor": None})

    def _welcome_back(self, number: int) -> Iterator[Answer]:
        """Somebody came after the beginning: it takes over the weights of who is furthest."""
        donors = [n for n, other in enumerate(self._pipelines) if other.is_there]
        if not self.ledger.remaining:
            body = {"kind": "refused", "why": "all work is done", "is_done": True}
            yield from self._tell_all(number, body)
            return
        if not donors:
            why = (
                "no pipeline is left that has the weights; resume from a checkpoint: a new "
                "coordinator, and all pipelines, with --resume FOLDER"
            )
            yield from self._tell_all(number, {"kind": "refused", "why": why})
            return
        donor = max(donors, key=lambda n: (self._pipelines[n].next_step, -n))
        giver = self._pipelines[donor]
        step = giver.next_step
        if giver.is_idle:
            step -= 1
        giver.snapshots.add(step)
        self._pipelines[number].first_step = step
        body = {"kind": "welcome", "step": step, "donor": [donor, giver.life]}
        yield from self._tell_all(number, body)
        if giver.is_idle:
            # It waits and puts nothing aside before it is told something.
            yield from self._wake(donor)

    def _wake(self, number: int) -> Iterator[Answer]:
        pipeline = self._pipelines[number]
        for place in sorted(pipeline.waiting):
            yield Answer(queue_of(number, place, pipeline.nonce), {"kind": "snapshot"})

    def _tell_all(self, number: int, body: dict[str, Any]) -> Iterator[Answer]:
        pipeline = self._pipelines[number]
        for place in range(self.places):
            yield self._tell(number, place, {**body, "life": pipeline.life})

    def _tell(self, number: int, place: int, body: dict[str, Any]) -> Answer:
        pipeline = self._pipelines[number]
        queue = (groups_of if body["kind"] == "group" else queue_of)(number, place, pipeline.nonce)
        answer = Answer(queue, body)
        pipeline.told[place, body["kind"]] = answer
        return answer

    # --- shares --------------------------------------------------------------------------------

    def _take(self, pipeline: _Pipeline, take: Take, now_s: float) -> Iterator[Answer]:
        told = pipeline.told.get((take.place, "share"))
        if told is not None and told.body["step"] == take.step:
            yield told
            return
        if take.step <= pipeline.taken.get(take.place, 0):
            return
        if not self.averages_behind:
            yield from self._is_through(take, now_s)
        pipeline.taken[take.place] = pipeline.waiting[take.place] = take.step
        if not pipeline.is_there:
            pipeline.is_there = True
            self._joins += 1
            pipeline.since = self._joins
            yield from self._schedule([Joined(take.pipeline, take.step)], now_s)
        if len(pipeline.taken) == self.places and min(pipeline.taken.values()) == take.step:
            share = pipeline.shares.pop(take.step - 1, None)
            if share is not None:
                self.ledger.commit(take.pipeline, share)
        yield from self._hand_out(now_s)

    def _hand_out(self, now_s: float) -> Iterator[Answer]:
        """Tell shares to all who wait for one, as far as there are any."""
        for number, pipeline in enumerate(self._pipelines):
            for place, step in sorted(pipeline.waiting.items()):
                if step not in pipeline.shares:
                    share = self.ledger.take(number, step)
                    if share is None:
                        continue
                    pipeline.shares[step] = share
                    if pipeline.is_idle:
                        pipeline.is_idle = False
                        pipeline.first_step = step
                        yield from self._schedule([Joined(number, step)], now_s)
                yield self._tell_share(number, place, step, pipeline.shares[step])
        yield from self._rest(now_s)

    def _tell_share(self, number: int, place: int, step: int, share: int | None) -> Answer:
        pipeline = self._pipelines[number]
        del pipeline.waiting[place]
        # Who comes once it is over has nobody to average with at the end.
        there = self.there if share is not None or self._last is None else self._last
        there = there if str(number) in there else {}
        snapshot = step in pipeline.snapshots
        body = {"kind": "share", "step": step, "share": share, "there": there}
        return self._tell(number, place, {**body, "snapshot": snapshot})

    def _rest(self, now_s: float) -> Iterator[Answer]:
        """Who waits at all places is in nobody's way; once all do, the work is over."""
        for number, pipeline in enumerate(self._pipelines):
            waits = len(pipeline.waiting) == self.places and pipeline.is_there
            if waits and not pipeline.is_idle:
                pipeline.is_idle = True
                for place in sorted(pipeline.asked):
                    yield self._tell_alone(number, place, pipeline.asked.pop(place))
                yield from self._schedule([Left(number)], now_s)
        if not self._has_begun or self.ledger.remaining:
            return
        if self._last is None:
            self._last = self.there
        for number, pipeline in enumerate(self._pipelines):
            for place, step in sorted(pipeline.waiting.items()):
                yield self._tell_share(number, place, step, None)

    # --- groups --------------------------------------------------------------------------------

    def _ask(self, pipeline: _Pipeline, ask: Ask, now_s: float) -> Iterator[Answer]:
        told = pipeline.told.get((ask.place, "group"))
        if told is not None and told.body["step"] == ask.step:
            yield told
            return
        if pipeline.asked.get(ask.place) == ask.step:
            return
        if self.averages_behind:
            yield from self._is_through(ask, now_s)
        if ask.step < pipeline.first_step or pipeline.is_idle or self.scheduler is None:
            yield self._tell_alone(ask.pipeline, ask.place, ask.step)
        else:
            pipeline.asked[ask.place] = ask.step
            request = Request(ask.pipeline, ask.place, ask.step)
            yield from self._schedule([request], now_s)

    def _is_through(self, message: Take | Ask, now_s: float) -> Iterator[Answer]:
        """A rank is done with the group of an earlier step, or waits for it no more."""
        pipeline = self._pipelines[message.pipeline]
        if pipeline.asked.pop(message.place, None) is not None:
            yield from self._goes_on_alone(message.pipeline, message.step, now_s)
        yield from self._end_group(message.pipeline, message.place, message.reduced, now_s)
        self._failed[message.pipeline] += not message.reduced

    def _goes_on_alone(self, number: int, step: int, now_s: float) -> Iterator[Answer]:
        """It did not wait for its group, this coordinator having been away."""
        pipeline = self._pipelines[number]
        for place, asked in sorted(pipeline.asked.items()):
            yield self._tell_alone(number, place, asked)
        pipeline.asked.clear()
        pipeline.first_step = step
        yield from self._schedule([Left(number), Joined(number, step)], now_s)

    def _tell_alone(self, number: int, place: int, step: int) -> Answer:
        body = {"kind": "group", "step": step, "number": None, "members": [], "generation": 0}
        return self._tell(number, place, body)

    def _schedule(self, events: Iterable[Event], now_s: float) -> Iterator[Answer]:
        if self.scheduler is None:
            return
        for event in events:
            for group in self.scheduler.handle(event, now_s):
                yield from self._begin_group(group)

    def _begin_group(self, group: Group) -> Iterator[Answer]:
        lives = tuple((n, self._pipelines[n].life) for n in group.members)
        generation = self._generations.of(group.key, lives)
        for number, step in zip(group.members, group.iterations, strict=True):
            pipeline = self._pipelines[number]
            pipeline.asked.pop(group.key, None)
            pipeline.running[group.key] = group
            body = {"kind": "group", "step": step, "number": group.number}
            members = {"members": lives, "generation": generation}
            yield self._tell(number, group.key, {**body, **members})

    def _end_group(self, number: int, place: int, reduced: bool, now_s: float) -> Iterator[Answer]:
        group = self._pipelines[number].running.pop(place, None)
        if group is None:
            return
        if not reduced:
            lives = tuple((n, self._pipelines[n].life) for n in group.members)
            self._generations.raise_(group.key, lives)
        yield from self._schedule([Finished(number, group.number)], now_s)

    # --- losses --------------------------------------------------------------------------------

    def _lost(self, number: int, nonce: str, now_s: float) -> Iterator[Answer]:
        pipeline = self._pipelines[number]
        if pipeline.nonce != nonce or not pipeline.greeted:
            return
        self._pipelines[number] = _Pipeline(nonce, pipeline.life)
        if pipeline.is_there:
            for place in sorted(pipeline.running):
                event = Finished(number, pipeline.running[place].number)
                yield from self._schedule([event], now_s)
            if not pipeline.is_idle:
                yield from self._schedule([Left(number)], now_s)
        self.ledger.give_back(number)
        if self._has_begun:
            yield from self._hand_out(now_s)

    def report(self) -> dict[str, Any]:
        """What became of every share, and of every pipeline."""
        return {
            **asdict(self.ledger.report()),
            "failed": [self._failed[number] for number in range(len(self._pipelines))],
            "lives": [pipeline.life for pipeline in self._pipelines],
            "last": self._last,
        }
