"""What a soak's pipelines went through, from the coordinator's log of messages.

The log has the time of every message, and the coordinator is a function of its messages alone: it
is asked again for the groups it formed and the shares it told. All times are of the monotonic
clock, which the processes of a machine share.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from executor.coordinator.messages import (
    Answer,
    Ask,
    Hello,
    Late,
    Lost,
    Message,
    Take,
    read_message,
)
from executor.coordinator.state import Coordinator


@dataclass
class Life:
    """One life of a pipeline.

    Attributes:
        hello_s: when its last place said hello.
        first_step: that it did.
        told: by place, the times of its requests for a share, by step.
        shares: by step.
        there: by step, who took part.
        asked: place and step of its requests for a group.
        lost_s: when it was given up; None: never.
    """

    pipeline: int
    hello_s: float
    first_step: int = 0
    told: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    shares: dict[int, int | None] = field(default_factory=dict)
    there: dict[int, tuple[int, ...]] = field(default_factory=dict)
    asked: set[tuple[int, int]] = field(default_factory=set)
    lost_s: float | None = None

    def ends_s(self, places: int) -> dict[int, float]:
        """Return when each step was done at all places, in seconds."""
        common = set.intersection(*(set(self.told[p]) for p in range(places)))
        return {step - 1: max(self.told[p][step] for p in range(places)) for step in common}

    def gaps(self) -> Iterator[Gap]:
        """Return the times from each step's end to the next one's, at every pipeline rank."""
        for told in self.told.values():
            times = [told[step] for step in sorted(told)]
            yield from (Gap(self.pipeline, a, b) for a, b in itertools.pairwise(times))


@dataclass(frozen=True)
class Gap:
    """The time from one step's end to the next one's, at a rank of a pipeline."""

    pipeline: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class GroupWait:
    """The time for which a rank waited for its group, and the message that ended it."""

    pipeline: int
    asked_s: float
    told_s: float
    freed_by: str


@dataclass(frozen=True)
class Meeting:
    """A group: whom, and from when until each was done with it."""

    members: tuple[int, ...]
    begin_s: float
    key: int
    ends_s: dict[int, float]

    def holds(self, pipeline: int, from_s: float, to_s: float) -> bool:
        """Return whether it held the pipeline at some moment of a span."""
        end_s = self.ends_s.get(pipeline, float("inf"))
        return pipeline in self.members and self.begin_s <= to_s and end_s >= from_s


@dataclass
class History:
    """All that the log tells.

    Attributes:
        lives: of all pipelines, in order.
        released: pipeline, time, and those that waited for it when it was given up.
        meetings: all groups of two and more.
        group_waits: of all ranks, for groups of any size.
        failed: reductions and exchanges that failed.
    """

    places: int
    lives: list[Life] = field(default_factory=list)
    released: list[tuple[int, float, frozenset[int]]] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    group_waits: list[GroupWait] = field(default_factory=list)
    failed: int = 0
    report: dict = field(default_factory=dict)

    def of(self, pipeline: int) -> list[Life]:
        """A pipeline's lives."""
        return [life for life in self.lives if life.pipeline == pipeline]


