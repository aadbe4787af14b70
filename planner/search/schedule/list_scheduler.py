"""Greedy list scheduling: whenever a device is free, run the most urgent operation that can run.

Covers replicas, several stages a device and any times. Limits on the microbatches in flight keep
memory in bounds; trying several limits and priorities gives a good schedule in milliseconds.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.plan.operations import Operation
from planner.search.schedule.assignment import Assignment
from planner.simulation.simulator import run, simulate
from planner.simulation.timeline import Timeline

Priority = Callable[[Operation], tuple[int, ...]]
Limits = Mapping[tuple[int, str], int]
Target = tuple[float, int]
TICK_S = 1e-9
"""Priorities are whole numbers of it."""
TWICE: Target = (2.0, 0)
ALL: Target = (float("inf"), 0)
TARGETS: tuple[Target, ...] = ((1.0, 0), TWICE, (1.0, 1), (1.5, 0), (2.0, 2), ALL)
"""Limits as a multiple of 1F1B's and some more; the last are memory's own."""
NOTHING: Mapping[str, int] = MappingProxyType({})
MOST_CORRECTIONS = 6
"""Tries to keep free what devices lack."""
_Queue = list[tuple[tuple[int, ...], Operation]]


def backward_first(operation: Operation) -> tuple[int, ...]:
    """Rank backwards before forwards, deeper stages first: frees memory, as 1F1B does."""
    return (_BACKWARD_FIRST[operation.kind], operation.microbatch, -operation.stage)


def forward_first(operation: Operation) -> tuple[int, ...]:
    """Rank forwards before backwards, within the limits: fills the later stages early."""
    return (_FORWARD_FIRST[operation.kind], operation.microbatch, operation.stage)


# Nothing waits for a weight gradient but memory.
_BACKWARD_FIRST = {"B": 0, "I": 0, "F": 1, "W": 2}
_FORWARD_FIRST = {"F": 0, "B": 1, "I": 1, "W": 2}


STRETCHES = (2.5, 4.0)
"""Multiples of a microbatch's least way that it takes among others, more or less."""
DEFERRED = 1e3
"""Weight gradients count as due so many periods late: nothing waits for them but memory."""


def in_even_rhythm(pipeline: PlacedPipeline, stretch: float, *, split: bool) -> Priority:
    """Return a priority for devices with several stages: first what is due first.

    Microbatches enter at the pace of the most loaded device and go on evenly. So a device neither
    runs ahead in its early stages nor leaves the late ones without work, as in a periodic schedule.

    Args:
        pipeline: the stages.
        stretch: by how much a microbatch's way is longer than it would be alone.
        split: whether input and weight gradients run apart.
    """
    ways, period_s = PathBounds(pipeline, split), _period_s(pipeline)
    turn_s = ways.head[-1] + ways.forward[-1]
    due_s = {
        "F": ways.head,
        "B": [turn_s + ways.back[-1] - way_s for way_s in ways.back],
    }
    due_s["I"] = due_s["B"]
    due_s["W"] = [time_s + DEFERRED * period_s for time_s in due_s["B"]]

    def priority(operation: Operation) -> tuple[int, ...]:
        way_s = stretch * due_s[operation.kind][operation.stage]
        due = round((operation.microbatch * period_s + way_s) / TICK_S)
        return due, operation.microbatch, operation.stage

    return priority


def _period_s(pipeline: PlacedPipeline) -> float:
    """Return the seconds of a microbatch on the most loaded device."""
    return max(
        sum(
            (times.forward_s + times.backward_s) / len(pipeline.stages[stage].spec.devices)
            for stage in stages
            for times in (pipeline.stages[stage].times[device],)
        )
        for device, stages in pipeline.stages_on.items()
    )


