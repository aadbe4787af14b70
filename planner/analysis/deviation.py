"""Deviation of a measured timeline from the simulated one: medians of the same events.

The simulator's times stand for every step; the measured ones are medians over the steps that count
(:attr:`planner.measured.timeline.MeasuredTimeline.counted_steps`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, TypeVar

from planner.analysis.hardware import other_hardware
from planner.costs.group_collectives import inside_times
from planner.errors import PipeplanError
from planner.measured.clocks import ClockConflict, clock_conflict
from planner.measured.timeline import MeasuredTimeline
from planner.plan.operations import KIND_LABELS, Kind, Operation, stages_label
from planner.plan.plan import Plan
from planner.simulation.timeline import Timeline, reduction_spans
from planner.units import format_seconds

_Key = TypeVar("_Key", bound=Hashable)

OUTSIDE = ("before the first operation", "after the last event")
"""Parts of a measured iteration that no prediction counts."""


@dataclass(frozen=True)
class Deviation:
    """Predicted and measured median seconds of the same thing.

    Attributes:
        count: how often it happens in one iteration.
        predicted_s: None if the simulator has no such event.
        measured_s: None if none was measured.
    """

    count: int
    predicted_s: float | None
    measured_s: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where either is missing or the prediction is 0."""
        if self.measured_s is None or not self.predicted_s:
            return None
        return self.measured_s / self.predicted_s

    @property
    def factor(self) -> float:
        """How many times too long or too short the prediction is: 1 if exact, infinite at 0."""
        if self.measured_s == self.predicted_s:
            return 1.0
        ratio = self.ratio
        return max(ratio, 1 / ratio) if ratio else float("inf")


@dataclass(frozen=True, repr=False)
class Comparison:
    """A simulated and a measured timeline of one plan.

    Attributes:
        kinds: of operations by their kind.
        operations: by stage, device and kind.
        collectives: of these, collectives inside tensor-parallel groups; empty where they were not
            measured.
        transfers: by source and target, from ready to received, waiting for the link included.
        reductions: all-reduces by their stages, from the last device's start to the last one's end.
        optimizer: optimizer steps by device.
        waiting: by device: iteration time less operations and optimizer step.
        batches: by device: for which its host loaded batches, which no prediction counts; on a CPU
            within forwards. Empty where it was not measured.
        outside: what no prediction counts: until the first operation of all devices begins
            (zeroed gradients, and batches that are loaded ahead), and after the last event
            (metrics).
        iteration: the whole iteration.
        steps: the measured steps that count.
        spread: distance between the quartiles of their times, as a share of the median.
        emulated: whether the measured operations were slept, not computed.
        clock_conflict: a sign that the devices' clocks differ, so that times of messages are wrong.
        other_hardware: a line for each device type that other hardware ran.
    """

    kinds: Mapping[Kind, Deviation]
    operations: Mapping[tuple[int, str, Kind], Deviation]
    collectives: Mapping[tuple[int, str, Kind], Deviation]
    transfers: Mapping[tuple[str, str], Deviation]
    reductions: Mapping[tuple[int, ...], Deviation]
    optimizer: Mapping[str, Deviation]
    waiting: Mapping[str, Deviation]
    batches: Mapping[str, Deviation]
    outside: Mapping[str, Deviation]
    iteration: Deviation
    steps: tuple[int, ...]
    spread: float
    emulated: bool
    clock_conflict: ClockConflict | None
    other_hardware: tuple[str, ...]

    def __repr__(self) -> str:
        """Return both iteration times, in a line."""
        total = self.iteration
        predicted = format_seconds(total.predicted_s or 0.0)
        measured = format_seconds(total.measured_s or 0.0)
        return f"<Comparison: iteration {predicted} predicted, {measured} measured>"

    @property
    def largest(self) -> list[tuple[str, float]]:
        """What differs most, with the predicted seconds of an iteration less the measured ones.

        Operations of a stage on a device, messages from a device to another, reductions of stages,
        optimizer steps and what is outside all of them; the largest differences first. They need
        not lie on the critical path.
        """
        rows = [
            *(
                (f"{KIND_LABELS[k]} of stage {s} on {d}", r)
                for (s, d, k), r in self.operations.items()
            ),
            *((f"messages from {a} to {b}", row) for (a, b), row in self.transfers.items()),
            *((f"all-reduce of {stages_label(s)}", row) for s, row in self.reductions.items()),
            *((f"optimizer step of {device}", row) for device, row in self.optimizer.items()),
            *self.outside.items(),
        ]
        found = [
            (what, row.count * (row.predicted_s - row.measured_s))
            for what, row in rows
            if row.measured_s is not None and row.predicted_s is not None
        ]
        return sorted(found, key=lambda row: -abs(row[1]))

    @property
    def error(self) -> float | None:
        """Error of the predicted iteration time as a share of the measured: -0.1 if 10 % short."""
        if self.iteration.predicted_s is None or not self.iteration.measured_s:
            return None
        return self.iteration.predicted_s / self.iteration.measured_s - 1


