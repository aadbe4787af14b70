"""Memory in the schedule's CP-SAT model.

A microbatch holds a stage's stash from the start of its forward to the end of its gradient, and
what the weight gradient needs until that ends. Tensors on their way are left out: the model allows
a little more than real memory does, which keeps its bound valid; its schedules are replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortools.sat.python import cp_model

from planner.plan.operations import Operation
from planner.search.schedule.cp_sat.operations import Operations, Rows

KIB = 1024


class Memory:
    """Limits on every device.

    Where a device has one stage and each kind of operation a known order, they are precedences: a
    forward waits until enough gradients and weight gradients have ended. Otherwise, and where a
    forward takes no time, memory is a cumulative resource.

    Args:
        operations: the model's.
        rows: their order, where it is known.
        kept_bytes: by device, room that is kept for tensors on their way.
        shares: bytes that the stashes of each (stage, device) may take, where the stages of a
            device do not compete for its memory; needs a known order.

    Attributes:
        ended_before: literals that a gradient, or a weight gradient, ends before a forward starts.
    """

    def __init__(
        self,
        operations: Operations,
        rows: Rows,
        kept_bytes: Mapping[str, int] | None = None,
        shares: Mapping[tuple[int, str], int] | None = None,
    ) -> None:
        self.operations = operations
        self.kept_bytes = kept_bytes or {}
        self.model = operations.model
        self.rows = rows
        self.ended_before: dict[tuple[Operation, Operation], cp_model.BoolVarT] = {}
        for device, stages in operations.pipeline.stages_on.items():
            if shares is not None:
                for stage in stages:
                    self._precede(stage, device, shares[stage, device])
            elif len(stages) == 1 and not operations.free and self._shows(stages[0], device):
                self._precede(stages[0], device, self._room_bytes(stages[0], device))
            else:
                self._accumulate(device, stages)

    def _shows(self, stage: int, device: str) -> bool:
        """Return whether what they hold counts: a replay ignores what is held for no time."""
        real, kinds = self.operations.pipeline.real, "FB" if self.operations.last == "B" else "F"
        return all(real.seconds(stage, kind, device) > 0 for kind in kinds)

    # --- one stage, known order --------------------------------------------------------------

    def _room_bytes(self, stage: int, device: str) -> int:
        """Return the bytes for stashes of the only stage of a device."""
        placed = self.operations.pipeline.stages[stage]
        # What is held with them sets the room that whole backwards leave.
        whole = self.operations.last == "B"
        others = placed.tight_bytes() if whole else placed.making_bytes()
        return self._free_bytes(device) - others

    def _free_bytes(self, device: str) -> int:
        """Return the bytes of a device beside its static memory and what is kept."""
        pipeline = self.operations.pipeline
        free = pipeline.capacity_bytes(device) - pipeline.static_bytes(device)
        return free - self.kept_bytes.get(device, 0)

    def _precede(self, stage: int, device: str, room_bytes: int) -> None:
        """Order forwards behind the gradients that make room for their stashes.

        Args:
            stage: that the device runs.
            device: which.
            room_bytes: for stashes.
        """
        # A replica may run no microbatch at all.
        kinds = ("F", self.operations.gradient, self.operations.last)
        forwards, gradients, weights = (self.rows.get((stage, k, device), []) for k in kinds)
        needed = _Needed(self.operations, stage, room_bytes)
        for number, forward in enumerate(forwards):
            if needed.weights(number, number) > number:
                self.model.add_bool_or([])  # It does not fit even alone.
                return
            if needed.weights(number, 0):
                self._follow_gradients(forward, number, needed, gradients, weights)

    def _follow_gradients(
        self,
        forward: Operation,
        number: int,
        needed: _Needed,
        gradients: Sequence[Operation],
        weights: Sequence[Operation],
    ) -> None:
        """Order a forward behind so many gradients and weight gradients that its stash fits."""
        least = needed.least_gradients(number)
        if least:
            self._follow(forward, gradients[least - 1])
        for ended in range(least, number + 1):
            owed = needed.weights(number, ended)
            if owed == 0:
                break
            if ended == number:
                self._follow(forward, weights[owed - 1])
                continue
            literal = self.model.new_bool_var(f"{gradients[ended]} before {forward}")
            self.ended_before[gradients[ended], forward] = literal
            self._follow(forward, gradients[ended], literal)
            self._follow(forward, weights[owed - 1], ~literal)

    def _follow(
        self, later: Operation, earlier: Operation, literal: cp_model.BoolVarT | None = None
    ) -> None:
        """Start one operation once another has ended, if a literal holds."""
        start, end = self.operations.start[later], self.operations.end[earlier]
        found = self.model.add(start >= end)
        if literal is not None:
            found.only_enforce_if(literal)

    # --- otherwise -----------------------------------------------------------------------------

    def _accumulate(self, device: str, stages: tuple[int, ...]) -> None:
        pipeline = self.operations.pipeline
        free = self._free_bytes(device) // KIB
        intervals, demands = [], []
        for stage in stages:
            for until, bytes_ in self._held(stage):
                for microbatch in range(pipeline.microbatches):
                    if device in self.operations.candidates(stage, microbatch) and bytes_ >= KIB:
                        intervals.append(self._lifetime(stage, microbatch, device, until))
                        demands.append(bytes_ // KIB)
        if sum(demands) > free:
            self.model.add_cumulative(intervals, demands, max(free, 0))

    def _held(self, stage: int) -> list[tuple[str, int]]:
        """Return what a microbatch holds from its forward, and until which operation."""
        placed, operations = self.operations.pipeline.stages[stage], self.operations
        if operations.last == "B":
            return [("B", placed.stash_bytes)]
        late = min(placed.stash_bytes, placed.weight_stash_bytes)
        return [("I", placed.stash_bytes - late), ("W", late)]

    def _lifetime(
        self, stage: int, microbatch: int, device: str, until: str
    ) -> cp_model.IntervalVar:
        begin = self.operations.start[Operation(stage, "F", microbatch)]
        end = self.operations.end[Operation(stage, until, microbatch)]  # type: ignore[arg-type]
        size = self.model.new_int_var(0, self.operations.horizon, "")
        literal = self.operations.runs_on[stage, microbatch, device]
        return self.model.new_optional_interval_var(begin, size, end, literal, "")


class _Needed:
    """Operations that must have ended on a stage's device before its forwards can start."""

    def __init__(self, operations: Operations, stage: int, room_bytes: int) -> None:
        placed = operations.pipeline.stages[stage]
        whole = operations.last == "B"
        self._room = room_bytes  # A stash of no bytes always fits.
        self.stash_bytes = placed.stash_bytes
        self._late = 0 if whole else min(placed.stash_bytes, placed.weight_stash_bytes)

    def weights(self, number: int, ended: int) -> int:
        """Return weight gradients, if so many gradients have ended before forward ``number``."""
        over = (
            (number + 1) * self.stash_bytes - ended * (self.stash_bytes - self._late) - self._room
        )
        if over <= 0:
            return 0
        return -(-over // self._late) if self._late else number + 2

    def least_gradients(self, number: int) -> int:
        """Return the fewest gradients with which weight gradients suffice."""
        low, high = 0, number
        while low < high:
            middle = (low + high) // 2
            if self.weights(number, middle) <= middle:
                high = middle
            else:
                low = middle + 1
        return low
