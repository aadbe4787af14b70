"""The schedule model: when given stages run their operations, with start times as variables.

Each operation is an interval of its seconds in ticks: of a unit in which all times are whole
numbers, where there is one, which makes proofs several times as fast; else a millionth of the
incumbent's makespan, and times are rounded down. The intervals of a device do not overlap; a
forward follows the stage before, an input gradient the stage behind, each by the time that its
message takes alone, and a weight gradient its input gradient. Every kind of a stage's operations on
a device runs its microbatches in the order of the incumbent. Stashes on a device are a cumulative
resource; where a device holds one stage whose stash is of one size, that is the precedence
F(m + c) after the end of m. The objective is the makespan with the least time of reductions and
optimizer steps behind it.

Messages that share links, tensors on their way and host copies are left out, so that the optimum is
a lower bound for every schedule of the stages, if none is replicated. A solution is only a
proposal: whoever asks replays it.

In a *window*, operations outside keep their order on their device, and those inside are free
between them: large neighbourhood search (Shaw 1998, "Using constraint programming and local
search methods to solve vehicle routing problems").
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ortools.sat.python import cp_model

from planner.plan.operations import Kind, Operation, Orders
from planner.search.cp_sat.plan_model import Effort
from planner.simulation.timeline import Timeline

TICKS = 1_000_000
"""Ticks in the incumbent's makespan where times have no common unit."""
UNITS_S, MOST_UNITS = (1e-6, 1e-7, 1e-8), 4_000_000
"""Common units that are tried, and the most of one in the makespan."""
ROUNDING = 1e-4
"""Part of a unit by which times that count as whole numbers of it may differ from that."""
ROUNDED_GAP = 2e-5
"""A gap that rounding alone may leave."""
WINDOW = 150
"""Operations that are free in a window at first."""
PULL = 4
"""How much more the makespan counts in a window than the mean end of devices."""
SLACK = 1e-9
"""Part of a bound for the rounding of sums."""
Judge = Callable[[Orders], Timeline | None]
"""Replays orders; None if they deadlock or do not fit memory."""
Starts = Mapping[Operation, int]


@dataclass(frozen=True)
class Proof:
    """What the whole model found.

    Attributes:
        better: a replay that is faster than the incumbent; None if none was found.
        bound_s: no schedule of the stages takes less; 0 where the model proves nothing.
    """

    better: Timeline | None
    bound_s: float


