"""The microbatch schedule as a CP-SAT model: intervals, no-overlap, transfers and memory.

The model and its variables are public: add constraints to ``ScheduleModel.model`` before solving.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from ortools.sat.python import cp_model

from planner.artifacts.operations import Operation
from planner.schedule.assignment import Assignment
from planner.schedule.ticks import TickPipeline
from planner.simulator import Timeline

KIB = 1024


class ScheduleModel:
    """Start times of all operations and transfers, in ticks.

    Args:
        pipeline: stages in ticks.
        replay: a feasible schedule of the pipeline in ticks; hint and horizon.
        owner: the device of each (stage, microbatch). Where ``free`` is set it is only a hint
            and the model chooses.
        free: let CP-SAT choose the replica of each microbatch.

    Attributes:
        model: the CP-SAT model.
        start: start of each operation.
        end: end of each operation (an expression where the duration is fixed).
        runs_on: literal of each (operation's forward, device); constant 1 without a choice.
        makespan: the objective.
        is_exact: whether a bound of this model holds for every schedule of the stages. It does
            if no stage is replicated (equal microbatches may be renumbered, so running each kind
            in order loses nothing) or if replicas are chosen freely.
    """

    def __init__(
        self, pipeline: TickPipeline, replay: Timeline, owner: Assignment, *, free: bool
    ) -> None:
        self.pipeline = pipeline
        self.replay = replay
        self.owner = owner
        self.free = free
        self.model = cp_model.CpModel()
        self.start: dict[Operation, cp_model.IntVar] = {}
        self.end: dict[Operation, cp_model.LinearExprT] = {}
        self.runs_on: dict[tuple[int, int, str], cp_model.LiteralT] = {}
        self.transfer_start: dict[tuple[Operation, str, str], cp_model.IntVar] = {}
        self.stashes: dict[str, list[tuple[cp_model.IntervalVar, int]]] = {}
        self.horizon = round(max(event.end_s for event in replay.operations))
        self.horizon += max(self._tails().values())
        replicated = any(len(stage.spec.devices) > 1 for stage in pipeline.stages)
        self.is_exact = free or not replicated
        self._intervals: dict[str, list[cp_model.IntervalVar]] = {d: [] for d in pipeline.devices}
        self._on_link: dict[tuple[int, int], list[cp_model.IntervalVar]] = {}
        self._add_constraints()
        self._add_hint()

    def _add_constraints(self) -> None:
        self._choose_replicas()
        self._run_operations()
        self._one_operation_at_a_time()
        self._keep_order()
        self._transfer_between_stages()
        self._one_transfer_a_link()
        self._limit_memory()
        self._measure_makespan()

    def candidates(self, stage: int, microbatch: int) -> tuple[str, ...]:
        """The devices that may run a microbatch of a stage."""
        devices = self.pipeline.stages[stage].spec.devices
        return devices if self.free else (self.owner[stage, microbatch],)

    def operations(self) -> Iterator[Operation]:
        """All operations of one iteration."""
        for stage, microbatch in sorted(self.owner):
            yield Operation(stage, "F", microbatch)
            yield Operation(stage, "B", microbatch)

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

    def _run_operations(self) -> None:
        for operation in self.operations():
            stage, kind, microbatch = operation
            start = self.model.new_int_var(0, self.horizon, str(operation))
            devices = self.candidates(stage, microbatch)
            self.start[operation] = start
            if len(devices) == 1:
                duration = self.pipeline.seconds(stage, kind, devices[0])
                self.end[operation] = start + duration
                interval = self.model.new_fixed_size_interval_var(start, duration, str(operation))
                self._intervals[devices[0]].append(interval)
                continue
            end = self.model.new_int_var(0, self.horizon, f"end {operation}")
            self.end[operation] = end
            for device in devices:
                duration = self.pipeline.seconds(stage, kind, device)
                literal = self.runs_on[stage, microbatch, device]
                name = f"{operation}@{device}"
                self._intervals[device].append(
                    self.model.new_optional_interval_var(start, duration, end, literal, name)
                )

    def _one_operation_at_a_time(self) -> None:
        for intervals in self._intervals.values():
            self.model.add_no_overlap(intervals)

    def _keep_order(self) -> None:
        """Equal microbatches are interchangeable: run each kind in one order.

        With free replicas only the order of the first stage's forwards may be fixed.
        """
        if self.free:
            count = self.pipeline.microbatches
            for first, second in pairwise(range(count)):
                self.model.add(
                    self.start[Operation(0, "F", first)] <= self.start[Operation(0, "F", second)]
                )
            return
        for row in self._replay_rows().values():
            for before, after in pairwise(row):
                self.model.add(self.start[after] >= self.end[before])

    def _replay_rows(self) -> dict[tuple[int, str, str], list[Operation]]:
        """Operations of each (stage, kind, device) in the order in which the replay ran them."""
        rows: dict[tuple[int, str, str], list[Operation]] = {}
        for event in sorted(self.replay.operations, key=lambda event: event.start_s):
            key = (event.operation.stage, event.operation.kind, event.device)
            rows.setdefault(key, []).append(event.operation)
        return rows

    def _transfer_between_stages(self) -> None:
        last = len(self.pipeline.stages) - 1
        for stage, microbatch in sorted(self.owner):
            forward = Operation(stage, "F", microbatch)
            backward = Operation(stage, "B", microbatch)
            if stage == last:
                self.model.add(self.start[backward] >= self.end[forward])
            if stage < last:
                self._connect(forward, Operation(stage + 1, "F", microbatch))
            if stage > 0:
                self._connect(backward, Operation(stage - 1, "B", microbatch))

    def _connect(self, producer: Operation, consumer: Operation) -> None:
        for source in self.candidates(producer.stage, producer.microbatch):
            for target in self.candidates(consumer.stage, consumer.microbatch):
                self._connect_pair(producer, consumer, source, target)

    def _connect_pair(
        self, producer: Operation, consumer: Operation, source: str, target: str
    ) -> None:
        if producer.kind == "F":
            transfer = self.pipeline.forward_transfer(producer.stage, source, target)
        else:
            transfer = self.pipeline.backward_transfer(producer.stage, source, target)
        seconds = int(transfer.seconds)
        literals = self._both(producer, source, consumer, target)
        if not transfer.links or seconds == 0:
            arrival = self.end[producer] + seconds
            self.model.add(self.start[consumer] >= arrival).only_enforce_if(literals)
            return
        name = f"{producer} {source}>{target}"
        begin = self.model.new_int_var(0, self.horizon, name)
        self.transfer_start[producer, source, target] = begin
        self.model.add(begin >= self.end[producer]).only_enforce_if(literals)
        self.model.add(self.start[consumer] >= begin + seconds).only_enforce_if(literals)
        if literals:
            present = self.model.new_bool_var(f"used {name}")
            self.model.add_bool_or([present, *(~literal for literal in literals)])
            for literal in literals:
                self.model.add_implication(present, literal)
            interval = self.model.new_optional_fixed_size_interval_var(
                begin, seconds, present, name
            )
        else:
            interval = self.model.new_fixed_size_interval_var(begin, seconds, name)
        for link in transfer.links:
            self._on_link.setdefault(link, []).append(interval)

    def _both(
        self, producer: Operation, source: str, consumer: Operation, target: str
    ) -> list[cp_model.BoolVarT]:
        """Literals that a pair of replicas is the chosen one; empty without a choice."""
        if not self.free:
            return []
        pair = (
            (producer.stage, producer.microbatch, source),
            (consumer.stage, consumer.microbatch, target),
        )
        return [
            self.runs_on[key]  # type: ignore[misc]
            for key in pair
            if len(self.candidates(key[0], key[1])) > 1
        ]

    def _one_transfer_a_link(self) -> None:
        for intervals in self._on_link.values():
            if len(intervals) > 1:
                self.model.add_no_overlap(intervals)

    def _limit_memory(self) -> None:
        """In-flight microbatches hold their stash.

        Where a device has one stage and a known order, room for K microbatches is a precedence:
        forward i+K starts after backward i ends. Otherwise a cumulative resource.
        """
        for device, stages in self.pipeline.stages_on.items():
            if len(stages) == 1 and not self.free:
                self._limit_in_flight(stages[0], device)
            else:
                self._limit_stash(device, stages)

    def _limit_in_flight(self, stage: int, device: str) -> None:
        limit = self.pipeline.stash_limit(stage, device)
        rows = self._replay_rows()
        # A replica may run no microbatch at all.
        forwards, backwards = (rows.get((stage, kind, device), []) for kind in "FB")
        for backward, forward in zip(backwards, forwards[limit:], strict=False):
            self.model.add(self.start[forward] >= self.end[backward])

    def _limit_stash(self, device: str, stages: tuple[int, ...]) -> None:
        free = (self.pipeline.capacity_bytes(device) - self.pipeline.static_bytes(device)) // KIB
        intervals, demands = [], []
        for stage in stages:
            demand = self.pipeline.stages[stage].stash_bytes // KIB
            for microbatch in range(self.pipeline.microbatches):
                if device in self.candidates(stage, microbatch) and demand:
                    intervals.append(self._lifetime(stage, microbatch, device))
                    demands.append(demand)
        if sum(demands) > free:
            self.model.add_cumulative(intervals, demands, max(free, 0))

    def _lifetime(self, stage: int, microbatch: int, device: str) -> cp_model.IntervalVar:
        begin = self.start[Operation(stage, "F", microbatch)]
        end = self.end[Operation(stage, "B", microbatch)]
        size = self.model.new_int_var(0, self.horizon, "")
        literal = self.runs_on[stage, microbatch, device]
        return self.model.new_optional_interval_var(begin, size, end, literal, "")

    def _tails(self) -> dict[tuple[int, str], int]:
        return {
            (index, device): self.pipeline.tail_s(index, device)
            for index, stage in enumerate(self.pipeline.stages)
            for device in stage.spec.devices
        }

    def _measure_makespan(self) -> None:
        self.makespan = self.model.new_int_var(0, self.horizon, "makespan")
        tails = self._tails()
        for stage, microbatch in sorted(self.owner):
            end = self.end[Operation(stage, "B", microbatch)]
            tail = min(tails[stage, device] for device in self.candidates(stage, microbatch))
            self.model.add(self.makespan >= end + tail)
        for stage in range(len(self.pipeline.stages)):
            # A reduction waits for every replica: its length counts from the last of them.
            least = min(tails[stage, d] for d in self.pipeline.stages[stage].spec.devices)
            for device in self.pipeline.stages[stage].spec.devices:
                self._bound_by_load(stage, device, least)
        self.model.minimize(self.makespan)

    def _bound_by_load(self, stage: int, device: str, tail: int) -> None:
        """Redundant: what comes before a device's first operation, its work, what comes after."""
        if self.free:
            return
        mine = [m for (s, m), d in self.owner.items() if s == stage and d == device]
        each = sum(self.pipeline.seconds(stage, kind, device) for kind in "FB")
        head, back = self._shortest_way(stage)
        self.model.add(self.makespan >= head + len(mine) * each + max(tail, back))

    def _shortest_way(self, stage: int) -> tuple[int, int]:
        """Least time from the iteration's start to a stage, and from it back to the first."""
        head = back = 0
        for before in range(stage):
            devices = self.pipeline.stages[before].spec.devices
            head += min(self.pipeline.seconds(before, "F", d) for d in devices)
            back += min(self.pipeline.seconds(before, "B", d) for d in devices)
        return head, back

    def _add_hint(self) -> None:
        """A complete hint: CP-SAT often drops an incomplete one."""
        ran_on = {e.operation: e.device for e in self.replay.operations}
        for event in self.replay.operations:
            self.model.add_hint(self.start[event.operation], round(event.start_s))
        for key, variable in self.transfer_start.items():
            producer, source, target = key
            found = self._replayed_transfers().get((producer, source, target), 0)
            self.model.add_hint(variable, found)
        if self.free:
            for (stage, microbatch, device), literal in self.runs_on.items():
                chosen = ran_on[Operation(stage, "F", microbatch)] == device
                if len(self.candidates(stage, microbatch)) > 1:
                    self.model.add_hint(literal, chosen)  # type: ignore[arg-type]

    def _replayed_transfers(self) -> Mapping[tuple[Operation, str, str], int]:
        if not hasattr(self, "_replayed"):
            self._replayed = {
                (event.operation, event.source, event.target): round(event.start_s)
                for event in self.replay.transfers
            }
        return self._replayed

    def orders(self, solver: cp_model.CpSolver) -> dict[str, list[Operation]]:
        """The order of every device in the solver's solution."""
        placed: dict[str, list[tuple[int, int, Operation]]] = {d: [] for d in self.pipeline.devices}
        for operation, start in self.start.items():
            for device in self.candidates(operation.stage, operation.microbatch):
                if solver.value(self.runs_on[operation.stage, operation.microbatch, device]):
                    # Of two operations of no length at one time the forward goes first.
                    row = (solver.value(start), operation.kind != "F", operation)
                    placed[device].append(row)
        return {device: [op for *_, op in sorted(rows)] for device, rows in placed.items()}
