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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.catalogue import SOAK_LEAST_BAR_S
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
from planner.sync.groups.matching import bipartition, passive_partner


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

    def gaps(self) -> Iterator[tuple[float, float]]:
        """Return the times from each step's end to the next one's, at every pipeline rank."""
        for told in self.told.values():
            times = [told[step] for step in sorted(told)]
            yield from itertools.pairwise(times)


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
        failed: reductions and exchanges that failed.
    """

    places: int
    lives: list[Life] = field(default_factory=list)
    released: list[tuple[int, float, frozenset[int]]] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
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
        answers = coordinator.handle(message, at_s)
        if isinstance(message, Lost | Hello):
            freed = {_rank_of(a)[0] for a in answers if a.body["kind"] == "group"}
            history.released.append((message.pipeline, at_s, frozenset(freed)))
        for answer in answers:
            number, place, nonce = _rank_of(answer)
            body = answer.body
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
    dropped = set(history.report["dropped"])
    return [
        f"share {share}: {done[share]} times"
        for share in range(total)
        if done[share] != (share not in dropped)
    ]


@dataclass(frozen=True)
class Hit:
    """An event at a rank: kill, stop or coordinator kill, with its time.

    Attributes:
        kind: ``kill``, ``stop`` or ``coordinator``.
        at_s: when.
        pipeline: whose; -1 of the coordinator.
        seconds: that it was stopped for.
        is_alone: whether all others were well at the time.
    """

    kind: str
    at_s: float
    pipeline: int
    seconds: float = 0.0
    is_alone: bool = True


@dataclass(frozen=True)
class Figures:
    """The effects of a hit in seconds; None where a figure has no meaning.

    Attributes:
        hit: the cause.
        others_s: by pipeline, the longest from one step's end to the next.
        members: pipelines that exchanged something with the one hit, or were to.
        is_alone: whether nothing else was hit from then until the pipeline was back: gaps are
            nobody else's doing.
        detection_s: until it was given up.
        rejoin_s: from the new process's hello until its first step's end.
        start_s: from the new process's start until its first step's end.
    """

    hit: Hit
    others_s: dict[int, float]
    members: frozenset[int]
    is_alone: bool
    detection_s: float | None
    rejoin_s: float | None
    start_s: float | None


def figures_of(
    history: History, hits: Sequence[Hit], started_s: Sequence[Sequence[float]], strategy: str
) -> list[Figures]:
    """Return the effects of each hit.

    Args:
        history: of the run.
        hits: in order.
        started_s: of each pipeline, when its processes were started.
        strategy: with its options.
    """
    return [_figures(history, hit, hits, started_s, strategy) for hit in hits]


def _figures(
    history: History,
    hit: Hit,
    hits: Sequence[Hit],
    started_s: Sequence[Sequence[float]],
    strategy: str,
) -> Figures:
    life = next((one for one in reversed(history.of(hit.pipeline)) if one.hello_s < hit.at_s), None)
    lost_s = None if life is None else life.lost_s
    after = [one for one in history.of(hit.pipeline) if one.hello_s > hit.at_s]
    back_s = rejoin_s = start_s = None
    if after:
        ends_s = after[0].ends_s(history.places).get(after[0].first_step)
        starts = [s for s in started_s[hit.pipeline] if hit.at_s < s < after[0].hello_s]
        if ends_s is not None:
            back_s, rejoin_s = ends_s, ends_s - after[0].hello_s
            start_s = ends_s - max(starts) if starts else None
    until_s = max(hit.at_s + hit.seconds, back_s or 0.0, hit.at_s + 1.0)
    silent_until_s = lost_s or hit.at_s + hit.seconds
    return Figures(
        hit,
        {
            p: g
            for p in _pipelines(history)
            if p != hit.pipeline
            if (g := _longest(history, p, hit.at_s, until_s)) is not None
        },
        frozenset(_members(history, hit, silent_until_s, strategy)),
        hit.is_alone and not any(hit.at_s < other.at_s <= until_s for other in hits),
        None if lost_s is None else lost_s - hit.at_s,
        rejoin_s,
        start_s,
    )


def _pipelines(history: History) -> list[int]:
    return sorted({life.pipeline for life in history.lives})


def _longest(history: History, pipeline: int, from_s: float, to_s: float) -> float | None:
    """The longest gap between steps that has a part in a span."""
    found = [
        b - a for life in history.of(pipeline) for a, b in life.gaps() if a <= to_s and b >= from_s
    ]
    return max(found, default=None)


def _members(history: History, hit: Hit, until_s: float, strategy: str) -> Iterator[int]:
    """Yield who had to do with the rank while it was silent."""
    name = strategy.partition(":")[0]
    if hit.kind == "coordinator":
        return
    calls_servers = name.endswith("parameter_server") or name == "wave_synchronous"
    if calls_servers or "schedule=static" in strategy:
        # All call the server, or wait for all of them in step; a fixed schedule's groups of a node
        # are of all every second iteration.
        yield from _pipelines(history)
    elif strategy == "ad_psgd":
        yield from _askers(history, hit, until_s)
    for pipeline, at_s, freed in history.released:
        if pipeline == hit.pipeline and hit.at_s <= at_s <= until_s:
            yield from freed
    for meeting in history.meetings:
        # Who was to average with a rank that was stopped does so as soon as it goes on.
        if meeting.holds(hit.pipeline, hit.at_s, until_s + SOAK_LEAST_BAR_S):
            yield from meeting.members


def _askers(history: History, hit: Hit, until_s: float) -> Iterator[int]:
    for life in history.lives:
        told = life.told[0]
        for step, there in life.there.items():
            begins_s, ends_s = told.get(step, 0.0), told.get(step + 1, float("inf"))
            if life.pipeline in there and begins_s <= until_s and ends_s >= hit.at_s:
                place = there.index(life.pipeline)
                if place in bipartition(len(there))[0]:
                    partner = passive_partner(place, step, len(there))
                    if partner is not None and there[partner] == hit.pipeline:
                        yield life.pipeline


def median_iteration_s(history: History) -> float:
    """Return the median iteration time of all steps."""
    gaps = [b - a for life in history.lives for a, b in life.gaps()]
    return statistics.median(gaps) if gaps else 0.0