class ScheduleInstance:
    """The stages of an incumbent in ticks.

    Args:
        incumbent: a replay of the stages.
        splits: whether backwards may be split; whole ones then count as their two parts.
    """

    def __init__(self, incumbent: Timeline, *, splits: bool) -> None:
        self.incumbent, self.splits = incumbent, splits
        self.placed = incumbent.pipeline
        events = incumbent.operations
        self.owner = {(e.operation.stage, e.operation.microbatch): e.device for e in events}
        unit_s = self._unit_s()
        self.is_rounded = unit_s is None
        self.tick_s = unit_s or incumbent.iteration_time_s / TICKS
        self.starts: dict[Operation, int] = {}
        for event in events:
            at = self._ticks(event.start_s)
            stage, kind, microbatch = event.operation
            if kind != "B" or not splits:
                self.starts[event.operation] = at
                continue
            first = Operation(stage, "I", microbatch)
            self.starts[first] = at
            self.starts[first._replace(kind="W")] = at + self.duration(first)

    def _unit_s(self) -> float | None:
        """Return a unit in which all times are whole numbers; None if none that is tried is."""
        found = {event.end_s - event.start_s for event in self.incumbent.operations}
        found |= {event.end_s - event.start_s for event in self.incumbent.transfers}
        found |= {self.placed.tail_s(stage, name) for (stage, _), name in self.owner.items()}
        for times in (stage.times[name] for stage in self.placed.stages for name in stage.times):
            found |= {times.seconds(kind) for kind in "FBIW"}
        span_s = self.incumbent.iteration_time_s
        for unit_s in UNITS_S:
            parts = (seconds / unit_s for seconds in found)
            if span_s <= MOST_UNITS * unit_s and all(
                abs(part - round(part)) <= ROUNDING for part in parts
            ):
                return unit_s
        return None

    def _ticks(self, seconds: float) -> int:
        return math.floor(seconds / self.tick_s + (0 if self.is_rounded else 2 * ROUNDING))

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.placed.stages) - 1

    @property
    def gradient(self) -> Kind:
        """The operation that sends a gradient back."""
        return "I" if self.splits else "B"

    @property
    def final(self) -> Kind:
        """The operation that ends a microbatch on a stage."""
        return "W" if self.splits else "B"

    @cached_property
    def is_exact(self) -> bool:
        """Whether the model's optimum bounds every schedule of the stages.

        It keeps who runs what and the order of microbatches. Nothing is lost by that if no stage is
        replicated, all microbatches are alike and all kinds of operations run them in one order.
        """
        orders: dict[tuple[int, Kind], list[int]] = {}
        for rows in self.rows.values():
            for row in rows:
                orders.setdefault((row.stage, row.kind), []).append(row.microbatch)
        is_one = len(set(map(tuple, orders.values()))) == 1
        return is_one and not self.placed.has_replicas and self.placed.problem.job.lengths is None

    def duration(self, operation: Operation) -> int:
        """Return the ticks of an operation; of a weight gradient what a whole backward adds."""
        stage, kind, microbatch = operation
        times = self.placed.stages[stage].times[self.owner[stage, microbatch]]
        seconds = times.seconds(kind)
        if kind == "W":
            seconds = min(seconds, max(0.0, times.seconds("B") - times.seconds("I")))
        return self._ticks(seconds)

    def end(self, operation: Operation) -> int:
        """Return when an operation ends in the incumbent."""
        return self.starts[operation] + self.duration(operation)

    def message(self, stage: int, microbatch: int, *, forward: bool) -> int:
        """Return the ticks of a message from a stage, alone."""
        other = stage + 1 if forward else stage - 1
        ends = self.owner[stage, microbatch], self.owner[other, microbatch]
        return self._ticks(self.placed.transfer(stage, "F" if forward else "B", *ends).seconds)

    def tail(self, stage: int, device: str) -> int:
        """Return the least ticks of what follows a stage's last backward on a device."""
        return self._ticks(self.placed.tail_s(stage, device))

    @cached_property
    def rows(self) -> dict[str, list[Operation]]:
        """The operations of each device in the incumbent's order."""
        found: dict[str, list[Operation]] = {}
        for row in sorted(self.starts, key=lambda row: (self.starts[row], self.end(row), row)):
            found.setdefault(self.owner[row.stage, row.microbatch], []).append(row)
        return found


