"""What the long gaps of a soak waited for: from the ranks' logs of waits, and the coordinator's.

A rank knows how long it waited for its group, but not for whom. The coordinator is a function of
its messages: the message that lets it tell a group is of whoever was waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.figures import Figures
from benchmarks.soak.history import Gap, GroupWait, History
from executor.coordinator.waits import LEAST_S

COLUMNS = ("strategy", "event", "gap of", "s", "waited for")


@dataclass(frozen=True)
class Wait:
    """One wait of a rank, with the end of it on the monotonic clock.

    Attributes:
        pipeline: of the rank.
        at_s, end_s: begin and end.
        told: for whom and why, in words.
    """

    pipeline: int
    at_s: float
    end_s: float
    told: str

    def within_s(self, gap: Gap) -> float:
        """Return the seconds of the wait that lie in a gap."""
        return min(self.end_s, gap.end_s) - max(self.at_s, gap.begin_s)


@dataclass(frozen=True)
class LongGap:
    """A gap and what filled it.

    Attributes:
        event: what was done, and to whom.
        pipeline: whose gap it is.
        seconds: of it.
        waited_for: in words, in order, each with its seconds.
    """

    event: str
    pipeline: int
    seconds: float
    waited_for: str

    def cells(self, strategy: str) -> list[str]:
        """Return the row of the table."""
        gap = [f"pipeline {self.pipeline}", f"{self.seconds:.2f}"]
        return [f"`{strategy}`", self.event, *gap, self.waited_for]


def read_waits(path: Path) -> list[Wait]:
    """Return the waits of a log but those for groups, which the coordinator's tells better."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [_wait(row) for row in rows if row["why"] != "group"]


def _wait(row: dict) -> Wait:
    told = row["why"]
    if row["whom"]:
        told += " of " + " and ".join(map(str, dict.fromkeys(row["whom"])))
    if row["outcome"] != "answered":
        told += f" ({row['outcome']})"
    return Wait(row["pipeline"], row["at_s"], row["at_s"] + row["seconds"], told)


def long_gaps(
    history: History, found: Sequence[Figures], waits: Sequence[Wait], bar_s: float, most: int
) -> list[LongGap]:
    """Return all gaps over a bar, and the longest of the others up to a number.

    Args:
        history: of the run.
        found: effects of its events; gaps count that are those of one event alone.
        waits: of its ranks.
        bar_s: the bar.
        most: how many to tell of if fewer are over it.
    """
    gaps = [
        (gap, figures)
        for figures in found
        if figures.is_alone and figures.hit.kind != "coordinator"
        for gap in figures.others.values()
    ]
    gaps.sort(key=lambda row: -row[0].seconds)
    over = sum(gap.seconds > bar_s for gap, _ in gaps)
    owned = [*waits, *map(_of_group, history.group_waits)]
    return [
        LongGap(_event(figures), gap.pipeline, gap.seconds, _told(gap, owned))
        for gap, figures in gaps[: max(over, most)]
    ]


def _of_group(wait: GroupWait) -> Wait:
    return Wait(wait.pipeline, wait.asked_s, wait.told_s, f"group, until {wait.freed_by}")


def _event(figures: Figures) -> str:
    hit = figures.hit
    done = f"stop of {hit.pipeline} for {hit.seconds:.1f} s" if hit.kind == "stop" else ""
    lost = figures.detection_s
    given_up = "never given up" if lost is None else f"given up after {lost:.2f} s"
    return f"{done or f'kill of {hit.pipeline}'}, {given_up}"


def _told(gap: Gap, waits: Sequence[Wait]) -> str:
    mine = [w for w in waits if w.pipeline == gap.pipeline and w.within_s(gap) >= LEAST_S]
    mine.sort(key=lambda wait: wait.at_s)
    words = [f"{wait.told} {wait.within_s(gap):.2f}" for wait in mine]
    rest_s = gap.seconds - sum(end_s - begin_s for begin_s, end_s in _covered(gap, mine))
    return "; ".join([*words, f"else {rest_s:.2f}"])


def _covered(gap: Gap, waits: Sequence[Wait]) -> Iterator[tuple[float, float]]:
    """Yield the parts of a gap in which it waited: several threads may wait at once."""
    until_s = gap.begin_s
    for wait in waits:
        begin_s, end_s = max(wait.at_s, until_s), min(wait.end_s, gap.end_s)
        if end_s > begin_s:
            yield begin_s, end_s
            until_s = end_s
