"""The operations of a schedule as CP-SAT intervals, and the order of equal microbatches.

Equal microbatches are interchangeable, so each kind of operation runs them in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from ortools.sat.python import cp_model

from planner.costs.placed_pipeline import Resource, Transfer
from planner.plan.operations import Kind, Operation
from planner.search.schedule.assignment import Assignment
from planner.search.schedule.ticks import TickPipeline
from planner.simulation.timeline import Timeline
from planner.space import Backward


class Operations:
    """Start and end of every operation.

    Args:
        model: they are added to it.
        pipeline: stages in ticks.
        owner: the device of each (stage, microbatch); where ``free`` is set the model chooses.
        horizon: no operation ends later, in ticks.
        free: let the model choose the replica of each microbatch.
        backward: kinds of backward. Of ``any``, one that takes less time whole than in its parts
            may be either, and others are split.

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
        backward: Backward,
    ) -> None:
        self.model = model
        self.pipeline = pipeline
        self.owner = owner
        self.horizon = horizon
        self.free = free
        self.gradient: Kind = "B" if backward == "whole" else "I"
        self.last: Kind = "B" if backward == "whole" else "W"
        self.start: dict[Operation, cp_model.IntVar] = {}
        self.end: dict[Operation, cp_model.LinearExprT] = {}
        self.runs_on: dict[tuple[int, int, str], cp_model.LiteralT] = {}
        self.is_whole: dict[tuple[int, int], cp_model.IntVar] = {}
        self._intervals: dict[str, list[cp_model.IntervalVar]] = {d: [] for d in pipeline.devices}
        self._choose_replicas()
        if backward == "any":
            self._choose_halves()
        for operation in self:
            self._run(operation)
        for intervals in self._intervals.values():
            model.add_no_overlap(intervals)

    def __iter__(self) -> Iterator[Operation]:
        """Yield all operations of one iteration."""
        kinds: tuple[Kind, ...] = ("F", "B") if self.gradient == "B" else ("F", "I", "W")
        for stage, microbatch in sorted(self.owner):
            for kind in kinds:
                yield Operation(stage, kind, microbatch)

    def candidates(self, stage: int, microbatch: int) -> tuple[str, ...]:
        """Return the devices that may run a microbatch of a stage."""
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
        for stage, microbatch in sorted(self.owner):
            (device, *more) = self.candidates(stage, microbatch)
            times = self.pipeline.stages[stage].times[device]
            if not more and times.is_quicker_whole:
                literal = self.model.new_bool_var(f"{stage}B{microbatch}")
                self.is_whole[stage, microbatch] = literal

    def least_ticks(self, stage: int, kind: Kind, device: str) -> int:
        """Return the least ticks of an operation, whether backwards are whole or split."""
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
        """Run an operation on the only device that may run it."""
        stage, kind, microbatch = operation
        start, duration = self.start[operation], self.pipeline.seconds(stage, kind, device)
        literal, name = self.is_whole.get((stage, microbatch)), str(operation)
        model, intervals = self.model, self._intervals[device]
        if literal is None or kind == "F":
            self.end[operation] = start + duration
            intervals.append(model.new_fixed_size_interval_var(start, duration, name))
            return
        whole = self.pipeline.seconds(stage, "B", device) if kind == "I" else 0
        # A variable of its own: the ends of intervals may depend on one variable only.
        end = model.new_int_var(0, self.horizon, f"end {operation}")
        model.add(end == start + duration + (whole - duration) * literal)
        self.end[operation] = end
        intervals.append(
            model.new_optional_fixed_size_interval_var(start, duration, ~literal, name)
        )
        if kind == "I":
            intervals.append(
                model.new_optional_fixed_size_interval_var(start, whole, literal, f"{name} whole")
            )

    def orders(self, solver: cp_model.CpSolver) -> dict[str, list[Operation]]:
        """Return the order of every device in the solver's solution."""
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
    """Order operations of no length at one time so that none waits for a later one."""
    stage, kind, microbatch = operation
    return "FBIW".index(kind), stage if kind == "F" else -stage, microbatch


Rows = dict[tuple[int, str, str], list[Operation]]


def rows_of(replay: Timeline) -> Rows:
    """Return the operations of each (stage, kind, device) in the order of a replay."""
    rows: Rows = {}
    for event in sorted(replay.operations, key=lambda event: event.start_s):
        key = (event.operation.stage, event.operation.kind, event.device)
        rows.setdefault(key, []).append(event.operation)
    return rows


def is_one_order(rows: Rows) -> bool:
    """Return whether all rows run the microbatches in one order, which may be renumbered."""
    return len({tuple(op.microbatch for op in row) for row in rows.values()}) == 1


def keep_order(operations: Operations, rows: Rows) -> None:
    """Run each kind of operation of a replica in the order of the rows.

    With free replicas only the order of the first stage's forwards may be fixed.
    """
    model, start = operations.model, operations.start
    if operations.free:
        for first, second in pairwise(range(operations.pipeline.microbatches)):
            model.add(start[Operation(0, "F", first)] <= start[Operation(0, "F", second)])
        return
    for row in rows.values():
        for before, after in pairwise(row):
            model.add(start[after] >= operations.end[before])


Message = tuple[Operation, str, str]
"""A tensor by its operation, source and target; gradients by their kind in the model, I or B."""


