"""The limits of each stage, and how much slower it could be: exact replays with slack.

All figures are of replays in which a stage's operations, or its transfers, take some factor as
long, while every device, link and group of devices keeps its order (see
:class:`planner.simulation.noise.OrderedTimes`). The iteration time is then the longest of finitely
many paths, each of which grows in proportion to the factor or stays: convex and piecewise linear.
So Newton's method from the right finds the largest factor that keeps a limit, in as many steps as
there are pieces at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.analysis.explain.memory import MemoryLimit
from planner.cluster.link_table import FloatArray
from planner.simulation.noise import OrderedTimes
from planner.simulation.timeline import Timeline

Limit = Literal["compute", "transfers", "memory", "nothing"]
Part = Literal["compute", "transfers"]
TOLERATED = 0.01
"""Share of the iteration for the second slack: what one more percent of it allows."""
STEP = 1e-7
"""Relative, for slopes."""
ROUNDING = 1e-9
"""A smaller share of the iteration is rounding."""
NOISE = 1e-7
"""A smaller slope, as a share of the iteration, is what rounding makes of a difference."""
MOST_STEPS = 50
"""Iterations of Newton's method; far more than it takes."""
MOST_EVENTS = 100_000
"""Beyond this many events only slopes are computed, no slack."""
LEAST = 1e-4
"""A smaller share of the iteration limits nothing."""
TRIED = 0.1
"""Factors by which a stage is made slower and faster to measure what it costs and saves."""


TRIALS: tuple[tuple[Part, float], ...] = (
    ("compute", 1 + STEP),
    ("transfers", 1 + STEP),
    ("compute", 1 + TRIED),
    ("compute", 1 - TRIED),
)
"""Trials of every stage: two slopes, a slower and a faster one."""


@dataclass(frozen=True)
class StageLimit:
    """The limit of a stage, and what its own pace is worth.

    Attributes:
        stage: its number.
        devices: its replicas.
        limited_by: ``memory`` if memory binds and one of its devices can hold no microbatch more;
            ``compute`` or ``transfers`` if these are on the critical path for more than the one
            microbatch that fills and drains the pipeline, whichever is there for longer; else
            ``nothing``.
        compute_s: the most of a critical path that is this stage's operations: by so much the
            iteration gets longer when they take twice as long, at least.
        transfers_s: the same of the transfers to it and from it.
        slack: how much slower its operations could be, as a share (0.25 for a quarter), before the
            iteration gets longer at all. None if they take no time, or the timeline is too long.
        slack_for_1_percent: before it gets more than 1 % longer.
        transfer_slack: as ``slack``, of its transfers.
        slower_10_percent: change of the iteration time, as a share of it, if its operations took
            10 % longer.
        faster_10_percent: the same if they took 10 % less, a negative share.
    """

    stage: int
    devices: tuple[str, ...]
    limited_by: Limit
    compute_s: float
    transfers_s: float
    slack: float | None
    slack_for_1_percent: float | None
    transfer_slack: float | None
    slower_10_percent: float
    faster_10_percent: float


@dataclass(frozen=True)
class Trial:
    """A stage's operations or transfers, and the factor by which they take longer."""

    stage: int
    part: Part
    factor: float


def trial_times_s(timeline: Timeline, trials: Sequence[Trial]) -> FloatArray:
    """Return the iteration time of each trial, in seconds; devices and links keep their order."""
    times = OrderedTimes(timeline)
    rows = [(trial.stage, trial.factor, trial.part == "transfers") for trial in trials]
    of, factors, moves = np.array(rows).reshape(-1, 3).T[:, :, None]
    stage = times.program.tasks["stage"]
    # A message is named by the operation that needs it: it is sent over this cut, or is none.
    cut = np.where(times.is_message, stage - times.is_forward, -2)
    is_longer = np.where(moves, (of == cut) | (of == cut + 1), times.is_operation & (of == stage))
    return times.times_s(np.where(is_longer, factors, 1.0))


def stage_limits(timeline: Timeline, memory: MemoryLimit) -> tuple[StageLimit, ...]:
    """Return the limits of every stage of a timeline, in order.

    Args:
        timeline: a replay.
        memory: whether memory binds, and which devices are full.
    """
    stages = range(len(timeline.pipeline.stages))
    trials = [Trial(stage, *factors) for stage in stages for factors in TRIALS]
    whole_s = timeline.iteration_time_s
    rows = trial_times_s(timeline, trials).reshape(len(stages), len(TRIALS))
    slacks = _all_slacks(timeline)
    changes = rows / whole_s - 1 if whole_s > 0 else np.zeros_like(rows)
    return tuple(
        _stage_limit(timeline, memory, stage, rows[stage], changes[stage], slacks)
        for stage in stages
    )


