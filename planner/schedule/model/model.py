"""The microbatch schedule as a CP-SAT model: intervals, no-overlap, transfers and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ortools.sat.python import cp_model

from planner.artifacts.operations import Operation
from planner.schedule.assignment import Assignment
from planner.schedule.measure import Measure, measured_s
from planner.schedule.model.halves import in_halves, whole_backwards
from planner.schedule.model.hint import add_hint
from planner.schedule.model.memory import Memory
from planner.schedule.model.objective import minimise
from planner.schedule.model.operations import Operations
from planner.schedule.model.order import is_one_order, keep_order, rows_of
from planner.schedule.model.transfers import Transfers
from planner.schedule.ticks import TickPipeline
from planner.simulator import Timeline


class ScheduleModel:
    """Start times of all operations and transfers, in ticks.

    The model and its variables are public: add constraints to ``model`` before solving.

    Args:
        pipeline: stages in ticks.
        replay: a feasible schedule of the pipeline in ticks; hint and horizon.
        owner: the device of each (stage, microbatch). Where ``free`` is set it is only a hint
            and the model chooses.
        free: let CP-SAT choose the replica of each microbatch.
        split: run input and weight gradients apart, or whole where that takes less time and the
            model chooses so; else all backwards are whole. If not given, as in the replay.
        measure: what is minimised.
        kept_bytes: by device, room that is kept for tensors on their way; the model leaves these
            out. With any the bound holds only for schedules that keep it free.
        shares: bytes of memory for the stashes of each (stage, device), if it is divided among the
            stages of a device; the replay keeps to them. The bound holds only for such schedules.

    Attributes:
        model: the CP-SAT model.
        operations: their start and end, and on which replica each runs.
        transfers: when those that hold links set off.
        objective: the measure, in ticks.
        is_exact: whether a bound of this model holds for every schedule of the stages with
            backwards split as here. It does if no stage is replicated and the replay runs every
            kind in one order (equal microbatches may be renumbered, so that loses nothing) or if
            replicas are chosen freely; and if memory is not divided. Whole backwards among split
            ones free their memory in turn with these, which a schedule need not.
    """

    def __init__(
        self,
        pipeline: TickPipeline,
        replay: Timeline,
        owner: Assignment,
        *,
        free: bool,
        split: bool | None = None,
        measure: Measure = "makespan",
        kept_bytes: Mapping[str, int] | None = None,
        shares: Mapping[tuple[int, str], int] | None = None,
    ) -> None:
        self.model = cp_model.CpModel()
        if split is None:
            split = any(event.operation.kind == "W" for event in replay.operations)
        whole = whole_backwards(replay)
        replay = in_halves(replay) if split else replay
        rows = rows_of(replay)
        self.operations = Operations(
            self.model, pipeline, owner, _horizon(pipeline, replay, measure), free=free, split=split
        )
        keep_order(self.operations, rows)
        self.transfers = Transfers(self.operations)
        memory = Memory(self.operations, rows, kept_bytes, shares)
        self.objective = minimise(self.operations, rows, measure)
        add_hint(self.operations, self.transfers, memory, replay)
        for key, literal in self.operations.is_whole.items():
            self.model.add_hint(literal, key in whole)
        single = all(len(stage.spec.devices) == 1 for stage in pipeline.stages)
        restricted = shares is not None or (split and pipeline.has_quicker_wholes)
        self.is_exact = not restricted and (free or (single and is_one_order(rows)))

    def orders(self, solver: cp_model.CpSolver) -> dict[str, list[Operation]]:
        """The order of every device in the solver's solution."""
        return self.operations.orders(solver)


def _horizon(pipeline: TickPipeline, replay: Timeline, measure: Measure) -> int:
    """The end of the replay, and the longest tail behind it; twice its span where that counts.

    A schedule of a smaller longest span T may end later than the replay, but not after 2T: every
    stage starts before the first stage's last gradient ends, and that is at T.
    """
    tails = [
        pipeline.tail_s(index, device)
        for index, stage in enumerate(pipeline.stages)
        for device in stage.spec.devices
    ]
    end = round(max(event.end_s for event in replay.operations)) + max(tails)
    if measure == "makespan":
        return end
    return max(end, 2 * math.ceil(measured_s(replay, measure)))