class ScheduleModel:
    """Start times of all operations, hinted by an incumbent; see the module.

    Args:
        instance: the stages, and their incumbent.
        is_free: whether an operation may leave its place among the fixed ones of its device; None:
            all may.
        room: by device, bytes kept free for what the model leaves out.
    """

    def __init__(
        self,
        instance: ScheduleInstance,
        is_free: Callable[[Operation], bool] | None = None,
        room: Mapping[str, int] | None = None,
    ) -> None:
        self._of, self._is_free = instance, is_free
        self._room = room or {}
        self.model = cp_model.CpModel()
        tails = [instance.tail(row.stage, device) for device, row in self._ends()]
        self._horizon = max(map(instance.end, instance.starts)) + max(tails, default=0)
        self.start = {
            row: self.model.new_int_var(0, self._horizon - instance.duration(row), str(row))
            for row in instance.starts
        }
        self._precedences()
        for device, rows in instance.rows.items():
            self._add_device(device, rows)
        self._minimise(pulls=is_free is not None)
        for row, at in instance.starts.items():
            self.model.add_hint(self.start[row], at)

    def _end(self, row: Operation) -> cp_model.LinearExprT:
        return self.start[row] + self._of.duration(row)

    def _follows(self, row: Operation, before: Operation, ticks: int = 0) -> None:
        self.model.add(self.start[row] >= self._end(before) + ticks)

    def _ends(self) -> Iterator[tuple[str, Operation]]:
        """Yield the last operation of each stage on each device."""
        found: dict[tuple[int, str], Operation] = {}
        for device, rows in self._of.rows.items():
            found.update({(r.stage, device): r for r in rows if r.kind == self._of.final})
        yield from ((device, row) for (_, device), row in found.items())

    def _precedences(self) -> None:
        of, gradient = self._of, self._of.gradient
        for stage, microbatch in of.owner:
            forward = Operation(stage, "F", microbatch)
            back = forward._replace(kind=gradient)
            if stage < of.last:
                behind = forward._replace(stage=stage + 1), back._replace(stage=stage + 1)
                self._follows(behind[0], forward, of.message(stage, microbatch, forward=True))
                self._follows(back, behind[1], of.message(stage + 1, microbatch, forward=False))
            else:
                self._follows(back, forward)
            if of.splits:
                self._follows(back._replace(kind="W"), back)
        for rows in of.rows.values():
            latest: dict[tuple[int, Kind], Operation] = {}
            for row in rows:
                key = row.stage, row.kind
                if key in latest:
                    self._follows(row, latest[key])
                latest[key] = row

    def _add_device(self, device: str, rows: Sequence[Operation]) -> None:
        """Let the operations of a device run one at a time, and its stashes fit memory."""
        free = [n for n, row in enumerate(rows) if self._is_free is None or self._is_free(row)]
        if self._is_free is not None:
            fixed = [row for row in rows if not self._is_free(row)]
            for before, row in pairwise(fixed):
                self._follows(row, before)
        if not free:
            return
        middle = rows[free[0] : free[-1] + 1]
        for row in middle if free[0] else ():
            self._follows(row, rows[free[0] - 1])
        for row in middle if free[-1] + 1 < len(rows) else ():
            self._follows(rows[free[-1] + 1], row)
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(self.start[row], self._of.duration(row), "")
            for row in middle
        )
        self._add_memory(device, rows, set(middle))

    def _add_memory(self, device: str, rows: Sequence[Operation], middle: set[Operation]) -> None:
        placed, final = self._of.placed, self._of.final
        stages = sorted({row.stage for row in rows})
        room = placed.capacity_bytes(device) - placed.static_bytes(device)
        room -= self._room.get(device, 0)
        first = placed.stages[stages[0]]
        held = first.stash_bytes - first.offload_bytes
        is_simple = not self._of.splits or first.weight_stash_bytes >= held
        if len(stages) == 1 and is_simple:
            order = [row.microbatch for row in rows if row.kind == "F"]
            most = room // held if held else len(order)
            for early, late in zip(order, order[most:], strict=False):
                pair = Operation(stages[0], final, early), Operation(stages[0], "F", late)
                if middle.intersection(pair):
                    self._follows(pair[1], pair[0])
            return
        intervals, demands = [], []
        for stage in stages:
            for begin, end, bytes_ in self._lives(stage, device, rows):
                if bytes_:
                    size = self.model.new_int_var(0, self._horizon, "")
                    intervals.append(self.model.new_interval_var(begin, size, end, ""))
                    demands.append(bytes_)
        self.model.add_cumulative(intervals, demands, room)

    def _lives(
        self, stage: int, device: str, rows: Sequence[Operation]
    ) -> Iterator[tuple[cp_model.LinearExprT, cp_model.LinearExprT, int]]:
        """Yield from when to when each microbatch of a stage holds how many bytes."""
        placed = self._of.placed.stages[stage]
        held = placed.stash_bytes - placed.offload_bytes
        for forward in (row for row in rows if row.stage == stage and row.kind == "F"):
            back = forward._replace(kind=self._of.gradient)
            yield self.start[forward], self._end(back), held
            if self._of.splits:
                late = back._replace(kind="W")
                yield self._end(back), self._end(late), min(placed.weight_stash_bytes, held)

    def _minimise(self, *, pulls: bool) -> None:
        of = self._of
        least = max(map(self._least_of, of.rows))
        self.makespan = self.model.new_int_var(least, max(least, self._horizon), "makespan")
        ends = []
        for device, row in self._ends():
            end = self.model.new_int_var(0, self._horizon, "")
            self.model.add(end >= self._end(row) + of.tail(row.stage, device))
            self.model.add(self.makespan >= end)
            ends.append(end)
        # A pull on all ends crosses plateaus of the makespan.
        weight = PULL * len(ends) if pulls else 1
        self.model.minimize(weight * self.makespan + (sum(ends) if pulls else 0))

    def _least_of(self, device: str) -> int:
        """Return ticks in which a device can run its operations, and others those around them."""
        of, rows = self._of, self._of.rows[device]
        first = min(row.stage for row in rows)
        held = {row.microbatch for row in rows if row.stage == first}
        ahead = behind = 0
        for stage in range(first):
            ahead += min(
                of.duration(Operation(stage, "F", m)) + of.message(stage, m, forward=True)
                for m in held
            )
            behind += min(
                of.duration(Operation(stage, of.gradient, m))
                + of.message(stage + 1, m, forward=False)
                for m in held
            )
        sending = sum(of.duration(row) for row in rows if row.kind != "W")
        tail = min(of.tail(stage, device) for stage in {row.stage for row in rows})
        return ahead + max(sending + behind, sum(map(of.duration, rows)) + tail)

    def solve(self, effort: Effort) -> tuple[Orders | None, int]:
        """Return orders as good as the incumbent's or better, and a bound on the makespan.

        Args:
            effort: of CP-SAT.

        Returns:
            Orders by device, None if no solution was found; the bound in ticks, of no use where the
            ends of devices are pulled.
        """
        solver = effort.solver()
        solver.parameters.use_strong_propagation_in_disjunctive = True
        solver.parameters.use_precedences_in_disjunctive_constraint = True
        if self._of.is_rounded:
            solver.parameters.relative_gap_limit = ROUNDED_GAP
        status = solver.solve(self.model)
        effort.spend(float(solver.response_proto.deterministic_time))
        bound = max(0, math.ceil(solver.best_objective_bound - 1e-6))
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        at = {row: solver.value(variable) for row, variable in self.start.items()}
        return self._orders(at), bound

    def _orders(self, at: Starts) -> Orders:
        """Return the orders of starts.

        The parts of a backward that follow each other become a whole one where that takes less time
        or sends no gradient: elsewhere the gradient would be sent later.
        """
        of, may_join = self._of, self._of.placed.problem.job.backward == "any"
        found: dict[str, list[Operation]] = {}
        for row in sorted(at, key=lambda row: (at[row], at[row] + of.duration(row), row)):
            device = of.owner[row.stage, row.microbatch]
            order = found.setdefault(device, [])
            is_second = bool(order) and row.kind == "W" and order[-1] == row._replace(kind="I")
            times = of.placed.stages[row.stage].times[device]
            if may_join and is_second and (times.is_quicker_whole or row.stage == 0):
                order[-1] = row._replace(kind="B")
            else:
                order.append(row)
        return found


