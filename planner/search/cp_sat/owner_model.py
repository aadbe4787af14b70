"""The owner model: whether stages have a schedule faster than a time, with replicas to choose.

A literal for each replica of a stage and microbatch says which replica runs it, and each operation
is an optional interval on every replica. Operations of a device do not overlap; a forward follows
the stage before, an input gradient the stage behind, each by the time that its message takes alone
between the two replicas, a weight gradient its input gradient. Stashes of a device are a cumulative
resource. Behind the last backward of a device comes the least time of its reductions and its
optimizer step. Times are ticks, rounded down, and shared links and tensors on their way are left
out: if no solution is faster than a time, then no schedule is.

Microbatches are alike, so they are numbered by their forwards on the first stage that is not
replicated; before any replicated stage all forwards are in that order, and without any replicas all
operations are. Of two replicas that can be exchanged the first one runs no fewer microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ortools.sat.python import cp_model

from planner.bounds.alike import interchangeable_devices
from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Kind, Operation, Orders
from planner.search.cp_sat.plan_model import Effort

TICKS = 200_000
"""Ticks in the time that a schedule has to beat."""


class Answer(NamedTuple):
    """What CP-SAT says.

    Attributes:
        bound_s: no schedule of the stages takes less; the time to beat if none is faster.
        orders: by device, of the best solution; None if there is none.
        spent_s: deterministic seconds that it took.
        is_optimal: whether no solution of the model is better.
    """

    bound_s: float
    orders: Orders | None
    spent_s: float
    is_optimal: bool


class OwnerModel:
    """The model of some stages, one a device.

    Args:
        placed: the stages; all microbatches are alike.
        below_s: schedules have to be faster.
    """

    def __init__(self, placed: PlacedPipeline, below_s: float) -> None:
        self.placed, self.tick_s = placed, below_s / TICKS
        self.model = cp_model.CpModel()
        self._splits = placed.problem.job.backward != "whole"
        self._gradient: Kind = "I" if self._splits else "B"
        self._final: Kind = "W" if self._splits else "B"
        self._devices = [stage.spec.devices for stage in placed.stages]
        self._microbatches = range(placed.microbatches)
        kinds: tuple[Kind, ...] = ("F", "I", "W") if self._splits else ("F", "B")
        self._runs = {
            (s, m, device): self.model.new_bool_var("")
            for s, devices in enumerate(self._devices)
            for m in self._microbatches
            for device in devices
        }
        self._start = {
            Operation(s, kind, m): self.model.new_int_var(0, TICKS, "")
            for s in range(len(self._devices))
            for m in self._microbatches
            for kind in kinds
        }
        self.makespan = self.model.new_int_var(0, TICKS - 1, "makespan")
        self._add_replicas()
        self._add_precedences()
        self._add_devices()
        self._add_order()
        self.model.minimize(self.makespan)

    def _ticks(self, seconds: float) -> int:
        return min(TICKS, math.floor(seconds / self.tick_s))

    def _duration(self, row: Operation, device: str) -> int:
        """Return the ticks of an operation; a whole backward counts as an input gradient and W."""
        times = self.placed.stages[row.stage].times[device]
        seconds = times.seconds(row.kind)
        if self.placed.problem.job.backward == "any" and row.kind != "F":
            gradient_s = min(times.input_gradient_s, times.backward_s)
            left_s = min(times.weight_gradient_s, times.backward_s - gradient_s)
            seconds = gradient_s if row.kind == "I" else left_s
        return self._ticks(seconds)

    # --- constraints ------------------------------------------------------------------------------

    def _add_replicas(self) -> None:
        for s, devices in enumerate(self._devices):
            for m in self._microbatches:
                self.model.add_exactly_one(self._runs[s, m, device] for device in devices)
            for group in interchangeable_devices(self.placed.problem.cluster):
                for first, second in pairwise([d for d in devices if d in group]):
                    self.model.add(self._number(s, first) >= self._number(s, second))

    def _number(self, stage: int, device: str) -> cp_model.LinearExprT:
        return sum(self._runs[stage, m, device] for m in self._microbatches)

    def _add_precedences(self) -> None:
        for s, m in ((s, m) for s in range(len(self._devices)) for m in self._microbatches):
            forward = Operation(s, "F", m)
            back, final = (forward._replace(kind=kind) for kind in (self._gradient, self._final))
            if s + 1 < len(self._devices):
                following = forward._replace(stage=s + 1)
                self._follows(following, forward, forward=True)
                self._follows(back, following._replace(kind=self._gradient), forward=False)
            else:
                self._follows(back, forward)
            if self._splits:
                self._follows(final, back)

    def _follows(self, row: Operation, before: Operation, *, forward: bool | None = None) -> None:
        """Let an operation start after another one, and the message between two stages.

        Args:
            row: starts later.
            before: ends before.
            forward: whether activations are sent or else gradients; None: on one stage.
        """
        for source in self._devices[before.stage]:
            here = self._runs[before.stage, before.microbatch, source]
            end = self._start[before] + self._duration(before, source)
            if forward is None:
                self.model.add(self._start[row] >= end).only_enforce_if(here)
                continue
            transfer, kind = self.placed.transfer, "F" if forward else "B"
            for target in self._devices[row.stage]:
                there = self._runs[row.stage, row.microbatch, target]
                ticks = self._ticks(transfer(before.stage, kind, source, target).seconds)
                self.model.add(self._start[row] >= end + ticks).only_enforce_if(here, there)

    def _add_devices(self) -> None:
        for s, device in ((s, d) for s, devices in enumerate(self._devices) for d in devices):
            rows = [row for row in self._start if row.stage == s]
            tail = self._ticks(self.placed.tail_s(s, device))
            for row in rows:
                if row.kind == self._final:
                    end = self._start[row] + self._duration(row, device)
                    here = self._runs[s, row.microbatch, device]
                    self.model.add(self.makespan >= end + tail).only_enforce_if(here)
            self.model.add_no_overlap(
                self.model.new_optional_fixed_size_interval_var(
                    self._start[row],
                    self._duration(row, device),
                    self._runs[s, row.microbatch, device],
                    "",
                )
                for row in rows
            )
            self._add_work(s, device, tail)
            self._add_memory(s, device)

    def _add_work(self, stage: int, device: str, tail: int) -> None:
        """Count all work of a device: implied, but a relaxation does not see it.

        It begins after one microbatch's way to the stage and ends with one's way home at least.
        """
        each = {kind: self._duration(Operation(stage, kind, 0), device) for kind in self._kinds}
        number, head = self._number(stage, device), self._way(stage, device, ("F",))
        work, way = sum(each.values()), each["F"] + each[self._gradient]
        home = self._way(stage, device, (self._gradient,))
        used = self.model.new_bool_var("")
        for m in self._microbatches:
            self.model.add_implication(self._runs[stage, m, device], used)
        self.model.add(self.makespan >= head + number * work + tail).only_enforce_if(used)
        self.model.add(self.makespan >= head + number * way + home).only_enforce_if(used)

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        return ("F", "I", "W") if self._splits else ("F", "B")

    def _way(self, stage: int, device: str, kinds: tuple[Kind, ...]) -> int:
        """Return the least ticks of one microbatch between the first stage and a device."""
        ahead = 0
        transfer, is_forward = self.placed.transfer, "F" in kinds
        # By device of the stage that comes next on the way to this one.
        for s in range(stage):
            row = Operation(s, kinds[0], 0)
            ahead += min(self._duration(row, d) for d in self._devices[s])
            targets = (device,) if s + 1 == stage else self._devices[s + 1]
            ahead += min(
                self._ticks(
                    (transfer(s, "F", a, b) if is_forward else transfer(s + 1, "B", b, a)).seconds
                )
                for a in self._devices[s]
                for b in targets
            )
        return ahead

    def _add_memory(self, stage: int, device: str) -> None:
        """Let stashes fit beside what is held at all times."""
        placed = self.placed.stages[stage]
        room = self.placed.capacity_bytes(device) - self.placed.static_bytes(device)
        held, kept = placed.stash_bytes, min(placed.weight_stash_bytes, placed.stash_bytes)
        if held * len(self._microbatches) <= room:
            return
        intervals, bytes_ = [], []
        for m in self._microbatches:
            here = self._runs[stage, m, device]
            forward = Operation(stage, "F", m)
            back = forward._replace(kind=self._gradient)
            until = self._start[back] + self._duration(back, device)
            spans: list[tuple[cp_model.LinearExprT, cp_model.LinearExprT, int]]
            spans = [(self._start[forward], until, held)]
            if self._splits and kept:
                late = forward._replace(kind="W")
                spans.append((until, self._start[late] + self._duration(late, device), kept))
            for begin, end, count in spans:
                size = self.model.new_int_var(0, TICKS, "")
                intervals.append(self.model.new_optional_interval_var(begin, size, end, here, ""))
                bytes_.append(count)
        self.model.add_cumulative(intervals, bytes_, max(room, 0))

    def _add_order(self) -> None:
        """Number microbatches as the module says."""
        single = [s for s, devices in enumerate(self._devices) if len(devices) == 1]
        kinds: tuple[Kind, ...] = ("F",)
        if len(single) == len(self._devices):
            kinds = self._kinds
        else:
            # Those before any replicated stage, or else the first one that is not replicated.
            single = [s for n, s in enumerate(single) if n == s] or single[:1]
        for s in single:
            for kind in kinds:
                for m in self._microbatches[1:]:
                    row = Operation(s, kind, m)
                    self._follows(row, row._replace(microbatch=m - 1))

    # --- solutions --------------------------------------------------------------------------------

    def solve(self, effort: Effort) -> Answer:
        """Look for the fastest schedule below the time."""
        solver = effort.solver()
        status = solver.solve(self.model)
        spent_s = float(solver.response_proto.deterministic_time)
        if status == cp_model.INFEASIBLE:
            return Answer(TICKS * self.tick_s, None, spent_s, is_optimal=False)
        bound_s = max(0, math.ceil(solver.best_objective_bound - 1e-6)) * self.tick_s
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(bound_s, None, spent_s, is_optimal=False)
        is_optimal = status == cp_model.OPTIMAL
        return Answer(bound_s, self._orders(solver), spent_s, is_optimal)

    def _orders(self, solver: cp_model.CpSolver) -> Orders:
        found: dict[str, list[Operation]] = {}
        for row, device in sorted(
            self._owned(solver), key=lambda pair: (*self._span(solver, *pair), pair[0])
        ):
            order = found.setdefault(device, [])
            is_second = bool(order) and row.kind == "W" and order[-1] == row._replace(kind="I")
            if is_second and self._may_join(row, device):
                order[-1] = row._replace(kind="B")
            else:
                order.append(row)
        return found

    def _span(self, solver: cp_model.CpSolver, row: Operation, device: str) -> tuple[int, int]:
        at = solver.value(self._start[row])
        return at, at + self._duration(row, device)

    def _owned(self, solver: cp_model.CpSolver) -> Iterator[tuple[Operation, str]]:
        for (stage, microbatch, device), runs in self._runs.items():
            if solver.value(runs):
                for kind in self._kinds:
                    yield Operation(stage, kind, microbatch), device

    def _may_join(self, row: Operation, device: str) -> bool:
        """Return whether the parts of a backward become a whole one, which is no slower."""
        times = self.placed.stages[row.stage].times[device]
        is_free = self.placed.problem.job.backward == "any"
        return is_free and (times.is_quicker_whole or row.stage == 0)