@dataclass(frozen=True)
class _Limited:
    """A priority under limits on the microbatches in flight on each (stage, device).

    A device that holds several stages also keeps room for its deepest ones: an earlier stage's
    forward must leave memory for one microbatch of every later stage, or it could block them.
    """

    pipeline: PlacedPipeline
    priority: Priority
    limits: Limits
    splits: frozenset[int]
    most_owed: Mapping[tuple[int, str], float]
    left: Counter[str]
    reserves: Mapping[str, int]
    shares: Mapping[tuple[int, str], int] | None = None
    in_flight: Counter[tuple[int, str]] = field(default_factory=Counter)
    owed: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Microbatches whose weight gradient is still to come, by (stage, device)."""
    waiting: defaultdict[str, defaultdict[tuple[int, str], _Queue]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Operations that can run, by device, then by stage and kind, the most urgent first. The limits
    allow all forwards of a stage or none, so only the heads of these few heaps are looked at."""

    def offer(self, device: str, operation: Operation) -> None:
        """Queue an operation, if backwards of its stage run in its form: whole or split."""
        if operation.kind in ("FIW" if operation.stage in self.splits else "FB"):
            queue = self.waiting[device][operation.stage, operation.kind]
            heapq.heappush(queue, (self.priority(operation), operation))

    def choose(self, device: str, now_s: float) -> Operation | None:
        """Return the most urgent operation that keeps the limits."""
        most_urgent: _Queue | None = None
        for queue in self.waiting[device].values():
            if not queue or (most_urgent is not None and most_urgent[0] <= queue[0]):
                continue
            if self._allowed(queue[0][1], device):
                most_urgent = queue
        if most_urgent is None:
            return None
        _, best = heapq.heappop(most_urgent)
        key = (best.stage, device)
        match best.kind:
            case "F":
                self.in_flight[key] += 1
            case "B" | "I":
                self.in_flight[key] -= 1
                self.owed[key] += best.kind == "I"
            case "W":
                self.owed[key] -= 1
        self.left[device] -= 1
        return best

    def unfinished(self) -> str:
        """Describe the devices with operations left."""
        return ", ".join(
            f"{device} has {n} operations left" for device, n in self.left.items() if n
        )

    def _allowed(self, operation: Operation, device: str) -> bool:
        key = (operation.stage, device)
        match operation.kind:
            case "F":
                return self.in_flight[key] < self.limits[key] and self._fits(key)
            case "I":
                return self.shares is not None or self._has_room_for_weights(key)
        return True

    def _has_room_for_weights(self, key: tuple[int, str]) -> bool:
        """Return whether what a weight gradient needs fits, or none is left that would make room.

        An input gradient may leave more for it than the stash that it frees.
        """
        stage, device = key
        placed = self.pipeline.stages[stage]
        more = placed.weight_stash_bytes - placed.stash_bytes
        if self.owed[key] >= self.most_owed[key]:
            return False
        if more <= 0:
            return True
        stages = self.pipeline.stages_on[device]
        if not any(self.owed[other, device] for other in stages):
            return True
        held = sum(self._held_bytes(other, device) for other in stages)
        return held + more + placed.input_gradient_bytes <= self._room_bytes(device)

    def _room_bytes(self, device: str) -> int:
        pipeline = self.pipeline
        room = pipeline.capacity_bytes(device) - pipeline.static_bytes(device)
        return room - self.reserves.get(device, 0)

    def _fits(self, key: tuple[int, str]) -> bool:
        stage, device = key
        if self.shares is not None:
            return self._fits_share(stage, device, self.shares[stage, device])
        placed = self.pipeline.stages[stage]
        held = placed.output_bytes + placed.stash_bytes
        for other in self.pipeline.stages_on[device]:
            held += self._held_bytes(other, device)
            if other > stage and not self.in_flight[other, device]:
                held += self.pipeline.stages[other].stash_bytes
        if stage in self.splits:
            held += max(0, placed.weight_stash_bytes - placed.stash_bytes)
        return held <= self._room_bytes(device)

    def _held_bytes(self, stage: int, device: str) -> int:
        """Return what microbatches between their operations on a stage hold, and what waits."""
        placed, key = self.pipeline.stages[stage], (stage, device)
        waiting, back = self.waiting[device], "I" if stage in self.splits else "B"
        held = self.in_flight[key] * placed.stash_bytes
        held += self.owed[key] * placed.weight_stash_bytes
        held += len(waiting.get((stage, "F"), ())) * placed.input_bytes
        return held + len(waiting.get((stage, back), ())) * placed.output_gradient_bytes

    def _fits_share(self, stage: int, device: str, share_bytes: int) -> bool:
        placed = self.pipeline.stages[stage]
        held = (self.in_flight[stage, device] + 1) * placed.stash_bytes
        held += self.owed[stage, device] * placed.weight_stash_bytes
        return held <= share_bytes


def list_schedule(
    pipeline: PlacedPipeline,
    owner: Assignment,
    limits: Limits,
    priority: Priority,
    *,
    split: bool = False,
    shares: Mapping[tuple[int, str], int] | None = None,
    reserves: Mapping[str, int] = NOTHING,
) -> Timeline | None:
    """Schedule greedily; None if the limits, or the rules of the runtime, leave no way to finish.

    A device chooses without knowing what it receives next. Where the runtime waits for that, the
    orders are chosen as if it did not, and then run by its rules.

    Args:
        pipeline: the stages.
        owner: the replica of each (stage, microbatch).
        limits: on the microbatches between forward and backward, by (stage, device).
        priority: what is most urgent.
        split: run input and weight gradients apart; where the job allows both kinds of backward,
            not on stages whose devices have no room for what a weight gradient needs.
        shares: bytes that the stashes of each (stage, device) may take; where not given the stages
            of a device compete for its memory.
        reserves: bytes of each device that stay free for what arrives or is on its way.
    """
    left: Counter[str] = Counter()
    every = frozenset(range(len(pipeline.stages)))
    splits = (split_stages(pipeline) if shares is None else every) if split else frozenset()
    for (stage, _), device in owner.items():
        left[device] += 3 if stage in splits else 2
    most_owed = {
        (stage, device): max(1.0, _most_owed(pipeline, stage, device))
        for stage in splits
        for device in pipeline.stages[stage].spec.devices
    }
    policy = _Limited(pipeline, priority, limits, splits, most_owed, left, reserves, shares)
    try:
        timeline = run(pipeline, owner, policy)
        waits = pipeline.behaviour.receive == "blocking"
        return simulate(pipeline, timeline.orders) if waits else timeline
    except DeadlockError:
        return None


