"""Whether claimed times are those of a plan's tasks, without a replay (docs/replay.md).

Somebody says when each task started and ended. From that and the tasks follows all that has to
hold: a task starts at the latest of what it waited for, a line serves one task at a time and in the
order in which they came, computation takes its seconds at the speed that its device had, and bytes
move at the max-min fair rates of all that moved at that moment. A simulator's mistake shows as a
claim that does not hold; nothing here knows how the times were found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import pairwise
from math import inf

from planner.verification.speeds import Clocks, Times, moved_s
from planner.verification.tasks import PlanTasks, Task

RELATIVE_TOLERANCE = 5e-9
"""Share of an iteration by which a moment may be off: rounding errors of long sums."""


class CheckedTimes:
    """Claimed times of all tasks of a plan.

    Args:
        tasks: of the plan.
        times: that are claimed for them.

    Attributes:
        times: the same.
        iteration_time_s: when the last task ends.
    """

    def __init__(self, tasks: PlanTasks, times: Times) -> None:
        self.plan_tasks, self.times = tasks, times
        self._tasks, self._cluster = list(tasks.tasks.values()), tasks.plan.cluster
        self.iteration_time_s = max((span.end_s for span in times.values()), default=0.0)
        self._tolerance_s = RELATIVE_TOLERANCE * self.iteration_time_s

    def problems(self) -> Iterator[str]:
        """Yield what does not hold; the first kind of fault hides those that follow from it."""
        found = list(self._names())
        if not found:
            spans = [self.times[task.key] for task in self._tasks]
            self._start_s, self._end_s = ([span[side] for span in spans] for side in (0, 1))
            self._clocks = Clocks(self._cluster, self._tasks, self.times)
            found = list(self._starts()) or list(self._lengths())
        yield from found

    def _names(self) -> Iterator[str]:
        known = self.plan_tasks.tasks.keys()
        for key in known - self.times.keys():
            yield f"{key} has no time"
        for key in self.times.keys() - known:
            yield f"{key} has a time, but the plan has no such task"
        for key, (start_s, end_s) in self.times.items():
            if not 0 <= start_s <= end_s < inf:
                yield f"{key} runs from {start_s} s to {end_s} s"

    # --- starts -----------------------------------------------------------------------------------

    def _starts(self) -> Iterator[str]:
        """Each task starts as soon as it can; a line serves first what came first."""
        came_s, may_be_tied = self._came()
        earliest_s = list(came_s)
        for line in self._lines():
            for before, after in pairwise(line):
                earliest_s[after] = max(earliest_s[after], self._end_s[before])
                later_s = came_s[before] - came_s[after]
                one, other = self._tasks[before], self._tasks[after]
                is_tie = later_s == 0 and not (may_be_tied[before] or may_be_tied[after])
                if later_s > self._tolerance_s or (is_tie and _is_first(other, one)):
                    yield f"{other.key} came before {one.key}, but goes after it"
        for task, start_s, least_s in zip(self._tasks, self._start_s, earliest_s, strict=True):
            if not self._is(start_s, least_s):
                yield (
                    f"{task.key} starts at {start_s} s, but what it waits for has ended at "
                    f"{least_s} s"
                )

    def _is(self, said_s: float, found_s: float) -> bool:
        return abs(said_s - found_s) <= self._tolerance_s

    def _came(self) -> tuple[list[float], list[bool]]:
        """Return when each task had all that it waits for, and whether another may be its tie.

        Where something that it waited for takes no time, it is not known which of two that came at
        one moment was first: that may have begun at the same moment.
        """
        number = {task.key: place for place, task in enumerate(self._tasks)}
        came_s = [0.0] * len(self._tasks)
        may_be_tied = [False] * len(self._tasks)
        for place, task in enumerate(self._tasks):
            for key, ahead_s in task.waits:
                other = number[key]
                moment_s = self._end_s[other]
                if ahead_s == inf:
                    moment_s = self._start_s[other]
                elif ahead_s > 0:
                    device = self._tasks[other].devices[0]
                    moment_s = self._clocks.before_s(device, moment_s, ahead_s)
                    moment_s = max(self._start_s[other], moment_s)
                came_s[place] = max(came_s[place], moment_s)
                may_be_tied[place] |= self._tasks[other].seconds == 0
        return came_s, may_be_tied

    def _lines(self) -> Iterator[list[int]]:
        """Yield the numbers of the tasks that each line serves, in order."""
        lines: defaultdict[Hashable, list[int]] = defaultdict(list)
        spans = list(zip(self._start_s, self._end_s, strict=True))
        held = [number for number, task in enumerate(self._tasks) if task.lines]
        for number in sorted(held, key=lambda n: (spans[n], self._tasks[n].rank)):
            for line in self._tasks[number].lines:
                lines[line].append(number)
        yield from lines.values()

    # --- lengths ----------------------------------------------------------------------------------

    def _lengths(self) -> Iterator[str]:
        """Operations and steps take their seconds on the clocks of their devices, copies alone.

        Messages and collectives move their bytes at the rates that they had.
        """
        moved = {
            **moved_s(self._cluster, self._of("message", "reduction"), self.times, self._clocks),
            **moved_s(self._cluster, self._of("gather"), self.times),
        }
        for task, span in ((task, self.times[task.key]) for task in self._tasks):
            passed_s = moved.get(task.key, span.end_s - span.start_s)
            if task.key.what in ("operation", "step"):
                passed_s = self._clocks.passed_s(task, span)
            if not self._is(passed_s, task.seconds):
                yield (
                    f"{task.key} takes {task.seconds} s alone, but from {span.start_s} s to "
                    f"{span.end_s} s only {passed_s} s of it passed"
                )

    def _of(self, *kinds: str) -> list[Task]:
        return [task for task in self._tasks if task.key.what in kinds]

    # --- what follows from the times --------------------------------------------------------------

    @property
    def busy_s(self) -> dict[str, float]:
        """By device, the seconds of its operations and its optimizer step."""
        found = dict.fromkeys(self.plan_tasks.costs.devices, 0.0)
        for task in self._of("operation", "step"):
            start_s, end_s = self.times[task.key]
            found[task.devices[0]] += end_s - start_s
        return found

    @property
    def bubble(self) -> float:
        """Idle share of the devices in use."""
        busy_s = self.busy_s
        whole_s = len(busy_s) * self.iteration_time_s
        return max(0.0, 1 - sum(busy_s.values()) / whole_s) if whole_s else 0.0


def _is_first(task: Task, other: Task) -> bool:
    """Return whether of two that came at one moment this one has to go first."""
    return bool(task.rank and other.rank) and task.rank < other.rank
