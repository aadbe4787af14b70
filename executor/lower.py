"""Lowering: each rank's order of operations, with its sends and receives put in.

A result is sent right after the operation that makes it, and the receive is posted on the peer at
the same moment of the simulated iteration. Receives from a peer are thus posted in the order of
its sends, and none is posted after an operation that waits for it: the program cannot deadlock
where the plan does not.
"""

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
    to stage 3; ``2B0`` the gradients of its input, on their way to stage 1.
    """

    direction: Literal["send", "receive"]
    operation: Operation
    peer: int


Action = Compute | Message


def lower(plan: Plan) -> list[list[Action]]:
    """The program of every rank."""
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    owner = owners(plan.parsed_orders())
    programs: list[list[Action]] = [[] for _ in plan.ranks]
    for event in simulate_plan(plan).operations:
        rank = rank_of[event.device]
        programs[rank].append(Compute(event.operation))
        stage = event.operation.stage + (1 if event.operation.kind == "F" else -1)
        if event.operation.kind == "W" or not 0 <= stage < len(plan.stages):
            continue
        peer = rank_of[owner[stage, event.operation.microbatch]]
        if peer != rank:
            programs[rank].append(Message("send", event.operation, peer))
            programs[peer].append(Message("receive", event.operation, rank))
    return programs