def compare_with_measured(plan: Plan, timeline: Timeline, measured: MeasuredTimeline) -> Comparison:
    """Compare a plan's simulation with a measurement of the same plan.

    Args:
        plan: what ran.
        timeline: its simulation.
        measured: its measurement.

    Raises:
        PipeplanError: if the measurement is of another plan.
    """
    require_timeline_of(plan, measured)
    found, expected, steps = _measured(measured), _predicted(timeline), measured.counted_steps
    if not found["collectives"]:
        expected["collectives"] = {}
    rows: dict[str, Any] = {
        name: _deviations(expected.get(name, {}), samples, len(steps))
        for name, samples in found.items()
    }
    times = [row.iteration_time_s for row in measured.steps if row.step in steps]
    return Comparison(
        kinds=_by_kind(expected["operations"], found["operations"], len(steps)),
        **rows,
        iteration=Deviation(1, timeline.iteration_time_s, median(times)),
        steps=steps,
        spread=_spread(times),
        emulated=measured.emulated,
        clock_conflict=clock_conflict(measured),
        other_hardware=other_hardware(plan, measured),
    )


def _spread(times: Sequence[float]) -> float:
    """Return the distance between the quartiles as a share of the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def require_timeline_of(plan: Plan, measured: MeasuredTimeline) -> None:
    """Refuse a measurement that is not of this plan, or not of all its operations.

    Raises:
        PipeplanError: saying what differs.
    """
    if measured.plan_digest != plan.execution_digest:
        raise PipeplanError(
            f"plan_digest: the timeline was measured with {measured.plan_digest[:19]}… "
            f"({measured.model} on {measured.cluster}), this plan has "
            f"{plan.execution_digest[:19]}…: its layers, stages, orders or ranks differ; give the "
            "plan that ran, or run this one with --timeline"
        )
    problems = list(_different_devices(plan, measured)) or list(_missing_operations(plan, measured))
    if problems:
        raise PipeplanError(problems)


def _different_devices(plan: Plan, measured: MeasuredTimeline) -> Iterator[str]:
    names = tuple(device.name for device in measured.devices)
    if names != plan.ranks:
        yield f"devices: the timeline has {', '.join(names)}, the plan {', '.join(plan.ranks)}"


def _missing_operations(plan: Plan, measured: MeasuredTimeline) -> Iterator[str]:
    """Describe operations of the plan that a step lacks; equal counts mean equal sets."""
    planned = {
        (device, str(operation))
        for device, order in plan.parsed_orders().items()
        for operation in order
    }
    for event in measured.operations:
        if (event.device, event.operation) not in planned:
            yield (
                f"operations: {event.operation} ran on {event.device!r} in step {event.step}, "
                "where the plan has it not; measure again"
            )
    counts = Counter(event.step for event in measured.operations)
    for row in measured.steps:
        if counts[row.step] < len(planned):
            yield (
                f"operations: step {row.step} has {counts[row.step]} of the plan's {len(planned)}; "
                "the timeline is not complete, measure again"
            )


_Samples = dict[Any, list[float]]
"""Seconds of events of one kind, by what distinguishes them: see :class:`Comparison`."""


def _predicted(timeline: Timeline) -> dict[str, _Samples]:
    """Return the seconds of a simulation's events, by fields of :class:`Comparison`."""
    operations: _Samples = defaultdict(list)
    transfers: _Samples = defaultdict(list)
    ready_s: dict[Operation, float] = {}
    for event in timeline.operations:
        stage, kind, microbatch = event.operation
        operations[stage, event.device, kind].append(event.end_s - event.start_s)
        # A gradient is sent after a whole backward or after its first half.
        ready_s[Operation(stage, "B" if kind == "I" else kind, microbatch)] = event.end_s
    for sent in timeline.transfers:
        if sent.end_s > sent.start_s:
            transfers[sent.source, sent.target].append(sent.end_s - ready_s[sent.operation])
    inside = {
        (stage, device, kind): inside_times(timeline.pipeline, stage, device).seconds(kind)
        for stage, device, kind in operations
    }
    # As they are measured: reductions from the first bucket of a stage to its last, optimizer steps
    # with the all-gather of parameters, where there is one.
    spans_s, whole_s = reduction_spans(timeline), timeline.iteration_time_s
    gathered_s = {d: timeline.done_s[d] - end_s for d, end_s in timeline.end_s.items()}
    return {
        "operations": operations,
        "collectives": {key: [inside[key]] * len(times) for key, times in operations.items()},
        "transfers": transfers,
        "reductions": {stages: [end_s - start_s] for stages, (start_s, end_s) in spans_s.items()},
        "optimizer": {d: [s + gathered_s[d]] for d, s in timeline.optimizer_s.items()},
        "waiting": {d: [max(0.0, whole_s - s - gathered_s[d])] for d, s in timeline.busy_s.items()},
        "outside": {where: [0.0] for where in OUTSIDE},
    }


