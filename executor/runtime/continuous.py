"""Programs of a pipeline that does not flush: PipeDream's 1F1B (Narayanan et al., SOSP 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan.operations import Operation
from planner.plan.programs import Action, Compute, Message


@dataclass(frozen=True)
class StagePlace:
    """A stage in a pipeline of one stage a rank.

    Attributes:
        stage: its number, from 0.
        ranks: of all stages, in order.
    """

    stage: int
    ranks: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The stages after this one: microbatches whose forwards run ahead of a backward."""
        return len(self.ranks) - 1 - self.stage


@dataclass(frozen=True)
class Stretch:
    """Microbatches between two moments at which the pipeline is empty, numbered through.

    Attributes:
        first: number of the first one.
        end: number after the last one.
    """

    first: int
    end: int


def continuous_program(place: StagePlace, stretch: Stretch, first: int, count: int) -> list[Action]:
    """Return what a stage runs until the backwards of some microbatches are done.

    Before the first backward of a stretch run the forwards of as many microbatches as there are
    stages after this one; then a forward and a backward take turns, and forwards of microbatches
    after these run meanwhile, as far as the stretch goes. A receive is posted an operation ahead.

    Args:
        place: of the stage.
        stretch: in which the microbatches are.
        first: number of the first microbatch.
        count: how many.
    """
    rows = _operations(place, stretch, first, count)
    program: list[Action] = []
    receives = [_receive(place, stretch, operation) for operation in rows]
    if receives[0] is not None:
        program.append(receives[0])
    for operation, after in zip(rows, [*receives[1:], None], strict=True):
        if after is not None:
            program.append(after)
        program.append(Compute(operation))
        target = place.stage + (1 if operation.kind == "F" else -1)
        if 0 <= target < len(place.ranks):
            program.append(Message("send", operation, place.ranks[target]))
    return program


def _operations(place: StagePlace, stretch: Stretch, first: int, count: int) -> list[Operation]:
    is_empty = first == stretch.first
    forwards = first if is_empty else min(first + place.depth, stretch.end)
    rows = []
    for microbatch in range(first, first + count):
        until = min(microbatch + place.depth + 1, stretch.end)
        rows += [Operation(place.stage, "F", number) for number in range(forwards, until)]
        forwards = max(forwards, until)
        rows.append(Operation(place.stage, "B", microbatch))
    return rows


def _receive(place: StagePlace, stretch: Stretch, operation: Operation) -> Message | None:
    """Return the receive of what an operation needs from a neighbouring stage."""
    stage, kind, microbatch = operation
    source = stage + (-1 if kind == "F" else 1)
    if not 0 <= source < len(place.ranks):
        return None
    if kind == "B":
        used = Operation(stage, "F", microbatch)
    else:
        # The stage before has one more microbatch in flight, and then waits for a gradient.
        used = Operation(stage, "B", microbatch - place.depth - 2)
    arrived = (used,) if used.microbatch >= stretch.first else ()
    needed = Operation(source, kind, microbatch)
    return Message("receive", needed, place.ranks[source], arrived)