def _stage_limit(
    timeline: Timeline,
    memory: MemoryLimit,
    stage: int,
    times_s: FloatArray,
    changes: FloatArray,
    slacks: Mapping[tuple[int, Part, float], float],
) -> StageLimit:
    compute_s, transfers_s = (
        _slope(timeline.iteration_time_s, float(time_s)) for time_s in times_s[:2]
    )
    return StageLimit(
        stage=stage,
        devices=timeline.pipeline.stages[stage].spec.devices,
        limited_by=_limit(timeline, memory, stage, compute_s, transfers_s),
        compute_s=compute_s,
        transfers_s=transfers_s,
        slack=slacks.get((stage, "compute", 0.0)),
        slack_for_1_percent=slacks.get((stage, "compute", TOLERATED)),
        transfer_slack=slacks.get((stage, "transfers", 0.0)),
        slower_10_percent=float(changes[2]),
        faster_10_percent=float(changes[3]),
    )


def _slope(whole_s: float, longer_s: float) -> float:
    """Return the seconds for each 100 %; 0 where they are rounding alone."""
    slope_s = (longer_s - whole_s) / STEP
    return slope_s if slope_s > NOISE * whole_s else 0.0


def _limit(
    timeline: Timeline, memory: MemoryLimit, stage: int, compute_s: float, transfers_s: float
) -> Limit:
    devices = timeline.pipeline.stages[stage].spec.devices
    if memory.binds and set(devices) & set(memory.full):
        return "memory"
    least_s = LEAST * timeline.iteration_time_s
    beyond: dict[Limit, float] = {
        "compute": compute_s - _longest_work_s(timeline, stage),
        "transfers": transfers_s - _longest_transfers_s(timeline, stage),
    }
    most = max(beyond, key=lambda part: beyond[part])
    return most if beyond[most] > least_s else "nothing"


def _longest_work_s(timeline: Timeline, stage: int) -> float:
    """Return all operations of one microbatch on the stage's slowest replica, in seconds."""
    times = timeline.pipeline.stages[stage].times.values()
    return max(
        each.forward_s + max(each.backward_s, each.input_gradient_s + each.weight_gradient_s)
        for each in times
    )


def _longest_transfers_s(timeline: Timeline, stage: int) -> float:
    """Return one microbatch's transfers to and from a stage, by the slowest of each."""
    longest: dict[tuple[int, str], float] = {}
    for event in timeline.transfers:
        sender, kind, _ = event.operation
        if stage in (sender, sender + (1 if kind == "F" else -1)):
            seconds = event.end_s - event.start_s
            longest[sender, kind] = max(seconds, longest.get((sender, kind), 0.0))
    return sum(longest.values())


# --- slack ----------------------------------------------------------------------------------------


def _all_slacks(timeline: Timeline) -> dict[tuple[int, Part, float], float]:
    """Return slacks by stage, part and tolerated share; none for a part that takes no time."""
    if len(timeline.operations) + len(timeline.transfers) > MOST_EVENTS:
        return {}
    kept: tuple[tuple[Part, float], ...]
    kept = (("compute", 0.0), ("compute", TOLERATED), ("transfers", 0.0))
    longest = _longest_s(timeline)
    wanted = [
        (stage, part, tolerated)
        for stage in range(len(timeline.pipeline.stages))
        for part, tolerated in kept
        if longest.get((stage, part), 0.0) > 0
    ]
    starts = [
        (1 + tolerated) * timeline.iteration_time_s / longest[stage, part]
        for stage, part, tolerated in wanted
    ]
    return dict(zip(wanted, _slacks(timeline, wanted, np.array(starts)), strict=True))


def _longest_s(timeline: Timeline) -> dict[tuple[int, Part], float]:
    """Return the longest event of each stage and part: a lower bound of any path it is on."""
    longest: dict[tuple[int, Part], float] = {}

    def note(stage: int, part: Part, seconds: float) -> None:
        longest[stage, part] = max(seconds, longest.get((stage, part), 0.0))

    for event in timeline.operations:
        note(event.operation.stage, "compute", event.end_s - event.start_s)
    for transfer in timeline.transfers:
        sender, kind, _ = transfer.operation
        for stage in (sender, sender + (1 if kind == "F" else -1)):
            note(stage, "transfers", transfer.end_s - transfer.start_s)
    return longest


def _slacks(
    timeline: Timeline, wanted: Sequence[tuple[int, Part, float]], factors: FloatArray
) -> list[float]:
    """Find all slacks by Newton's method, from factors that are too large or just right."""
    whole_s = timeline.iteration_time_s
    limits_s = np.array([(1 + tolerated) * whole_s for _, _, tolerated in wanted])
    for _ in range(MOST_STEPS):
        if not wanted:
            break
        trials = [
            Trial(stage, part, float(factor) * scale)
            for scale in (1.0, 1 - STEP)
            for (stage, part, _), factor in zip(wanted, factors, strict=True)
        ]
        times_s, before_s = trial_times_s(timeline, trials).reshape(2, len(wanted))
        over_s = times_s - limits_s
        open_ = over_s > ROUNDING * whole_s
        if not open_.any():
            break
        slopes = (times_s - before_s) / (STEP * factors)
        lower = factors - over_s / np.where(open_, slopes, 1.0)
        factors = np.where(open_, np.maximum(lower, 1.0), factors)
    return [float(factor) - 1 for factor in factors]
