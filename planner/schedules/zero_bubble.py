"""ZB-1p and ZB-2p: a forward and a gradient in each turn, weight gradients in the gaps.

The rules by which the zero-bubble paper finds its schedules (Qi et al. 2023, "Zero bubble pipeline
parallelism", section 3.1): a number of forwards first, as many as leave no bubble before the first
gradient; then one forward and one gradient in each turn; a weight gradient where a stage would wait
as long as it takes, where waiting would give this stage the largest bubble of all, or where memory
is full; the rest at the end. Memory for one or two microbatches a stage makes them ZB-1p and ZB-2p.

The rules leave three choices open, and all of them are tried. The paper takes the same times for
all stages (``zb_auto``); ``zero_bubble_orders`` takes each stage's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation, Orders
from planner.schedules.assignment import Assignment
from planner.schedules.placements import (
    DoesNotApplyError,
    require_no_replicas,
    require_one_stage_a_device,
)

ROUNDING = 1e-9
"""Share of a microbatch's round trip below which a difference of times is rounding."""


def zb_auto(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return the order with the smallest longest span, all stages as slow as the middle one.

    Raises:
        DoesNotApplyError: if a device holds several stages, a stage has replicas, or the rules run
            into full memory.
    """
    del owner  # Without replicas there is no choice.
    found = list(_constructed(pipeline, equal=True))
    if not found:
        raise DoesNotApplyError("memory is too small for the rules")
    return min(found, key=lambda turns: turns.longest_span_s).orders


def zero_bubble_orders(pipeline: PlacedPipeline) -> Iterator[Orders]:
    """Yield orders by these rules and every stage's own times, some of them twice.

    Raises:
        DoesNotApplyError: if a device holds several stages or a stage has replicas.
    """
    for turns in _constructed(pipeline, equal=False):
        yield turns.orders


class _Rules(NamedTuple):
    """The choices that the rules leave open.

    Attributes:
        delays_first_gradient: one more forward in the warm-up where it fits into memory, though it
            ends after the first gradient could have started.
        holds_back: leave out a forward where the next stage needs it later and the gradient would
            have to wait for it.
        fills_short_gaps: run a weight gradient also where the stage could as well wait.
    """

    delays_first_gradient: bool
    holds_back: bool
    fills_short_gaps: bool


class _Times(NamedTuple):
    """Seconds by stage; messages go to the next stage and come back from it."""

    forward: Sequence[float]
    gradient: Sequence[float]
    weight: Sequence[float]
    send: Sequence[float]
    send_back: Sequence[float]

    @classmethod
    def of(cls, pipeline: PlacedPipeline, *, equal: bool) -> _Times:
        """Return each stage's times, or for all the median operations and the mean messages."""
        ways, count = PathBounds(pipeline, split=True), len(pipeline.stages)
        rows = [[stage.least_s(kind) for stage in pipeline.stages] for kind in "FIW"]
        if not equal:
            return cls._make([*rows, ways.send, ways.send_back])
        mean_s = (sum(ways.send) + sum(ways.send_back)) / max(1, 2 * (count - 1))
        medians = [statistics.median(row) for row in rows]
        return cls._make([second] * count for second in (*medians, mean_s, mean_s))


def _constructed(pipeline: PlacedPipeline, *, equal: bool) -> Iterator[_Turns]:
    require_one_stage_a_device(pipeline)
    require_no_replicas(pipeline)
    times = _Times.of(pipeline, equal=equal)
    for choice in product((True, False), repeat=3):
        turns = _Turns(pipeline, times, _Rules(*choice))
        if turns.is_complete:
            yield turns


class _Row:
    """The state of one stage: the operations it has run, until when, and what it holds."""

    def __init__(self, pipeline: PlacedPipeline, times: _Times, number: int) -> None:
        stage = pipeline.stages[number]
        (self.device,) = stage.spec.devices
        self.number = number
        self.seconds = dict(zip("FIW", (row[number] for row in times[:3]), strict=True))
        self.late_bytes, self.stash_bytes = stage.weight_stash_bytes, stage.stash_bytes
        self.free_bytes = pipeline.capacity_bytes(self.device) - pipeline.static_bytes(self.device)
        self.free_bytes -= stage.output_bytes
        self.order: list[Operation] = []
        self.count = {"F": 0, "I": 0, "W": 0}
        self.ends_s: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        self.start_s: float | None = None
        self.end_s = self.bubble_s = 0.0

    @property
    def owed(self) -> int:
        """Weight gradients that could run."""
        return self.count["I"] - self.count["W"]

    def run(self, kind: str, ready_s: float = 0.0) -> None:
        """Run the next operation of a kind, no earlier than its input is ready."""
        start_s = max(self.end_s, ready_s)
        if self.start_s is None:
            self.start_s = start_s
        else:
            self.bubble_s += start_s - self.end_s
        self.end_s = start_s + self.seconds[kind]
        self.ends_s[kind].append(self.end_s)
        self.order.append(Operation(self.number, kind, self.count[kind]))  # type: ignore[arg-type]
        self.count[kind] += 1
        freed = {"F": -self.stash_bytes, "I": self.stash_bytes - self.late_bytes}
        self.free_bytes += freed.get(kind, self.late_bytes)

    def run_weights(self, count: int) -> None:
        """Run some weight gradients."""
        for _ in range(count):
            self.run("W")

    def weights_before(self, kind: str) -> int | None:
        """Return the weight gradients that memory asks for before another operation.

        None if even all that could run are too few.
        """
        more_bytes = self.stash_bytes if kind == "F" else self.late_bytes - self.stash_bytes
        over = more_bytes - self.free_bytes
        if over <= 0:
            return 0
        if over > self.owed * self.late_bytes:
            return None
        return -(-over // self.late_bytes)


class _Turns:
    """One construction; its orders are of use if it is complete."""

    def __init__(self, pipeline: PlacedPipeline, times: _Times, rules: _Rules) -> None:
        self._rules, self._times = rules, times
        self._microbatches = pipeline.microbatches
        self._rows = [_Row(pipeline, times, number) for number in range(len(pipeline.stages))]
        trip_s = sum(map(sum, (times.forward, times.gradient, times.send, times.send_back)))
        self._rounding_s = ROUNDING * trip_s
        self.is_complete = self._construct()

    @property
    def orders(self) -> Orders:
        """The order of every device."""
        return {row.device: row.order for row in self._rows}

    @property
    def longest_span_s(self) -> float:
        """The longest span of a stage, from its first operation to its last."""
        return max(row.end_s - (row.start_s or 0.0) for row in self._rows)

    def _construct(self) -> bool:
        """Run all operations; False where the rules run into full memory."""
        if not self._warm_up():
            return False
        for _ in range(1, self._microbatches):
            if not self._forwards() or not self._gradients():
                return False
        for row in self._rows:
            row.run_weights(row.owed)
        return True

    # --- warm-up -----------------------------------------------------------------------------

    def _warm_up(self) -> bool:
        for row in self._rows:
            if row.weights_before("F") is None:
                return False
            row.run("F", self._forward_ready_s(row))
        before = self._microbatches
        for row, count in zip(self._rows, self._ahead(), strict=True):
            # A stage is ahead of the next by a forward, unless all forwards come first.
            is_first = row.number == 0 or count == before == self._microbatches
            before = max(1, min(count, before - (0 if is_first else 1)))
            while row.count["F"] < before:
                row.run("F", self._forward_ready_s(row))
        return self._gradients()

    def _ahead(self) -> list[int]:
        """Return forwards that each stage may run before its first gradient comes."""
        counts: list[int] = []
        ready_s = self._rows[-1].end_s
        for row in reversed(self._rows):
            # The last stage's own gradient is ready after its first forward.
            count, end_s = self._forwards_until(row, ready_s) if counts else (1, row.end_s)
            gradient_end_s = max(end_s, ready_s) + row.seconds["I"]
            ready_s = gradient_end_s + self._times.send_back[row.number - 1]
            counts.append(count)
        return counts[::-1]

    def _forwards_until(self, row: _Row, ready_s: float) -> tuple[int, float]:
        """Return how many forwards run until its first gradient may start, and their end."""
        count, end_s = 1, row.end_s
        free_bytes, forward_s = row.free_bytes, row.seconds["F"]
        while count < self._microbatches and free_bytes >= row.stash_bytes:
            if self._rules.delays_first_gradient:
                fits = self._is_before(end_s, ready_s)
            else:
                fits = not self._is_before(ready_s, end_s + forward_s)
            if not fits:
                break
            count, end_s, free_bytes = count + 1, end_s + forward_s, free_bytes - row.stash_bytes
        return count, end_s

    # --- turns -------------------------------------------------------------------------------

    def _forwards(self) -> bool:
        """Run the forwards of a turn; return whether memory holds those that must run."""
        for row in self._chosen():
            weights = row.weights_before("F")
            has_input = row.number == 0 or self._rows[row.number - 1].count["F"] > row.count["F"]
            if weights is None or not has_input:
                if row.count["F"] == row.count["I"]:
                    return False
                continue  # Its next gradient frees memory first.
            row.run_weights(weights)
            ready_s = self._forward_ready_s(row)
            self._fill(row, ready_s)
            row.run("F", ready_s)
        return True

    def _chosen(self) -> list[_Row]:
        """Return stages that run a forward in this turn."""
        chosen: list[_Row] = []
        held_back = False
        for row in reversed(self._rows):
            if row.count["F"] == self._microbatches:
                # The stages before have run all of theirs too.
                break
            held_back = held_back or self._is_better_left(row)
            if row.count["F"] == row.count["I"] or not held_back:
                chosen.append(row)
        return chosen[::-1]

    def _is_better_left(self, row: _Row) -> bool:
        """Return whether a forward would delay a gradient while the next stage is busy."""
        if not self._rules.holds_back or row.number + 1 == len(self._rows):
            return False
        after = self._rows[row.number + 1]
        if row.count["F"] < after.count["F"] + 2:
            return False
        gradient_s = after.end_s + after.seconds["F"] + after.seconds["I"]
        gradient_s += self._times.send_back[row.number]
        if not self._is_before(row.end_s, gradient_s):
            return True
        weights = row.weights_before("F") or 0
        forward_end_s = row.end_s + weights * row.seconds["W"] + row.seconds["F"]
        return self._is_before(gradient_s, forward_end_s) and self._may_wait(row, gradient_s)

    def _gradients(self) -> bool:
        """Run the gradients of a turn; return whether memory holds their weight gradients."""
        for row in reversed(self._rows):
            weights = row.weights_before("I")
            if weights is None:
                return False
            row.run_weights(weights)
            ready_s = self._gradient_ready_s(row)
            self._fill(row, ready_s)
            if row.number == 0 and row.count["F"] == self._microbatches:
                row.run_weights(row.owed)
            row.run("I", ready_s)
        return True

    def _fill(self, row: _Row, ready_s: float) -> None:
        """Run weight gradients until something else can start."""
        while row.owed and not self._is_before(ready_s, row.end_s + row.seconds["W"]):
            row.run("W")
        if not row.owed or not self._is_before(row.end_s, ready_s):
            return
        if self._rules.fills_short_gaps or not self._may_wait(row, ready_s):
            row.run("W")

    def _may_wait(self, row: _Row, until_s: float) -> bool:
        """Return whether a stage may wait without getting the largest bubble of all."""
        largest_s = max(other.bubble_s for other in self._rows)
        return not self._is_before(largest_s, row.bubble_s + until_s - row.end_s)

    def _is_before(self, first_s: float, second_s: float) -> bool:
        """Return whether one time is earlier than another by more than rounding."""
        return first_s < second_s - self._rounding_s

    def _forward_ready_s(self, row: _Row) -> float:
        if row.number == 0:
            return 0.0
        before = self._rows[row.number - 1]
        return before.ends_s["F"][row.count["F"]] + self._times.send[row.number - 1]

    def _gradient_ready_s(self, row: _Row) -> float:
        if row.number + 1 == len(self._rows):
            return row.ends_s["F"][row.count["I"]]
        after = self._rows[row.number + 1]
        return after.ends_s["I"][row.count["I"]] + self._times.send_back[row.number]
