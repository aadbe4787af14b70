"""The coordinator's decisions: messages in, answers out, without a clock, a socket or a thread.

A pipeline asks for a share of the data, trains on it, asks for a group, averages, and asks for the
next share. Shares of a pipeline that is lost go to others; the work is over once every share is
done. A pipeline that comes back copies the weights of another one, its donor, which puts them
aside between two steps, the same two at all its places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from executor.coordinator.groups import GroupRequests
from executor.coordinator.messages import (
    Address,
    Answer,
    Ask,
    Beat,
    Bye,
    Fault,
    Hello,
    Late,
    Loss,
    Lost,
    Message,
    Question,
    Take,
    Write,
    Wrote,
)
from executor.coordinator.notes import WritingTurns
from executor.coordinator.pipelines import PipelineRecord, Pipelines
from planner.sync.groups.scheduler import Scheduler
from planner.sync.ledger import WorkUnitLedger


class Coordinator:
    """Tells pipelines their shares and groups.

    Args:
        pipelines: how many.
        places: of each.
        ledger: of the shares.
        scheduler: of the groups; None where nobody asks for any.
        overlapped_averages: whether ranks go on to the next share while they wait for a group, and
            average. A group has ended for a rank once it asks for the next one.
    """

    def __init__(
        self,
        pipelines: int,
        places: int,
        ledger: WorkUnitLedger,
        scheduler: Scheduler | None,
        *,
        overlapped_averages: bool = False,
    ) -> None:
        self.places = places
        self.ledger = ledger
        self.overlapped_averages = overlapped_averages
        self._pipelines = Pipelines(pipelines, places)
        self._groups = GroupRequests(
            self._pipelines, scheduler, overlapped_averages=overlapped_averages
        )
        self._turns = WritingTurns()
        self._faults: list[str] = []
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
        """Time after which it wants a message that it is late."""
        return self._groups.deadline_s

    def handle(self, message: Message, now_s: float) -> list[Answer]:
        """Take in a message.

        Args:
            message: as it came; what is sent twice changes nothing.
            now_s: on a clock that never goes back.

        Raises:
            PipeplanError: if a rank asks for what it cannot have now. Part of the message may have
                been taken in then, the same part on every replay.
        """
        if not self.has_place_of(message):
            return _refusals(message)
        match message:
            case Late():
                return list(self._groups.late(now_s))
            case Lost():
                return list(self._lost(message.pipeline, message.incarnation_id, now_s))
            case Beat():
                return []
        return list(self._from_rank(message, now_s))

    def has_place_of(self, message: Message) -> bool:
        """Return whether the plan has what a message names; any other changes nothing."""
        match message:
            case Late():
                return True
            case Lost():
                return message.pipeline < len(self._pipelines)
        return message.pipeline < len(self._pipelines) and message.place < self.places

    @property
    def there(self) -> dict[str, int]:
        """Incarnations of the pipelines that take part, by number, in the order they came."""
        return self._pipelines.there

    def addresses(self, place: int) -> list[tuple[int, int, str]]:
        """Return number, incarnation and address of the pipelines that take part, as they came."""
        return self._pipelines.addresses(place)

    def watched(self) -> list[Address]:
        """Return the ranks that are to give signs of life."""
        return self._pipelines.watched()

    @property
    def has_lost(self) -> bool:
        """Whether a pipeline is lost and has not come back."""
        return any(not pipeline.greeted for pipeline in self._pipelines)

    def is_given_up(self, rank: Address) -> bool:
        """Return whether the others go on without a rank's incarnation of its pipeline."""
        number, _, incarnation_id = rank
        return self._pipelines.is_given_up(number, incarnation_id)

    # --- ranks ---------------------------------------------------------------------------------

    def _from_rank(self, message: Question, now_s: float) -> Iterator[Answer]:
        pipeline = self._pipelines[message.pipeline]
        if isinstance(message, Hello):
            yield from self._hello(pipeline, message, now_s)
            return
        if message.incarnation_id != pipeline.incarnation_id or not pipeline.greeted:
            yield fenced(message.sender)
            return
        match message:
            case Take():
                yield from self._take(pipeline, message, now_s)
            case Ask():
                yield from self._groups.ask(pipeline, message, now_s)
            case Loss():
                yield self._mean_loss(pipeline, message)
            case Write():
                yield self._turns.ask(message)
            case Wrote():
                self._turns.end(message)
            case Fault():
                self._faults += [message.word]
                yield Answer(message.sender, {"kind": "noted", "of": message.word})
            case Bye():
                pipeline.left.add(message.place)
                yield Answer(message.sender, {"kind": "report", "report": self.report()})

    def _hello(self, pipeline: PipelineRecord, hello: Hello, now_s: float) -> Iterator[Answer]:
        if hello.incarnation_id != pipeline.incarnation_id:
            if self._pipelines.has_ended(hello.pipeline, hello.incarnation_id):
                yield fenced(hello.sender)
                return
            yield from self._lost(hello.pipeline, pipeline.incarnation_id, now_s)
            incarnation = pipeline.incarnation + 1
            pipeline = self._pipelines.begin_incarnation(
                hello.pipeline, hello.incarnation_id, incarnation
            )
        told = pipeline.told.get((hello.place, "welcome"))
        if told is not None:
            yield told
            return
        pipeline.greeted[hello.place] = hello.address
        if len(pipeline.greeted) < self.places:
            return
        if self._has_begun:
            yield from self._welcome_back(hello.pipeline)
        elif all(len(other.greeted) == self.places for other in self._pipelines):
            self._has_begun = True
            for number, other in enumerate(self._pipelines):
                other.is_there = True
                body = {"kind": "welcome", "step": 1, "donor": None}
                yield from self._pipelines.tell_all(number, body)

    def _welcome_back(self, number: int) -> Iterator[Answer]:
        """Tell a pipeline that comes after the beginning whose weights it takes over.

        The donor is the pipeline that is furthest.
        """
        donors = [n for n, other in enumerate(self._pipelines) if other.is_there]
        if not self.ledger.remaining:
            body = {"kind": "refused", "why": "all work is done", "is_done": True}
            yield from self._pipelines.tell_all(number, body)
            return
        if not donors:
            why = (
                "no pipeline is left that has the weights; resume from a checkpoint: a new "
                "coordinator, and all pipelines, with --resume FOLDER"
            )
            yield from self._pipelines.tell_all(number, {"kind": "refused", "why": why})
            return
        donor = max(donors, key=lambda n: (self._pipelines[n].next_step, -n))
        giver = self._pipelines[donor]
        # An idle donor has asked for its next step already, and waits.
        step = giver.next_step - giver.is_idle
        giver.snapshots.add(step)
        self._pipelines[number].first_step = step
        address = [donor, giver.incarnation]
        body = {"kind": "welcome", "step": step, "donor": address}
        yield from self._pipelines.tell_all(number, body)
        if giver.is_idle:
            yield from self._pipelines.wake(donor)

    def _mean_loss(self, pipeline: PipelineRecord, loss: Loss) -> Answer:
        """Return the mean of the last losses of the pipelines, the same at all places."""
        told = pipeline.told.get((-1, "loss"))
        if told is None or told.body["step"] != loss.step:
            pipeline.loss = loss.loss
            others = (other.loss for other in self._pipelines if other.is_there)
            known = [value for value in others if value is not None]
            mean = sum(known) / len(known) if known else None
            body = {"kind": "loss", "step": loss.step, "mean": mean}
            told = pipeline.told[-1, "loss"] = Answer(loss.sender, body)
        return Answer(loss.sender, told.body)

    # --- shares --------------------------------------------------------------------------------

    def _take(self, pipeline: PipelineRecord, take: Take, now_s: float) -> Iterator[Answer]:
        told = pipeline.told.get((take.place, "share"))
        if told is not None and told.body["step"] == take.step:
            yield told
            return
        if take.step <= pipeline.taken.get(take.place, 0):
            return
        yield from self._groups.before_share(take, now_s)
        pipeline.taken[take.place] = pipeline.waiting[take.place] = take.step
        if not pipeline.is_there:
            self._joins += 1
            pipeline.is_there, pipeline.since = True, self._joins
            yield from self._groups.join(take.pipeline, take.step, now_s)
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
                        pipeline.is_idle, pipeline.first_step = False, step
                        yield from self._groups.join(number, step, now_s)
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
        return self._pipelines.tell(number, place, {**body, "snapshot": snapshot})

    def _rest(self, now_s: float) -> Iterator[Answer]:
        """Let pipelines that wait at all ranks leave their groups; end the work once all wait."""
        for number, pipeline in enumerate(self._pipelines):
            waits = len(pipeline.waiting) == self.places and pipeline.is_there
            if waits and not pipeline.is_idle:
                pipeline.is_idle = True
                yield from self._groups.leave(number, now_s)
        if not self._has_begun or self.ledger.remaining:
            return
        if self._last is None:
            self._last = self.there
        for number, pipeline in enumerate(self._pipelines):
            for place, step in sorted(pipeline.waiting.items()):
                yield self._tell_share(number, place, step, None)

    # --- losses --------------------------------------------------------------------------------

    def _lost(self, number: int, incarnation_id: str, now_s: float) -> Iterator[Answer]:
        pipeline = self._pipelines[number]
        if pipeline.incarnation_id != incarnation_id or not pipeline.greeted:
            return
        self._pipelines.begin_incarnation(number, incarnation_id, pipeline.incarnation)
        self._turns.lose(number, incarnation_id)
        if pipeline.is_there:
            yield from self._groups.lose(number, pipeline, now_s)
        self.ledger.give_back(number)
        if self._has_begun:
            yield from self._hand_out(now_s)

    def report(self) -> dict[str, Any]:
        """Return what became of every work unit, and of every pipeline."""
        return {
            **self.ledger.report(),
            "failed": [self._groups.failed[number] for number in range(len(self._pipelines))],
            "incarnations": [pipeline.incarnation for pipeline in self._pipelines],
            "last": self._last,
            "faults": self._faults,
        }


def _refusals(message: Message) -> list[Answer]:
    if isinstance(message, Lost | Late):
        return []
    return [Answer(message.sender, {"kind": "refused", "why": "the plan has no such place"})]


def fenced(rank: Address) -> Answer:
    """Return the answer to a rank that is given up."""
    return Answer(rank, {"kind": "fenced", "incarnation_id": rank[2]})