def prove(instance: ScheduleInstance, effort: Effort, judge: Judge) -> Proof:
    """Solve the whole model from the incumbent.

    Args:
        instance: the stages and the incumbent.
        effort: of CP-SAT.
        judge: replays what it finds.
    """
    orders, ticks = ScheduleModel(instance).solve(effort)
    bound_s = ticks * instance.tick_s * (1 - SLACK) if instance.is_exact else 0.0
    found = None if orders is None else judge(orders)
    is_better = found is not None and found.iteration_time_s < instance.incumbent.iteration_time_s
    return Proof(found if is_better else None, bound_s)


def improve(
    instance: ScheduleInstance, effort: Effort, judge: Judge, may_go_on: Callable[[], bool]
) -> Iterator[Timeline]:
    """Yield ever better replays, found in windows.

    Args:
        instance: the stages and the incumbent.
        effort: of one window.
        judge: replays what is found.
        may_go_on: asked before each window.
    """
    draw, size = random.Random(effort.seed), float(WINDOW)
    while may_go_on():
        is_free = _window(instance, size, draw)
        orders, _ = ScheduleModel(instance, is_free).solve(effort)
        found = None if orders is None else judge(orders)
        if found is None:
            continue
        incumbent_s = instance.incumbent.iteration_time_s
        if found.iteration_time_s < incumbent_s:
            yield found
        elif found.iteration_time_s == incumbent_s:
            size = min(1.02 * size, 4.0 * WINDOW)
        if found.iteration_time_s <= incumbent_s:
            instance = ScheduleInstance(found, splits=instance.splits)


def _window(
    instance: ScheduleInstance, size: float, draw: random.Random
) -> Callable[[Operation], bool]:
    """Draw what is free: a span of time, a longer one on some devices, or some microbatches."""
    starts, devices = instance.starts, list(instance.rows)
    span = max(map(instance.end, starts))
    width = span * size / len(starts)
    kind = draw.random()
    if kind < 0.6:
        begin = draw.uniform(-width / 2, span - width / 2)
        return lambda row: begin <= starts[row] <= begin + width
    if kind < 0.8:
        count = max(2, len(devices) // 4)
        at = draw.randrange(len(devices))
        some = {devices[(at + n) % len(devices)] for n in range(count)}
        width *= len(devices) / count
        begin = draw.uniform(-width / 2, span - width / 2)
        return lambda row: (
            instance.owner[row.stage, row.microbatch] in some
            and begin <= starts[row] <= begin + width
        )
    microbatches = instance.placed.microbatches
    each = (instance.last + 1) * (3 if instance.splits else 2)
    count = max(1, int(size) // each)
    first = draw.randrange(max(1, microbatches - count))
    return lambda row: first <= row.microbatch <= first + count