def _measured(measured: MeasuredTimeline) -> dict[str, _Samples]:
    """Return the seconds of a measurement's events in the steps that count, by the same fields."""
    names = "operations collectives transfers reductions optimizer waiting batches outside".split()
    found: dict[str, _Samples] = {name: defaultdict(list) for name in names}
    time_s = {
        row.step: row.iteration_time_s
        for row in measured.steps
        if row.step in measured.counted_steps
    }
    begins_s: dict[int, float] = {}
    ends_s: dict[int, float] = defaultdict(float)
    busy_s: dict[tuple[int, str], float] = defaultdict(float)
    for op in (row for row in measured.operations if row.step in time_s):
        key = op.what.stage, op.device, op.what.kind
        found["operations"][key].append(op.seconds)
        if op.collective_s is not None:
            found["collectives"][key].append(op.collective_s)
        busy_s[op.step, op.device] += op.seconds
        begins_s[op.step] = min(op.start_s, begins_s.get(op.step, op.start_s))
    for sent in (row for row in measured.transfers if row.step in time_s):
        found["transfers"][sent.source, sent.target].append(sent.seconds)
    for update in (row for row in measured.optimizer_steps if row.step in time_s):
        found["optimizer"][update.device].append(update.seconds)
        busy_s[update.step, update.device] += update.seconds
    for (step, device), seconds in busy_s.items():
        found["waiting"][device].append(max(0.0, time_s[step] - seconds))
    # From when the last device joins a reduction: those that come early wait for it.
    spans: dict[tuple[int, tuple[int, ...]], list[tuple[float, float]]] = defaultdict(list)
    for event in (row for row in measured.reductions if row.step in time_s):
        spans[event.step, event.stages].append((event.start_s, event.end_s))
    for (_, stages), rows in spans.items():
        starts, ends = zip(*rows, strict=True)
        found["reductions"][stages].append(max(0.0, max(ends) - max(starts)))
    for last in (*measured.operations, *measured.reductions, *measured.optimizer_steps):
        ends_s[last.step] = max(last.end_s, ends_s[last.step])
    for row in (row for row in measured.steps if row.step in time_s):
        for device, seconds in row.batch_wait_s.items():
            found["batches"][device].append(seconds)
        after_s = max(0.0, row.iteration_time_s - ends_s[row.step])
        for where, seconds in zip(OUTSIDE, (begins_s[row.step], after_s), strict=True):
            found["outside"][where].append(seconds)
    return found


def _deviations(
    predicted: Mapping[_Key, list[float]], measured: Mapping[_Key, list[float]], steps: int
) -> dict[_Key, Deviation]:
    """Return deviations by key, in the order of the prediction."""
    return {
        key: _deviation(predicted.get(key, ()), measured.get(key, ()), steps)
        for key in dict.fromkeys([*predicted, *measured])
    }


def _deviation(predicted: Iterable[float], measured: Iterable[float], steps: int) -> Deviation:
    expected, found = list(predicted), list(measured)
    return Deviation(
        len(expected) or -(-len(found) // steps),
        median(expected) if expected else None,
        median(found) if found else None,
    )


def _by_kind(
    predicted: Mapping[tuple[int, str, Kind], list[float]],
    measured: Mapping[tuple[int, str, Kind], list[float]],
    steps: int,
) -> dict[Kind, Deviation]:
    def of(rows: Mapping[tuple[int, str, Kind], list[float]], wanted: Kind) -> list[float]:
        return [
            value for (_, _, kind), values in rows.items() if kind == wanted for value in values
        ]

    kinds = [kind for kind in KIND_LABELS if of(predicted, kind)]
    return {kind: _deviation(of(predicted, kind), of(measured, kind), steps) for kind in kinds}
