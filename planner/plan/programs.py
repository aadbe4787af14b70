"""What each rank issues in an iteration: computations, messages and reductions, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.plan.operations import Operation, owners
from planner.plan.plan import Plan


@dataclass(frozen=True)
class Compute:
    """Run an operation."""

    operation: Operation


@dataclass(frozen=True)
class Message:
    """Send or receive what an operation made.

    ``operation`` is the producer: ``2F0`` are stage 2's activations of microbatch 0, on their way
    to stage 3; ``2B0`` the gradients of its input, on their way to stage 1, whether a whole
    backward made them or its first half. Once a receive has ended, the sends of ``arrived`` have
    too: the peer used them before it made this message.
    """

    direction: Literal["send", "receive"]
    operation: Operation
    peer: int
    arrived: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Reduce:
    """All gradients that these stages share on these ranks are there: the rest is reduced now.

    The strategy may have begun with those that were complete before.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]


Action = Compute | Message | Reduce
Program = Sequence[Action]


def message_of(operation: Operation) -> Operation:
    """Return the name of what an operation hands to its neighbour."""
    return operation._replace(kind="B") if operation.kind == "I" else operation


def needed_by(operation: Operation, stages: int) -> Operation | None:
    """Return the message of a neighbouring stage that an operation needs, if any.

    Args:
        operation: the operation.
        stages: number of the plan's stages.
    """
    stage, kind, microbatch = operation
    neighbour = stage - 1 if kind == "F" else stage + 1
    if kind == "W" or not 0 <= neighbour < stages:
        return None
    return Operation(neighbour, "F" if kind == "F" else "B", microbatch)


def directions(plan: Plan) -> list[tuple[int, int]]:
    """Return each (source, target) of ranks between which messages go, in one order on all ranks.

    Activations go one way and gradients the other, so that each pair is there in both directions.
    Members of two tensor-parallel groups that have the same place in them talk to each other.
    """
    owner = owners(plan.parsed_orders())
    found = set()
    for (stage, microbatch), device in owner.items():
        after = owner.get((stage + 1, microbatch))
        if after is not None and after != device:
            for ends in zip(plan.ranks_of(device), plan.ranks_of(after), strict=True):
                found |= {ends, ends[::-1]}
    return sorted(found)
