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

from planner.verification.lowering import PlanTasks
from planner.verification.speeds import Clocks, Times, Traffic
from planner.verification.tasks import Task, Wait

RELATIVE_TOLERANCE = 5e-9
"""Share of an iteration by which a moment may be off: rounding errors of long sums."""


class CheckedTimes:
    """Claimed times of all tasks of a plan.

    Args:
        tasks: of the plan.
        times: that are claimed for them.

    Attributes:
        times: the same.
        lines: the tasks that each line serves, in order; once :meth:`problems` has been called.
        iteration_time_s: when the last task ends.
        tolerance_s: by which a moment may be off.
    """

    def __init__(self, tasks: PlanTasks, times: Times) -> None:
        self.plan_tasks, self.tasks, self.times = tasks, tasks.tasks, times
        self._cluster = tasks.plan.cluster
        self.iteration_time_s = max((span.end_s for span in times.values()), default=0.0)
        self.tolerance_s = RELATIVE_TOLERANCE * self.iteration_time_s
        self.lines: defaultdict[Hashable, list[Task]] = defaultdict(list)

    def problems(self) -> Iterator[str]:
        """Yield what does not hold; the first kind of fault hides those that follow from it."""
        for check in (self._names, self._starts, self._computation, self._flows):
            found = list(check())
            if found:
                yield from found
                return

    def _names(self) -> Iterator[str]:
        for key in self.tasks.keys() - self.times.keys():
            yield f"{key} has no time"
        for key in self.times.keys() - self.tasks.keys():
            yield f"{key} has a time, but the plan has no such task"
        for key, (start_s, end_s) in self.times.items():
            if not 0 <= start_s <= end_s < inf:
                yield f"{key} runs from {start_s} s to {end_s} s"

    def moment_s(self, wait: Wait) -> float:
        """Return when what is waited for had happened."""
        start_s, end_s = self.times[wait.key]
        if wait.ahead_s == 0:
            return end_s
        if wait.ahead_s == inf:
            return start_s
        device = self.tasks[wait.key].devices[0]
        return max(start_s, self._clocks.before_s(device, end_s, wait.ahead_s))

    def _starts(self) -> Iterator[str]:
        """Each task starts as soon as it can; a line serves first what came first."""
        self._clocks = Clocks(self._cluster, self.tasks.values(), self.times)
        came_s = {
            key: max(map(self.moment_s, self.plan_tasks.waits(task)), default=0.0)
            for key, task in self.tasks.items()
        }
        earliest_s = dict(came_s)
        self.lines.clear()
        for task in sorted(self.tasks.values(), key=lambda row: (*self.times[row.key], row.rank)):
            for line in task.lines:
                self.lines[line].append(task)
        for rows in self.lines.values():
            for before, after in pairwise(rows):
                ended_s = self.times[before.key].end_s
                earliest_s[after.key] = max(earliest_s[after.key], ended_s)
                later_s = came_s[before.key] - came_s[after.key]
                if later_s > self.tolerance_s or (not later_s and self._is_first(after, before)):
                    yield f"{after.key} came before {before.key}, but goes after it"
        for key, least_s in earliest_s.items():
            if not self._is(self.times[key].start_s, least_s):
                yield (
                    f"{key} starts at {self.times[key].start_s} s, but what it waits for has ended "
                    f"at {least_s} s"
                )

    def _is_first(self, task: Task, other: Task) -> bool:
        """Return whether of two that came at one moment this one has to go first.

        Where something that they waited for takes no time, that is not known: it may have begun at
        the same moment.
        """
        waits = (wait for row in (task, other) for wait in self.plan_tasks.waits(row))
        is_known = all(self.tasks[wait.key].seconds > 0 for wait in waits)
        return is_known and bool(task.rank and other.rank) and task.rank < other.rank

    def _is(self, said_s: float, found_s: float) -> bool:
        return abs(said_s - found_s) <= self.tolerance_s

    def _computation(self) -> Iterator[str]:
        """Operations and steps take their seconds on the clocks of their devices, copies alone."""
        for key, task in self.tasks.items():
            if key.what in ("operation", "copy", "step"):
                yield from self._took(task, self._clocks.passed_s(task, self.times[key]))

    def _took(self, task: Task, passed_s: float) -> Iterator[str]:
        if not self._is(passed_s, task.seconds):
            span = self.times[task.key]
            yield (
                f"{task.key} takes {task.seconds} s alone, but from {span.start_s} s to "
                f"{span.end_s} s only {passed_s} s of it passed"
            )

    def _flows(self) -> Iterator[str]:
        """Messages and collectives move their bytes at the rates that they had."""
        for kinds, clocks in ((("message", "reduction"), self._clocks), (("gather",), None)):
            flows = [task for task in self.tasks.values() if task.key.what in kinds]
            traffic = Traffic(self._cluster, flows, self.times, clocks)
            for task in flows:
                start_s, end_s = self.times[task.key]
                yield from self._took(task, traffic.passed_s.get(task.key, end_s - start_s))

    @property
    def busy_s(self) -> dict[str, float]:
        """By device, the seconds of its operations and its optimizer step."""
        found = {task.devices[0]: 0.0 for task in self.tasks.values() if task.key.what == "step"}
        for key, task in self.tasks.items():
            if key.what in ("operation", "step"):
                start_s, end_s = self.times[key]
                found[task.devices[0]] += end_s - start_s
        return found

    @property
    def bubble(self) -> float:
        """Idle share of the devices in use."""
        busy_s = self.busy_s
        whole_s = len(busy_s) * self.iteration_time_s
        return max(0.0, 1 - sum(busy_s.values()) / whole_s) if whole_s else 0.0
