"""The limits of each stage, and the effect of its speed.

All figures are of replays in which a stage's operations, or its transfers, take some factor as
long, while every device, link and group of devices keeps its order (see
:class:`planner.simulation.noise.OrderedTimes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.analysis.explain.memory import MemoryLimit
from planner.cluster.link_table import FloatArray
from planner.simulation.noise import OrderedTimes
from planner.simulation.timeline import Timeline

Limit = Literal["compute", "transfers", "memory", "nothing"]
Part = Literal["compute", "transfers"]
STEP = 1e-7
"""Relative, for slopes."""
NOISE = 1e-7
"""A smaller slope, as a share of the iteration, is what rounding makes of a difference."""
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
    """The limit of a stage, and the effect of its speed.

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
        slower_10_percent: change of the iteration time, as a share of it, if its operations took
            10 % longer.
        faster_10_percent: the same if they took 10 % less, a negative share.
    """

    stage: int
    devices: tuple[str, ...]
    limited_by: Limit
    compute_s: float
    transfers_s: float
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
    changes = rows / whole_s - 1 if whole_s > 0 else np.zeros_like(rows)
    return tuple(
        _stage_limit(timeline, memory, stage, rows[stage], changes[stage]) for stage in stages
    )


def _stage_limit(
    timeline: Timeline,
    memory: MemoryLimit,
    stage: int,
    times_s: FloatArray,
    changes: FloatArray,
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
