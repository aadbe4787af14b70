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


def pairs_of_members(plan: Plan, source: str, target: str) -> list[tuple[int, int]]:
    """Return which ranks of a replica send to which of another, as (source, target).

    Of tensor-parallel groups of one size those members talk to each other that have the same
    number. Else, where every member has the whole of what is sent and needs the whole of what it
    receives, each receives from one (:func:`whole_sender`). Where members have shares of positions,
    each receives from all that have some of its own.

    Args:
        plan: with both.
        source: replica of a stage, as stages list it.
        target: another.
    """
    ours, theirs = plan.ranks_of(source), plan.ranks_of(target)
    many, few = len(ours), len(theirs)
    if plan.tensor_parallel is None or not plan.tensor_parallel.sequence:
        return [(ours[whole_sender(many, j, few)], rank) for j, rank in enumerate(theirs)]
    return [
        (sender, rank)
        for j, rank in enumerate(theirs)
        for i, sender in enumerate(ours)
        # Member i of n has the positions from i / n to (i + 1) / n.
        if i * few < (j + 1) * many and j * many < (i + 1) * few
    ]


def whole_sender(members: int, target: int, targets: int) -> int:
    """Return the number of the member that sends a whole tensor to a member of another group.

    A smaller group's members each send to about as many of a larger one; of a larger group only
    some send.

    Args:
        members: of the group that sends.
        target: number of the member that receives.
        targets: members of its group.
    """
    return target * members // targets


def directions(plan: Plan) -> list[tuple[int, int]]:
    """Return each (source, target) of ranks between which messages go, in one order on all ranks.

    Activations go one way and gradients the other. Which members of tensor-parallel groups talk to
    each other, :func:`pairs_of_members` says.
    """
    owner = owners(plan.parsed_orders())
    found = set()
    for (stage, microbatch), device in owner.items():
        after = owner.get((stage + 1, microbatch))
        if after is not None and after != device:
            found |= {*pairs_of_members(plan, device, after)}
            found |= {*pairs_of_members(plan, after, device)}
    return sorted(found)
