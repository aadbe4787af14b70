"""The shares of the critical path of checked times by what they come from (docs/replay.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cluster.hardware import Source
from planner.model.graph_record import Layer
from planner.verification.layer_costs import at_lengths, exchanging_s
from planner.verification.tasks import Key, Task, Wait, message_needed_by
from planner.verification.times import CheckedTimes

_WEAKEST_FIRST: tuple[Source, ...] = ("assumed", "datasheet", "measured")
TOLERANCE = 1e-6
"""Of shares."""
_PHASES_OF = {
    "F": ("forward",),
    "I": ("input_gradient",),
    "W": ("weight_gradient",),
    "B": ("input_gradient", "weight_gradient"),
}


Seconds = NDArray[np.float64]
"""By source, in the order of :data:`_WEAKEST_FIRST`."""


def time_shares(checked: CheckedTimes, said: Mapping[str, float]) -> dict[str, float] | None:
    """Return the shares of a critical path by the source of their figures; None if it takes none.

    Where several tasks end at the moment at which another one starts, there are several such paths;
    what is said is returned if no source has less or more in it than the paths allow.

    Args:
        checked: times that hold.
        said: the shares that a plan claims.
    """
    path, sources = _Path(checked), _Sources(checked)
    found = sum((sources.shares(task) * s for task, s in path.back_from_the_end()), np.zeros(3))
    total_s = found.sum()
    if not total_s:
        return None
    claimed = np.array([said[name] for name in _WEAKEST_FIRST])
    if (np.abs(claimed - found / total_s) > TOLERANCE).any():
        least_s, most_s = path.ranges(sources.shares)
        is_low = claimed < least_s / total_s - TOLERANCE
        is_high = claimed > most_s / total_s + TOLERANCE
        if not is_low.any() and not is_high.any():
            return dict(said)
    return dict(zip(_WEAKEST_FIRST, (found / total_s).tolist(), strict=True))


class _Path:
    """The critical paths: what each task waited for last (docs/replay.md)."""

    def __init__(self, checked: CheckedTimes) -> None:
        self._tasks, self._times, self._moment_s = checked.tasks, checked.times, checked.moment_s
        self._checked = checked
        rules = checked.plan_tasks.plan.behaviour
        self._blocks = "blocking" in (rules.send, rules.receive)
        # By device and moment: what ran until then, and what was sent or received until then.
        self._ran: dict[tuple[str, float], Key] = {}
        self._met: defaultdict[tuple[str, float], list[Key]] = defaultdict(list)
        self._before: dict[tuple[Key, object], Key] = {}
        for key, task in self._tasks.items():
            for device in task.devices:
                if key.what == "operation":
                    self._ran[device, self._times[key].end_s] = key
                elif key.what == "message":
                    self._met[device, self._times[key].end_s].append(key)
        for line, rows in checked.lines.items():
            for before, after in pairwise(rows):
                self._before[after.key, line] = before.key

    def back_from_the_end(self) -> Iterator[tuple[Task, float]]:
        """Yield the tasks of the path, each with the seconds that it is on it."""
        key, seen = self._last(), set[Key]()
        until_s = self._times[key].end_s
        while key not in seen:
            seen.add(key)
            start_s = self._times[key].start_s
            if until_s > start_s:
                yield self._tasks[key], until_s - start_s
            causes = (wait for wait in self._causes(self._tasks[key]) if wait.key not in seen)
            nearest = min(
                causes, key=lambda wait: abs(self._moment_s(wait) - start_s), default=None
            )
            if nearest is None or not start_s:
                return
            key, until_s = nearest.key, start_s

    def ranges(self, shares: Callable[[Task], Seconds]) -> tuple[Seconds, Seconds]:
        """Return the least and the most seconds by source that a critical path has.

        Args:
            shares: of a task by source.
        """
        last = self._last()
        causes, found = {}, [last]
        while found:
            if (key := found.pop()) not in causes:
                causes[key] = self._nearest(key)
                found += causes[key]
        least, most = dict.fromkeys(causes, np.zeros(3)), dict.fromkeys(causes, np.zeros(3))
        # Twice: tasks that take no time may wait for each other in a circle.
        for key in 2 * sorted(causes, key=lambda key: self._times[key]):
            start_s = self._times[key].start_s
            for side, best in (least, np.minimum), (most, np.maximum):
                rows = [
                    side[cause]
                    + shares(self._tasks[cause]) * max(0.0, start_s - self._times[cause].start_s)
                    for cause in causes[key]
                ]
                side[key] = best.reduce(rows) if rows else np.zeros(3)
        start_s, end_s = self._times[last]
        own = shares(self._tasks[last]) * (end_s - start_s)
        return least[last] + own, most[last] + own

    def _nearest(self, key: Key) -> list[Key]:
        """Return all that a task may have waited for last."""
        start_s = self._times[key].start_s
        waits = list(self._causes(self._tasks[key])) if start_s else []
        away_s = [abs(self._moment_s(wait) - start_s) for wait in waits]
        most_s = min(away_s, default=0.0) + self._checked.tolerance_s
        return [wait.key for wait, s in zip(waits, away_s, strict=True) if s <= most_s]

    def _last(self) -> Key:
        """Return the step that ends last, or the first of the gathers that end later still."""
        ends = [key for key in self._tasks if key.what in ("step", "gather")]
        return max(ends, key=lambda key: self._times[key].end_s)

    def _causes(self, task: Task) -> Iterator[Wait]:
        """Yield what may have been last, what the path prefers first."""
        match task.key.what:
            case "operation":
                for key in (task.key, *task.together):
                    yield from self._of_operation(self._tasks[key], self._times[task.key].start_s)
            case "copy":
                yield from self._in_line(task)
                for wait in task.waits:
                    asking = self._tasks[wait.key]
                    yield from self._causes(asking) if wait.ahead_s else [wait]
            case "message":
                yield task.waits[0]
                yield from self._in_line(task)
                yield from self._of_ends(task)
            case _:
                yield from task.waits
                yield from self._in_line(task)

    def _of_operation(self, task: Task, start_s: float) -> Iterator[Wait]:
        needed = Key("message", message_needed_by(task.key.operation))
        yield from (w for w in task.waits if w.key.what != "message" or w.key == needed)
        yield from self._meeting(start_s, task.devices)

    def _of_ends(self, task: Task) -> Iterator[Wait]:
        start_s = self._times[task.key].start_s
        ran = (self._ran.get((device, start_s)) for device in task.devices if self._blocks)
        yield from (Wait(key) for key in ran if key is not None)
        yield from self._meeting(start_s, task.devices)

    def _meeting(self, moment_s: float, devices: Sequence[str]) -> Iterator[Wait]:
        """Yield the messages of devices that ended at a moment, where devices wait for any."""
        found = {key for device in devices for key in self._met[device, moment_s] if self._blocks}
        yield from map(Wait, sorted(found))

    def _in_line(self, task: Task) -> Iterator[Wait]:
        for line in task.lines:
            if (task.key, line) in self._before:
                yield Wait(self._before[task.key, line])


class _Sources:
    """The seconds of a task, or a share of them, by the source of the figures behind them."""

    def __init__(self, checked: CheckedTimes) -> None:
        self._plan, self._costs = checked.plan_tasks.plan, checked.plan_tasks.costs
        self._cluster = self._plan.cluster
        self._known: dict[object, Seconds] = {}

    def shares(self, task: Task) -> Seconds:
        """Return the shares of a task's seconds by source; they sum to 1."""
        operation = task.key.operation[:2] if task.key.what == "operation" else None
        same = task.key.what, operation, tuple(task.devices)
        if same not in self._known:
            found = dict.fromkeys(_WEAKEST_FIRST, 0.0)
            for source, seconds in self._of(task):
                found[source] += seconds
            if not any(found.values()):  # Host time alone.
                found["measured"] = 1.0
            self._known[same] = np.array(list(found.values())) / sum(found.values())
        return self._known[same]

    def _of(self, task: Task) -> Iterator[tuple[Source, float]]:
        """Yield the parts of a task."""
        match task.key.what:
            case "operation":
                stage, kind, _ = task.key.operation
                yield from self._of_operation(stage, kind, task.devices[0])
            case "step" | "copy":
                yield self._cluster.device_type(task.devices[0]).source, 1.0
            case "message":
                yield self._weakest_link(task.devices), 1.0
            case _:
                yield self._weakest_link((*task.devices, task.devices[0])), 1.0

    def _weakest_link(self, devices: Sequence[str]) -> Source:
        """Return the weakest source of the links on a message's path or a collective's ring."""
        paths = (self._costs.routes.path(*ends) for ends in pairwise(devices))
        sources = {self._cluster.links[number].source for path in paths for number in path.links}
        return next(source for source in _WEAKEST_FIRST if source in sources)

    def _of_operation(self, stage: int, kind: str, device: str) -> Iterator[tuple[Source, float]]:
        """Each layer by its time: measured, or phase by phase of its roofline."""
        rerun = set(self._plan.stages[stage].recompute)
        for whole in self._costs.layers(stage):
            shares = [row.share for row in whole.lengths] or [1.0]
            for layer, share in zip(at_lengths(whole) or [whole], shares, strict=True):
                parts = self._of_layer(layer, kind, device, again=whole.name in rerun)
                yield from ((source, share * seconds) for source, seconds in parts)
        for gather_s, sum_s in self._costs.collective_s[stage].values():
            ring = self._costs.ring(stage)
            seconds = {"B": gather_s + sum_s, "W": sum_s}.get(kind, gather_s)
            yield self._weakest_link((*ring, ring[0])), seconds

    def _of_layer(
        self, layer: Layer, kind: str, device: str, *, again: bool
    ) -> Iterator[tuple[Source, float]]:
        name, figures = self._cluster.type_of(device), self._cluster.device_type(device)
        phases = (*_PHASES_OF[kind], *(_PHASES_OF["F"] if again and kind in "BI" else ()))
        if name in layer.measured:
            sent_s = sum(exchanging_s(layer, phase, figures) for phase in phases)
            yield "measured", self._costs.layer_seconds(layer, name)["FIWB".index(kind)] - sent_s
            yield figures.source, sent_s
            return
        if kind == "F":
            loaded_s = self._costs.problem.seconds(layer, name, loading=False)[0]
            yield figures.source, self._costs.problem.seconds(layer, name)[0] - loaded_s
        for phase in phases:
            seconds, by_throughput = self._costs.problem.roofline(layer, phase, figures)
            is_guess = figures.source == "datasheet" and by_throughput
            yield "assumed" if is_guess else figures.source, seconds
            yield figures.source, exchanging_s(layer, phase, figures)