def split_stages(pipeline: PlacedPipeline) -> frozenset[int]:
    """Return the stages whose backwards a list schedule splits, if it splits any.

    Where the job allows both kinds, those that hold what a weight gradient needs besides 1F1B's
    microbatches in flight: fewer of these cost more than whole backwards.
    """
    stages = pipeline.stages
    if pipeline.problem.job.backward != "any":
        return frozenset(range(len(stages)))
    return frozenset(
        number
        for number, placed in enumerate(stages)
        if all(_most_owed(pipeline, number, device) >= 1 for device in placed.spec.devices)
    )


def _most_owed(pipeline: PlacedPipeline, stage: int, device: str) -> float:
    """Return for how many weight gradients there is room besides 1F1B's microbatches in flight.

    The last of them has just had its input gradient.
    """
    placed = pipeline.stages[stage]
    if not placed.weight_stash_bytes:
        return math.inf
    in_flight = _target(pipeline, stage, device, 1.0, 0, len(pipeline.stages))
    room = pipeline.capacity_bytes(device) - pipeline.static_bytes(device)
    room -= (in_flight - 1) * placed.stash_bytes + placed.input_gradient_bytes
    return room // placed.weight_stash_bytes


def roomier_schedule(
    timeline: Timeline,
    owner: Assignment,
    limits: Limits,
    priority: Priority,
    *,
    split: bool = False,
) -> Timeline | None:
    """Return a list schedule that fits like one that does not; None after a few tries.

    The scheduler does not know what is on its way to a device. What a device lacked in one try is
    kept free in the next one besides; at first that may only take up what was free.

    Args:
        timeline: of the same arguments, which overflows.
        owner: the replica of each (stage, microbatch).
        limits: on the microbatches between forward and backward.
        priority: what is most urgent.
        split: run input and weight gradients apart.
    """
    reserves: Counter[str] = Counter()
    pipeline = timeline.pipeline
    for _ in range(MOST_CORRECTIONS):
        reserves.update(timeline.overflow_bytes)
        found = list_schedule(pipeline, owner, limits, priority, split=split, reserves=reserves)
        if found is None or not found.overflow_bytes:
            return found
        timeline = found
    return None


def in_flight_limits(
    pipeline: PlacedPipeline, targets: Sequence[Target] = TARGETS
) -> Iterator[dict[tuple[int, str], int]]:
    """Yield limits worth trying, each within memory.

    Args:
        pipeline: the stages.
        targets: which of them.
    """
    memory = {
        (index, device): pipeline.stash_limit(index, device)
        for index, stage in enumerate(pipeline.stages)
        for device in stage.spec.devices
    }
    count = len(pipeline.stages)
    seen = []
    for factor, extra in targets:
        limits = {
            (index, device): min(most, _target(pipeline, index, device, factor, extra, count))
            for (index, device), most in memory.items()
        }
        if limits not in seen and all(limit > 0 for limit in limits.values()):
            seen.append(limits)
            yield limits


def lifetime_limits(
    pipeline: PlacedPipeline, *, split: bool, factors: Sequence[float] = (1.0, 1.25, 1.5, 2.0)
) -> Iterator[dict[tuple[int, str], int]]:
    """Yield limits for devices with several stages: each stage's share of the memory.

    A microbatch stays a round trip from the stage on at least; memory is divided in proportion.

    Args:
        pipeline: the stages.
        split: whether input and weight gradients run apart.
        factors: of the shares; above 1 the stages of a device compete for memory.
    """
    trips = PathBounds(pipeline, split).round_trip
    for factor in factors:
        limits: dict[tuple[int, str], int] = {}
        for device, stages in pipeline.stages_on.items():
            room = pipeline.capacity_bytes(device) - pipeline.static_bytes(device)
            need = sum(trips[stage] * pipeline.stages[stage].stash_bytes for stage in stages)
            for stage in stages:
                most = pipeline.stash_limit(stage, device)
                share = factor * room * trips[stage] / need if need else most
                limits[stage, device] = max(1, min(most, int(share)))
        yield limits


def _target(
    pipeline: PlacedPipeline, stage: int, device: str, factor: float, extra: int, count: int
) -> int:
    if factor == float("inf"):
        return pipeline.microbatches
    devices = sum(len(later.spec.devices) for later in pipeline.stages[stage:])
    replicas = len(pipeline.stages[stage].spec.devices)
    return max(1, round(factor * -(-devices // replicas)) + extra)
