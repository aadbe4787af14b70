"""Lowering: each rank's order of operations, with its sends, receives and reductions put in.

A result is sent right after the operation that makes it, and the receive is posted on the peer at
the same moment of the simulated iteration. Receives from a peer are thus posted in the order of
its sends, and none is posted after an operation that waits for it: the program cannot deadlock
where the plan does not. Then receives move ahead of operations that are under way at that moment,
since a message sets off only when its receive is posted. Gradients are reduced once a rank's last
backward that adds to them is done, in one order of reductions on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.plan.operations import Kind, Operation, owners
from planner.plan.plan import Plan
from planner.simulation.simulator import simulate_plan
from planner.simulation.timeline import Timeline


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
_DIRECTION: dict[Kind, int] = {"F": 1, "B": -1, "I": -1}


def message_of(operation: Operation) -> Operation:
    """The name of what an operation hands to its neighbour."""
    return operation._replace(kind="B") if operation.kind == "I" else operation


LEAD = 2
"""Operations that a receive is posted ahead of: the one under way when the message comes, and one
more, for messages that come sooner than in the simulation."""


def lower(plan: Plan, *, paired: bool = False, lead: int = LEAD) -> list[list[Action]]:
    """The program of every rank.

    Args:
        plan: verified.
        paired: keep all messages of two ranks in one order on both, sends and receives together,
            as NCCL wants them; gloo is content with the receives in the order of the sends.
        lead: operations that receives are posted ahead of.
    """
    timeline = simulate_plan(plan)
    programs = [_ahead(p, paired, lead) for p in _with_messages(plan, timeline)]
    reductions = _reductions(plan, timeline)
    return [_with_reductions(rank, programs[rank], reductions) for rank in range(len(plan.ranks))]


def _with_messages(plan: Plan, timeline: Timeline) -> list[list[Action]]:
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    owner = owners(plan.parsed_orders())
    programs: list[list[Action]] = [[] for _ in plan.ranks]
    # By (source, target): what the target has used, and the source does not know of yet.
    used: dict[tuple[int, int], list[Operation]] = defaultdict(list)

    for event in timeline.operations:
        stage, kind, microbatch = event.operation
        rank = rank_of[event.device]
        programs[rank].append(Compute(event.operation))
        if kind not in _DIRECTION:
            continue  # A weight gradient neither needs nor makes a message.
        step, message = _DIRECTION[kind], message_of(event.operation)
        source = owner.get((stage - step, microbatch))
        if source is not None:
            used[rank_of[source], rank].append(Operation(stage - step, message.kind, microbatch))
        target = owner.get((stage + step, microbatch))
        if target is not None and target != event.device:
            peer = rank_of[target]
            arrived = tuple(used.pop((peer, rank), ()))
            programs[rank].append(Message("send", message, peer))
            programs[peer].append(Message("receive", message, rank, arrived))
    return programs


def _ahead(program: Sequence[Action], paired: bool, lead: int) -> list[Action]:
    """Receives moved ahead of ``lead`` computations, and of no message that has to stay before."""
    moved: list[Action] = []
    for action in program:
        place = len(moved)
        if isinstance(action, Message) and action.direction == "receive":
            place = _place_ahead(moved, action, paired, lead)
        moved.insert(place, action)
    return moved


def _place_ahead(program: Sequence[Action], receive: Message, paired: bool, lead: int) -> int:
    place = len(program)
    while place > 0:
        before = program[place - 1]
        if isinstance(before, Compute):
            if lead == 0:
                break
            lead -= 1
        elif isinstance(before, Message) and before.peer == receive.peer:  # noqa: SIM102
            if paired or before.direction == "receive":
                break
        place -= 1
    return place


def _reductions(plan: Plan, timeline: Timeline) -> list[Reduce]:
    """Return the reductions in the order in which the simulation starts their last buckets."""
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    rows = [
        Reduce(
            event.synchronisation.stages,
            tuple(sorted(rank_of[device] for device in event.synchronisation.devices)),
        )
        for event in timeline.synchronisations
    ]
    return list(reversed(dict.fromkeys(reversed(rows))))


def _with_reductions(
    rank: int, program: Sequence[Action], reductions: Sequence[Reduce]
) -> list[Action]:
    """Each reduction after the last backward of its stages here, and after those before it."""
    waiting = [reduction for reduction in reductions if rank in reduction.ranks]
    left: dict[int, int] = defaultdict(int)
    for action in program:
        if isinstance(action, Compute) and action.operation.kind in "BW":
            left[action.operation.stage] += 1
    lowered: list[Action] = []
    for action in program:
        lowered.append(action)
        if isinstance(action, Compute) and action.operation.kind in "BW":
            left[action.operation.stage] -= 1
            while waiting and not any(left[stage] for stage in waiting[0].stages):
                lowered.append(waiting.pop(0))
    return [*lowered, *waiting]
