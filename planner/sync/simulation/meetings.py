"""Meetings in a measured trace: a group's rows, its time, and how late members noticed its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import pi, sqrt
from statistics import fmean

from planner.errors import PipeplanError
from planner.measured.sync_trace import SyncStep, SyncTrace
from planner.sync.simulation.world import World

WARM_UP = 1
"""Iterations of each worker that are left out."""
TOGETHER_S = 0.02
"""Members go on within this time of each other: on busy hosts they do so some milliseconds apart,
and real clocks agree to about one."""
MEAN = sqrt(2 / pi)
MEAN_DISTANCE = 2 * (sqrt(2) - 1) * MEAN
"""The means of a half-normal distribution and of the distance of two draws, in units of its scale.
The larger of two draws is on average sqrt(2) times their mean."""
Shape = tuple[int, int, bool]
"""A shape of collective: its bytes, its members, and whether these are on several nodes."""

_Row = tuple[float, int, SyncStep]
"""The end of a row, its worker, and itself."""


@dataclass(frozen=True)
class GroupMeeting:
    """Rows of a trace that are of one collective.

    Attributes:
        key: pipeline rank.
        members: workers that it was of.
        rows: by worker, of those that went on within :data:`TOGETHER_S` of the first.
    """

    key: int
    members: tuple[int, ...]
    rows: dict[int, SyncStep]

    @property
    def is_whole(self) -> bool:
        """Whether all members are there."""
        return len(self.rows) == len(self.members)

    @property
    def asked_s(self) -> float:
        """The moment at which the last of them asked."""
        return max(row.asked_s for row in self.rows.values())

    def ends_s(self, world: World) -> list[float]:
        """Return the moments at which those went on that have the average at its very end.

        Behind fast links some members of a ring have everything a step before the others.
        """
        last = world.group_all_reduce(self.members, self.key).done[-1]
        return [self.rows[self.members[place]].end_s for place in last]


def meetings_of(trace: SyncTrace) -> list[GroupMeeting]:
    """Return the meetings of a trace, after each worker's first iterations.

    Raises:
        PipeplanError: if most rows of groups are in meetings without some of the members.
    """
    rows_of: dict[tuple[int, tuple[int, ...]], list[_Row]] = defaultdict(list)
    for worker, rows in enumerate(trace.workers):
        for row in rows:
            if row.iteration > WARM_UP:
                rows_of[row.pipeline_rank, row.members].append((row.end_s, worker, row))
    found = []
    for (key, members), theirs in rows_of.items():
        met: dict[int, SyncStep] = {}
        first_s = 0.0
        for end_s, worker, row in sorted(theirs, key=lambda one: one[:2]):
            if not met or worker in met or end_s - first_s > TOGETHER_S:
                met, first_s = {}, end_s
                found.append(GroupMeeting(key, members, met))
            met[worker] = row
    _require_one_clock([meeting for meeting in found if len(meeting.members) > 1])
    return found


def _require_one_clock(groups: Sequence[GroupMeeting]) -> None:
    """Refuse a trace in which most groups do not go on at one moment, as their members did."""
    apart = [meeting for meeting in groups if not meeting.is_whole]
    if 2 * sum(len(m.rows) for m in apart) <= sum(len(m.rows) for m in groups):
        return
    first = apart[0]
    row = next(iter(first.rows.values()))
    nearest = min(
        (
            other.end_s
            for meeting in apart[1:]
            if (meeting.key, meeting.members) == (first.key, first.members)
            for other in meeting.rows.values()
        ),
        key=lambda end_s: abs(end_s - row.end_s),
        default=None,
    )
    told = "no other row of theirs ends at all"
    if nearest is not None:
        told = f"the nearest other row of theirs ends at {nearest:.2f} s"
    raise PipeplanError(
        f"workers: most groups of workers do not go on at one moment, as they did: iteration "
        f"{row.iteration} of pipeline rank {first.key} among workers "
        f"{', '.join(map(str, first.members))} ends at {row.end_s:.2f} s, and {told}: the hosts' "
        "clocks differ or drift, or rows are missing; synchronise the clocks and measure again"
    )


def lateness_s(world: World, meetings: Sequence[GroupMeeting]) -> float:
    """Return the scale of how late members notice that their average is there.

    Two members that have it at the same moment go on some time apart. This is the mean distance of
    the members of a meeting, in the mean of all meetings, as a half-normal distribution has it.

    Args:
        world: of the pipelines that were measured.
        meetings: of the trace.
    """
    ends_s = [meeting.ends_s(world) for meeting in meetings if meeting.is_whole]
    distances_s = [
        fmean(abs(one - other) for one, other in combinations(row, 2))
        for row in ends_s
        if len(row) > 1
    ]
    return fmean(distances_s) / MEAN_DISTANCE if distances_s else 0.0


def durations(world: World, meetings: Sequence[GroupMeeting]) -> dict[Shape, list[float]]:
    """Return the seconds from the last member's request to the average, by shape of the collective.

    Members notice it late, by the world's lateness.

    Args:
        world: of the pipelines that were measured.
        meetings: of the trace.
    """
    found: dict[Shape, list[float]] = defaultdict(list)
    for meeting in meetings:
        if meeting.is_whole:
            bytes_, members = world.ranks[meeting.key].parameter_bytes, meeting.members
            end_s = fmean(meeting.ends_s(world)) - MEAN * world.lateness_s
            shape = bytes_, len(members), world.crosses(members)
            found[shape].append(end_s - meeting.asked_s)
    return found