class Transfers:
    """Every activation and gradient on its way.

    Messages of one pair of devices follow each other. That those of several share links is left
    out, which keeps the bound valid; by the older rule all that meet on a link wait for each other.

    Where the runtime blocks, a device computes nothing from the begin of an operation until what it
    sends has arrived, or from the moment at which what it receives sets off until the end of the
    operation that needs it. Which messages a device exchanges at once is left out, blocking as a
    whole where replicas are free or forwards and backwards run in pairs: the model allows more than
    the runtime does, which keeps its bound valid; its schedules are replayed.

    Attributes:
        start: when each message that holds links sets off, or each where messages block.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.model = operations.model
        self.start: dict[Message, cp_model.IntVar] = {}
        behaviour = operations.pipeline.behaviour
        self._blocks = behaviour.send == "blocking", behaviour.receive == "blocking"
        self._sent: dict[Operation, cp_model.LinearExprT] = {}
        self._received: dict[Operation, cp_model.LinearExprT] = {}
        self._in_line: dict[Resource, list[cp_model.IntervalVar]] = {}
        for producer, consumer in self._pairs():
            self._connect(producer, consumer)
        for intervals in self._in_line.values():
            if len(intervals) > 1:
                self.model.add_no_overlap(intervals)
        if any(self._blocks) and behaviour.exchange != "pairs" and not operations.free:
            self._wait(*self._blocks, at_once=behaviour.exchange != "single")

    def _wait(self, sends_block: bool, receives_block: bool, *, at_once: bool) -> None:
        """Let devices compute nothing while they send or receive.

        Args:
            sends_block: whether they wait for what they send.
            receives_block: whether they wait for what they receive.
            at_once: whether they may do both at once, each apart from computation.
        """
        sent = self._sent if sends_block else {}
        received = self._received if receives_block else {}
        if sends_block and receives_block and at_once:
            self._occupy(sent, {})
            self._occupy({}, received)
        else:
            self._occupy(sent, received)

    def _occupy(
        self,
        sent: Mapping[Operation, cp_model.LinearExprT],
        received: Mapping[Operation, cp_model.LinearExprT],
    ) -> None:
        """Let a device run one operation at a time, with what it sends and receives for it."""
        operations = self.operations
        intervals: dict[str, list[cp_model.IntervalVar]] = {}
        for operation in operations:
            begin = received.get(operation, operations.start[operation])
            end = sent.get(operation, operations.end[operation])
            size = self.model.new_int_var(0, operations.horizon, "")
            interval = self.model.new_interval_var(begin, size, end, f"{operation} with messages")
            device = operations.owner[operation.stage, operation.microbatch]
            intervals.setdefault(device, []).append(interval)
        for row in intervals.values():
            self.model.add_no_overlap(row)

    def _pairs(self) -> Iterator[tuple[Operation, Operation]]:
        """Yield operations of neighbouring stages that wait for each other, or the last's own."""
        gradient, last = self.operations.gradient, len(self.operations.pipeline.stages) - 1
        for stage, microbatch in sorted(self.operations.owner):
            forward = Operation(stage, "F", microbatch)
            backward = Operation(stage, gradient, microbatch)
            if stage < last:
                yield forward, Operation(stage + 1, "F", microbatch)
            else:
                yield forward, backward
            if stage > 0:
                yield backward, Operation(stage - 1, gradient, microbatch)
            if gradient == "I":
                yield backward, Operation(stage, "W", microbatch)

    def _connect(self, producer: Operation, consumer: Operation) -> None:
        operations = self.operations
        if producer.stage == consumer.stage:
            self.model.add(operations.start[consumer] >= operations.end[producer])
            return
        for source in operations.candidates(producer.stage, producer.microbatch):
            for target in operations.candidates(consumer.stage, consumer.microbatch):
                self._connect_pair(producer, consumer, source, target)

    def _connect_pair(
        self, producer: Operation, consumer: Operation, source: str, target: str
    ) -> None:
        transfer = self._transfer(producer, source, target)
        ticks = int(transfer.seconds)
        literals = self._both(producer, source, consumer, target)
        start, end = self.operations.start, self.operations.end
        if ticks == 0 or not (transfer.occupied or any(self._blocks)):
            self.model.add(start[consumer] >= end[producer] + ticks).only_enforce_if(literals)
            return
        name = f"{producer} {source}>{target}"
        begin = self.model.new_int_var(0, self.operations.horizon, name)
        self.start[producer, source, target] = begin
        self.model.add(begin >= end[producer]).only_enforce_if(literals)
        self.model.add(start[consumer] >= begin + ticks).only_enforce_if(literals)
        self._sent[producer], self._received[consumer] = begin + ticks, begin
        interval = self._interval(begin, ticks, literals, name)
        for resource in transfer.occupied:
            self._in_line.setdefault(resource, []).append(interval)

    def _transfer(self, producer: Operation, source: str, target: str) -> Transfer:
        pipeline = self.operations.pipeline
        if producer.kind == "F":
            return pipeline.forward_transfer(producer.stage, source, target)
        return pipeline.backward_transfer(producer.stage, source, target)

    def _interval(
        self, begin: cp_model.IntVar, ticks: int, literals: list[cp_model.BoolVarT], name: str
    ) -> cp_model.IntervalVar:
        if not literals:
            return self.model.new_fixed_size_interval_var(begin, ticks, name)
        present = self.model.new_bool_var(f"used {name}")
        self.model.add_bool_or([present, *(~literal for literal in literals)])
        for literal in literals:
            self.model.add_implication(present, literal)
        return self.model.new_optional_fixed_size_interval_var(begin, ticks, present, name)

    def _both(
        self, producer: Operation, source: str, consumer: Operation, target: str
    ) -> list[cp_model.BoolVarT]:
        """Return literals that a pair of replicas is the chosen one; none without a choice."""
        if not self.operations.free:
            return []
        pair = (
            (producer.stage, producer.microbatch, source),
            (consumer.stage, consumer.microbatch, target),
        )
        return [
            self.operations.runs_on[key]  # type: ignore[misc]
            for key in pair
            if len(self.operations.candidates(key[0], key[1])) > 1
        ]
