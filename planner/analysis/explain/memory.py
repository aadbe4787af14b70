"""Whether memory binds: how much room is left, and what the schedule would gain without limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.analysis.judge import Judge
from planner.costs.placed_pipeline import StageSpec
from planner.plan.problem import Problem
from planner.simulation.timeline import Timeline
from planner.variants.problems import with_memory

LEAST_GAIN = 0.001
"""Memory binds if more of it saves more than this share of the iteration."""
UNLIMITED_GIB = 1e9
"""More memory than any plan needs."""


@dataclass(frozen=True)
class MemoryRoom:
    """A device's memory at its peak.

    Attributes:
        device: its name.
        peak_bytes: the most it holds at any moment.
        capacity_bytes: the most it may hold.
        stash_bytes: of one microbatch more, of the stage that keeps most.
    """

    device: str
    peak_bytes: int
    capacity_bytes: int
    stash_bytes: int

    @property
    def room_bytes(self) -> int:
        """Free at the peak; negative if the plan overflows memory."""
        return self.capacity_bytes - self.peak_bytes

    @property
    def more_microbatches(self) -> int | None:
        """Microbatches that could be in flight besides, at the peak; None if any number."""
        if self.room_bytes < 0:
            return 0
        return self.room_bytes // self.stash_bytes if self.stash_bytes else None


@dataclass(frozen=True)
class MemoryLimit:
    """Room on all devices, and an experiment where some have none left.

    Attributes:
        rooms: in stage order.
        recomputes: whether some layers run again to save memory.
        offloads: whether stashes of some go to the host to save memory.
        within_s: the shorter of the timeline's own time and that of the best list schedule within
            memory.
        unlimited_s: time of the best list schedule of the same stages with unlimited memory,
            nothing recomputed or offloaded; None where there is room everywhere and nothing to
            gain, and where the stages are no intervals of the model's layers or the job has no room
            for them, so that they were not scheduled.
    """

    rooms: tuple[MemoryRoom, ...]
    recomputes: bool
    offloads: bool
    within_s: float
    unlimited_s: float | None

    @property
    def full(self) -> tuple[str, ...]:
        """Devices that could not hold one more microbatch at their peak."""
        return tuple(room.device for room in self.rooms if room.more_microbatches == 0)

    @property
    def gain(self) -> float:
        """Share of the time within memory that unlimited memory saves, as far as is known."""
        if self.unlimited_s is None or self.within_s == 0:
            return 0.0
        return max(0.0, 1 - self.unlimited_s / self.within_s)

    @property
    def binds(self) -> bool:
        """Whether the experiment is faster by more than :data:`LEAST_GAIN`."""
        return self.gain > LEAST_GAIN


def memory_limit(timeline: Timeline) -> MemoryLimit:
    """Find out whether memory binds, by trial where a device is full or something is recomputed.

    The trial compares like with like: the best list schedule without limits with the best list
    schedule within them, or with the timeline itself where that is faster.
    """
    pipeline = timeline.pipeline
    limit = MemoryLimit(
        rooms=tuple(_room(timeline, device) for device in pipeline.devices),
        recomputes=any(stage.spec.recompute for stage in pipeline.stages),
        offloads=any(stage.spec.offload for stage in pipeline.stages),
        within_s=timeline.iteration_time_s,
        unlimited_s=None,
    )
    if not limit.full and not limit.recomputes and not limit.offloads:
        return limit
    problem = pipeline.problem
    stages = [stage.spec for stage in pipeline.stages]
    kinds = problem.cluster.device_types
    unlimited = with_memory(problem, dict.fromkeys(kinds, UNLIMITED_GIB))
    within_s, unlimited_s = _listed_s(problem, stages), _listed_s(unlimited, stages)
    return replace(
        limit, within_s=min(limit.within_s, within_s or limit.within_s), unlimited_s=unlimited_s
    )


def _room(timeline: Timeline, device: str) -> MemoryRoom:
    pipeline = timeline.pipeline
    return MemoryRoom(
        device=device,
        peak_bytes=timeline.peak_memory_bytes[device],
        capacity_bytes=pipeline.capacity_bytes(device),
        stash_bytes=max(pipeline.stages[stage].stash_bytes for stage in pipeline.stages_on[device]),
    )


def _listed_s(problem: Problem, stages: Sequence[StageSpec]) -> float | None:
    """Return seconds of the best list schedule; None if none fits memory."""
    found = Judge(problem).judged(stages)
    return None if found is None else found.seconds