def read_history(path: Path, coordinator: Coordinator) -> History:
    """Hand the messages of a log to a coordinator at its beginning."""
    history = History(coordinator.places)
    now: dict[str, Life] = {}
    in_group: dict[tuple[int, int], tuple[int, Meeting]] = {}
    groups: dict[tuple[int, int], Meeting] = {}
    asked: dict[tuple[str, int], float] = {}
    for line in path.read_text().splitlines():
        at_s, text = json.loads(line)
        message = read_message(text.encode())
        _note(history, now, in_group, message, at_s)
        # A group has ended for a rank with the first message that would not come before.
        ends = Ask if coordinator.overlapped_averages else Take
        if isinstance(message, ends):
            held = in_group.get((message.pipeline, message.place))
            if held is not None and held[0] < message.step:
                held[1].ends_s.setdefault(message.pipeline, at_s)
        if isinstance(message, Ask):
            asked.setdefault((message.queue, message.step), at_s)
        answers = coordinator.handle(message, at_s)
        if isinstance(message, Lost | Hello):
            freed = {_rank_of(a)[0] for a in answers if a.body["kind"] == "group"}
            history.released.append((message.pipeline, at_s, frozenset(freed)))
        for answer in answers:
            number, place, nonce = _rank_of(answer)
            body = answer.body
            asked_s = asked.pop((answer.queue, body.get("step", 0)), None)
            if asked_s is not None and body["kind"] == "group":
                history.group_waits.append(GroupWait(number, asked_s, at_s, _told(message)))
            if body["kind"] == "share":
                life = now[nonce]
                life.shares[body["step"]] = body["share"]
                life.there[body["step"]] = tuple(sorted(map(int, body["there"])))
            elif body["kind"] == "group" and len(body["members"]) > 1:
                key = body["number"], place
                members = tuple(n for n, _ in body["members"])
                if key not in groups:
                    groups[key] = Meeting(members, at_s, place, {})
                    history.meetings.append(groups[key])
                in_group[number, place] = body["step"], groups[key]
    history.report = coordinator.report()
    return history


def _note(
    history: History,
    now: dict[str, Life],
    in_group: dict[tuple[int, int], tuple[int, Meeting]],
    message: Message,
    at_s: float,
) -> None:
    match message:
        case Hello():
            if message.incarnation_id not in now:
                now[message.incarnation_id] = Life(message.pipeline, at_s)
                history.lives.append(now[message.incarnation_id])
                for other in history.of(message.pipeline)[:-1]:
                    other.lost_s = at_s if other.lost_s is None else other.lost_s
            life = now[message.incarnation_id]
            life.hello_s = at_s if not life.first_step else life.hello_s
        case Take():
            life = now.get(message.incarnation_id)
            if life is None or life.lost_s is not None:
                return
            life.first_step = life.first_step or message.step
            told = life.told[message.place]
            if message.step not in told:
                told[message.step] = at_s
                history.failed += not message.reduced
        case Lost():
            life = now.get(message.incarnation_id)
            if life is not None and life.lost_s is None:
                life.lost_s = at_s
                for (pipeline, _), (_, meeting) in in_group.items():
                    if pipeline == message.pipeline:
                        meeting.ends_s.setdefault(pipeline, at_s)
        case Ask():
            life = now.get(message.incarnation_id)
            if life is not None and (message.place, message.step) not in life.asked:
                life.asked.add((message.place, message.step))
                history.failed += not message.reduced
        case Late():
            pass


def _told(message: Message) -> str:
    """Return a message in words."""
    match message:
        case Lost():
            return f"{message.pipeline} was given up"
        case Late():
            return "its deadline"
        case Hello():
            return f"{message.pipeline} came again"
        case Take():
            return f"{message.pipeline} took share {message.step}"
        case Ask():
            return f"{message.pipeline} asked after step {message.step}"


def _rank_of(answer: Answer) -> tuple[int, int, str]:
    """Pipeline, place and nonce that an answer is for."""
    number, place, nonce = answer.queue.rpartition("/")[2].split(".")
    return int(number), int(place), nonce


def ledger_faults(history: History, total: int) -> list[str]:
    """Shares that were not trained exactly once, by counting what was told, not by the ledger."""
    done: Counter[int] = Counter()
    for life in history.lives:
        for step in life.ends_s(history.places):
            share = life.shares.get(step)
            if share is not None:
                done[share] += 1
    return [f"share {share}: {done[share]} times" for share in range(total) if done[share] != 1]


def median_iteration_s(history: History) -> float:
    """Return the median iteration time of all steps."""
    gaps = [gap.seconds for life in history.lives for gap in life.gaps()]
    return statistics.median(gaps) if gaps else 0.0
