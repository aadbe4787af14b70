"""Operations in the schedule's CP-SAT model: when each runs, and on which replica."""

from __future__ import annotations

from collections.abc import Iterator

from ortools.sat.python import cp_model

from planner.artifacts.operations import Kind, Operation
from planner.schedule.assignment import Assignment
from planner.schedule.ticks import TickPipeline


class Operations:
    """Start and end of every operation.

    Args:
        model: they are added to it.
        pipeline: stages in ticks.
        owner: the device of each (stage, microbatch); where ``free`` is set the model chooses.
        horizon: no operation ends later, in ticks.
        free: let the model choose the replica of each microbatch.
        split: run input and weight gradients apart; a backward that takes less time whole than in
            halves may be either.

    Attributes:
        start: start of each operation.
        end: end of each (an expression where the duration is fixed).
        runs_on: literal of (stage, microbatch, device); a constant without a choice.
        is_whole: literal of (stage, microbatch) where a backward may be whole or split. A whole one
            runs as its input gradient, and its weight gradient takes no time.
    """

    def __init__(
        self,
        model: cp_model.CpModel,
        pipeline: TickPipeline,
        owner: Assignment,
        horizon: int,
        *,
        free: bool,
        split: bool,
    ) -> None:
        self.model = model
        self.pipeline = pipeline
        self.owner = owner
        self.horizon = horizon
        self.free = free
        self.gradient: Kind = "I" if split else "B"
        self.last: Kind = "W" if split else "B"
        self.start: dict[Operation, cp_model.IntVar] = {}
        self.end: dict[Operation, cp_model.LinearExprT] = {}
        self.runs_on: dict[tuple[int, int, str], cp_model.LiteralT] = {}
        self.is_whole: dict[tuple[int, int], cp_model.IntVar] = {}
        self._intervals: dict[str, list[cp_model.IntervalVar]] = {d: [] for d in pipeline.devices}
        self._choose_replicas()
        self._choose_halves()
        for operation in self:
            self._run(operation)
        for intervals in self._intervals.values():
            model.add_no_overlap(intervals)

    def __iter__(self) -> Iterator[Operation]:
        """All operations of one iteration."""
        kinds: tuple[Kind, ...] = ("F", "B") if self.gradient == "B" else ("F", "I", "W")
        for stage, microbatch in sorted(self.owner):
            for kind in kinds:
                yield Operation(stage, kind, microbatch)

    def candidates(self, stage: int, microbatch: int) -> tuple[str, ...]:
        """The devices that may run a microbatch of a stage."""
        devices = self.pipeline.stages[stage].spec.devices
        return devices if self.free else (self.owner[stage, microbatch],)

    def _choose_replicas(self) -> None:
        for stage, microbatch in sorted(self.owner):
            devices = self.candidates(stage, microbatch)
            if len(devices) == 1:
                self.runs_on[stage, microbatch, devices[0]] = self.model.new_constant(1)
                continue
            literals = [self.model.new_bool_var(f"{stage}m{microbatch}@{d}") for d in devices]
            self.model.add_exactly_one(literals)
            for device, literal in zip(devices, literals, strict=True):
                self.runs_on[stage, microbatch, device] = literal

    def _choose_halves(self) -> None:
        for stage, microbatch in sorted(self.owner) if self.last == "W" else ():
            (device, *more) = self.candidates(stage, microbatch)
            times = self.pipeline.stages[stage].times[device]
            if not more and times.is_quicker_whole:
                literal = self.model.new_bool_var(f"{stage}B{microbatch}")
                self.is_whole[stage, microbatch] = literal

    def least_ticks(self, stage: int, kind: Kind, device: str) -> int:
        """Of an operation, whether backwards are whole or split."""
        each = {k: self.pipeline.seconds(stage, k, device) for k in "FBIW"}
        if self.last == "B" or kind == "F":
            return each[kind]
        gradient = min(each["I"], each["B"])
        return gradient if kind == "I" else min(each["W"], each["B"] - gradient)

    def _run(self, operation: Operation) -> None:
        stage, kind, microbatch = operation
        start = self.model.new_int_var(0, self.horizon, str(operation))
        devices = self.candidates(stage, microbatch)
        self.start[operation] = start
        if len(devices) == 1:
            self._run_on(operation, devices[0])
            return
        end = self.model.new_int_var(0, self.horizon, f"end {operation}")
        self.end[operation] = end
        for device in devices:
            duration = self.pipeline.seconds(stage, kind, device)
            literal = self.runs_on[stage, microbatch, device]
            self._intervals[device].append(
                self.model.new_optional_interval_var(
                    start, duration, end, literal, f"{operation}@{device}"
                )
            )

    def _run_on(self, operation: Operation, device: str) -> None:
        """On the only device that may run it."""
        stage, kind, microbatch = operation
        start, duration = self.start[operation], self.pipeline.seconds(stage, kind, device)
        literal, name = self.is_whole.get((stage, microbatch)), str(operation)
        model, intervals = self.model, self._intervals[device]
        if literal is None or kind == "F":
            self.end[operation] = start + duration
            intervals.append(model.new_fixed_size_interval_var(start, duration, name))
            return
        whole = self.pipeline.seconds(stage, "B", device) if kind == "I" else 0
        self.end[operation] = start + duration + (whole - duration) * literal
        intervals.append(
            model.new_optional_fixed_size_interval_var(start, duration, ~literal, name)
        )
        if kind == "I":
            intervals.append(
                model.new_optional_fixed_size_interval_var(start, whole, literal, f"{name} whole")
            )

    def orders(self, solver: cp_model.CpSolver) -> dict[str, list[Operation]]:
        """The order of every device in the solver's solution."""
        placed: dict[str, list[Operation]] = {d: [] for d in self.pipeline.devices}
        at = {op: (solver.value(self.start[op]), solver.value(self.end[op])) for op in self}
        for operation in sorted(self, key=lambda op: (*at[op], *_in_flow(op))):
            literal = self.is_whole.get((operation.stage, operation.microbatch))
            if literal is not None and solver.value(literal) and operation.kind != "F":
                if operation.kind == "W":
                    continue
                operation = operation._replace(kind="B")
            for device in self.candidates(operation.stage, operation.microbatch):
                if solver.value(self.runs_on[operation.stage, operation.microbatch, device]):
                    placed[device].append(operation)
        return placed


def _in_flow(operation: Operation) -> tuple[int, int, int]:
    """Puts operations of no length at one time in an order in which none waits for a later one."""
    stage, kind, microbatch = operation
    return "FBIW".index(kind), stage if kind == "F" else -stage, microbatch
