"""Lowering: each rank's order of operations, with its sends and receives put in.

A result is sent right after the operation that makes it, and the receive is posted on the peer at
the same moment of the simulated iteration. Receives from a peer are thus posted in the order of
its sends, and none is posted after an operation that waits for it: the program cannot deadlock
where the plan does not.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from planner.artifacts.operations import Operation
from planner.artifacts.plan import Plan
from planner.simulator import owners, simulate_plan


@dataclass(frozen=True)
class Compute:
    """Run an operation."""

    operation: Operation


@dataclass(frozen=True)
class Message:
    """Send or receive what an operation made.

    ``operation`` is the producer: ``2F0`` are stage 2's activations of microbatch 0, on their way
    to stage 3; ``2B0`` the gradients of its input, on their way to stage 1. Once a receive has
    ended, the sends of ``arrived`` have too: the peer used them before it made this message.
    """

    direction: Literal["send", "receive"]
    operation: Operation
    peer: int
    arrived: tuple[Operation, ...] = ()


Action = Compute | Message


def lower(plan: Plan) -> list[list[Action]]:
    """The program of every rank; the plan has whole backwards only."""
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    owner = owners(plan.parsed_orders())
    programs: list[list[Action]] = [[] for _ in plan.ranks]
    # By (source, target): what the target has used, and the source does not know of yet.
    used: dict[tuple[int, int], list[Operation]] = defaultdict(list)

    for event in simulate_plan(plan).operations:
        stage, kind, microbatch = event.operation
        rank = rank_of[event.device]
        programs[rank].append(Compute(event.operation))
        step = {"F": 1, "B": -1}[kind]
        source = owner.get((stage - step, microbatch))
        if source is not None:
            used[rank_of[source], rank].append(Operation(stage - step, kind, microbatch))
        target = owner.get((stage + step, microbatch))
        if target is not None and target != event.device:
            peer = rank_of[target]
            arrived = tuple(used.pop((peer, rank), ()))
            programs[rank].append(Message("send", event.operation, peer))
            programs[peer].append(Message("receive", event.operation, rank, arrived))
    return programs
