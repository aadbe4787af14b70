"""Forwards and gradients in turn after a warm-up, weight gradients in the gaps.

The rules by which the zero-bubble paper finds its schedules (Qi et al. 2023, "Zero bubble pipeline
parallelism", section 3.1), as far as it tells them: a number of forwards first, as many as leave no
bubble before the first gradient; then one forward and one gradient in turn; a weight gradient where
a device would wait longer than most of it takes, or where memory is full; the rest at the end. How
long a device would wait is known from the pass before, so a schedule takes a few passes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.costs.ways import Ways
from planner.errors import DeadlockError
from planner.schedule.classics.placements import require_no_replicas, require_one_stage_a_device
from planner.simulator import Timeline, owners, run

PASSES = 6
PASSES_OF_MANY = 2
MANY_OPERATIONS = 5000
"""Beyond this many (stage, microbatch) pairs fewer passes are made: a second each."""
SHARES = (0.5, 1.0)
"""Of a weight gradient: it goes first where the device would wait longer than that."""


def schedules_in_turn(pipeline: PlacedPipeline) -> Iterator[Timeline]:
    """Schedules by these rules, over a few warm-ups and shares.

    Raises:
        DoesNotApplyError: if a device holds several stages or a stage has replicas.
    """
    require_one_stage_a_device(pipeline)
    require_no_replicas(pipeline)
    for ahead in _warm_ups(pipeline):
        for share in SHARES:
            yield from _passes(pipeline, ahead, share)


def _warm_ups(pipeline: PlacedPipeline) -> list[list[int]]:
    """Forwards of each stage before its first gradient: as many as keep it busy, or as of ZB-H2."""
    ways, last = Ways(pipeline, split=True), len(pipeline.stages) - 1
    found: list[list[int]] = []
    for extra in (0, 1):
        busy = [
            int((trip - gradient) / forward) + extra if forward else 1
            for trip, gradient, forward in zip(
                ways.round_trip, ways.gradient, ways.forward, strict=True
            )
        ]
        twice = [2 * (last - stage) + 1 + extra for stage in range(last + 1)]
        for warm_up in (busy, twice):
            limited = [
                max(1, min(count, pipeline.stash_limit(stage, *row.spec.devices)))
                for stage, (count, row) in enumerate(zip(warm_up, pipeline.stages, strict=True))
            ]
            # A stage that waits for more forwards than the one before it runs would wait for ever.
            kept_up = [*accumulate(limited, min)]
            if kept_up not in found:
                found.append(kept_up)
    return found


def _passes(pipeline: PlacedPipeline, warm_up: Sequence[int], share: float) -> Iterator[Timeline]:
    expected: Mapping[Operation, float] = {}
    seen: set[float] = set()
    many = len(pipeline.stages) * pipeline.microbatches > MANY_OPERATIONS
    for _ in range(PASSES_OF_MANY if many else PASSES):
        policy = _InTurn(pipeline, warm_up, share, expected)
        try:
            timeline = run(pipeline, policy.owner, policy)
        except DeadlockError:
            return
        yield timeline
        if timeline.iteration_time_s in seen:
            return
        seen.add(timeline.iteration_time_s)
        expected = _ready_s(timeline)


def _ready_s(timeline: Timeline) -> dict[Operation, float]:
    """When each forward and each gradient could have started."""
    last = len(timeline.pipeline.stages) - 1
    ready: dict[Operation, float] = {}
    for transfer in timeline.transfers:
        stage, kind, microbatch = transfer.operation
        if kind == "F":
            ready[Operation(stage + 1, "F", microbatch)] = transfer.end_s
        else:
            ready[Operation(stage - 1, "I", microbatch)] = transfer.end_s
    for event in timeline.operations:
        if event.operation.kind == "F" and event.operation.stage == last:
            ready[event.operation._replace(kind="I")] = event.end_s
    return ready


class _InTurn:
    """The policy of one pass."""

    def __init__(
        self,
        pipeline: PlacedPipeline,
        warm_up: Sequence[int],
        share: float,
        expected: Mapping[Operation, float],
    ) -> None:
        self._pipeline = pipeline
        self._share = share
        self._expected = expected
        self._ready: set[Operation] = set()
        self._in_flight: defaultdict[str, int] = defaultdict(int)
        self._owed: defaultdict[str, deque[Operation]] = defaultdict(deque)
        self._turns = {
            stage.spec.devices[0]: deque(_turns(number, ahead, pipeline.microbatches))
            for number, (stage, ahead) in enumerate(zip(pipeline.stages, warm_up, strict=True))
        }
        self.owner = owners(self._turns)

    def offer(self, device: str, operation: Operation) -> None:
        """Weight gradients wait for a gap, the others for their turn."""
        if operation.kind == "W":
            self._owed[device].append(operation)
        elif operation.kind in "FI":
            self._ready.add(operation)

    def choose(self, device: str, now_s: float) -> Operation | None:
        """The next in turn, or a weight gradient."""
        turns = self._turns[device]
        if turns and turns[0] in self._ready and self._fits(device, turns[0]):
            operation = turns.popleft()
            self._in_flight[device] += 1 if operation.kind == "F" else -1
            return operation
        if not self._owed[device] or (turns and self._is_worth_waiting(device, turns[0], now_s)):
            return None
        return self._owed[device].popleft()

    def unfinished(self) -> str:
        """Devices with operations left."""
        left = [d for d, turns in self._turns.items() if turns or self._owed[d]]
        return ", ".join(f"{device} has operations left" for device in left)

    def _fits(self, device: str, operation: Operation) -> bool:
        if operation.kind != "F":
            return True
        stage = self._pipeline.stages[operation.stage]
        held = self._pipeline.static_bytes(device) + stage.output_bytes
        held += (self._in_flight[device] + 1) * stage.stash_bytes
        held += len(self._owed[device]) * stage.weight_stash_bytes
        return held <= self._pipeline.capacity_bytes(device)

    def _is_worth_waiting(self, device: str, operation: Operation, now_s: float) -> bool:
        """Whether the next in turn comes before a share of a weight gradient is over."""
        wait_s = self._expected.get(operation, now_s) - now_s
        return 0 < wait_s < self._share * self._pipeline.seconds(operation.stage, "W", device)


def _turns(stage: int, ahead: int, count: int) -> Iterator[Operation]:
    for microbatch in range(min(ahead, count)):
        yield Operation(stage, "F", microbatch)
    for microbatch in range(count):
        yield Operation(stage, "I", microbatch)
        if ahead + microbatch < count:
            yield Operation(stage, "F", ahead + microbatch)
