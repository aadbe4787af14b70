"""The effects of a soak's events on the pipelines, in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.catalogue import SOAK_LEAST_BAR_S
from benchmarks.soak.history import Gap, History
from planner.sync.groups.matching import bipartition, passive_partner


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
        others: by pipeline, the longest gap between two steps.
        members: pipelines that exchanged something with the one hit, or were to.
        is_alone: whether nothing else was hit from then until the pipeline was back: gaps are
            nobody else's doing.
        detection_s: until it was given up.
        rejoin_s: from the new process's hello until its first step's end.
        start_s: from the new process's start until its first step's end.
    """

    hit: Hit
    others: dict[int, Gap]
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
            p: gap
            for p in _pipelines(history)
            if p != hit.pipeline
            if (gap := _longest(history, p, hit.at_s, until_s)) is not None
        },
        frozenset(_members(history, hit, silent_until_s, strategy)),
        hit.is_alone and not any(hit.at_s < other.at_s <= until_s for other in hits),
        None if lost_s is None else lost_s - hit.at_s,
        rejoin_s,
        start_s,
    )


def _pipelines(history: History) -> list[int]:
    return sorted({life.pipeline for life in history.lives})


def _longest(history: History, pipeline: int, from_s: float, to_s: float) -> Gap | None:
    """The longest gap between steps that has a part in a span."""
    gaps = (gap for life in history.of(pipeline) for gap in life.gaps())
    found = [gap for gap in gaps if gap.begin_s <= to_s and gap.end_s >= from_s]
    return max(found, key=lambda gap: gap.seconds, default=None)


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
