"""Lowering: each rank's order of operations, with its sends, receives and reductions put in.

A result is sent once the operation that makes it has ended in the simulated iteration, and the
receive is posted on the peer at the same moment. All messages are thus in one order of the whole
plan, of which each rank has its part, and none is posted after an operation that waits for it: the
program cannot deadlock where the plan does not, whatever the backend. Then receives move ahead of
operations that are under way at that moment, since a message sets off only when its receive is
posted. Over NCCL they move ahead of no other message: streams share a GPU's few queues, where what
waits holds up all behind it. Over gloo nothing waits in a queue, and receives move ahead of sends
too: the word to the peer that a receive is posted goes the same way as what is sent, and would come
behind what has not arrived by then. Gradients are reduced once a rank's last backward that adds to
them is done, in one order of reductions on all ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from planner.plan.operations import Kind, Operation, owners
from planner.plan.plan import Plan
from planner.plan.programs import (
    Action,
    Compute,
    Message,
    Reduce,
    directions,
    message_of,
    needed_by,
    pairs_of_members,
)
from planner.simulation.simulator import simulate_plan
from planner.simulation.timeline import Timeline
from planner.verification.issue_order import (
    Communicator,
    replicas_together,
    require_issuable,
)

_STEP: dict[Kind, int] = {"F": 1, "B": -1, "I": -1}
"""From a stage to that which needs what an operation of this kind makes."""

LEAD = 2
"""Operations that a receive is posted ahead of: the one under way when the message comes, and one
more, for messages that come sooner than in the simulation."""


def lower(plan: Plan, *, lead: int = LEAD, in_one_order: bool = True) -> list[list[Action]]:
    """The program of every rank.

    Members of a tensor-parallel group run the same computations. Each exchanges gradients with the
    members of other groups that have its number, and messages with those that
    :func:`planner.plan.programs.pairs_of_members` says.

    Args:
        plan: verified.
        lead: operations that receives are posted ahead of.
        in_one_order: whether all messages are in one order of the whole plan, for NCCL; else those
            of each direction of a pair are.

    Raises:
        PipeplanError: if ranks could wait for each other for ever.
    """
    timeline = simulate_plan(plan)
    programs = _in_order(plan, timeline)
    reductions = _reductions(plan, timeline)
    lowered = _of_ranks(plan, [_ahead(row, lead) for row in programs], reductions)
    opened = communicators(plan, [a for row in lowered for a in row if isinstance(a, Reduce)])
    together = members_by_rank(plan), replicas_together(plan)
    require_issuable(lowered, len(plan.stages), opened, *together)
    if in_one_order:
        return lowered
    moments = _moments(timeline)
    return _of_ranks(plan, [_ahead(row, lead, moments) for row in programs], reductions)


def lower_forwards(plan: Plan, microbatches: int) -> list[list[Action]]:
    """The program of every rank for forwards alone, without an optimizer step.

    Microbatch m runs where the plan's microbatch m runs, modulo its number of microbatches. All
    forwards and messages are in one order of the whole plan, so that no rank waits in a circle.

    Args:
        plan: verified.
        microbatches: how many, from 0.
    """
    owner = owners(plan.parsed_orders())
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    programs: list[list[Action]] = [[] for _ in plan.ranks]
    last = len(plan.stages) - 1
    rows = [(m + stage, m, stage) for m in range(microbatches) for stage in range(last + 1)]
    for _, microbatch, stage in sorted(rows):
        place = microbatch % plan.microbatches
        rank, operation = rank_of[owner[stage, place]], Operation(stage, "F", microbatch)
        source = rank_of[owner[stage - 1, place]] if stage else rank
        if source != rank:
            needed = Operation(stage - 1, "F", microbatch)
            programs[source].append(Message("send", needed, rank))
            programs[rank].append(Message("receive", needed, source))
        programs[rank].append(Compute(operation))
    return _of_ranks(plan, programs, [])


def _of_ranks(
    plan: Plan, programs: Sequence[Sequence[Action]], reductions: Sequence[Reduce]
) -> list[list[Action]]:
    """Return programs of devices or groups as those of their ranks, with reductions."""
    places = [_with_reductions(k, program, reductions) for k, program in enumerate(programs)]
    members = _MemberActions(plan)
    return [
        [row for action in program for row in members.of(action, rank)]
        for name, program in zip(plan.ranks, places, strict=True)
        for rank in plan.ranks_of(name)
    ]


def communicators(plan: Plan, reductions: Sequence[Reduce]) -> list[Communicator]:
    """Return what the ranks of a plan talk over, in the order in which all of them open it."""
    groups = {Communicator("reductions", reduce.ranks) for reduce in reductions}
    groups |= {Communicator("members", ranks) for ranks in members_by_rank(plan).values()}
    layers = {Communicator("replicas", ranks) for ranks in replicas_together(plan).values()}
    return [
        *sorted(groups, key=lambda communicator: communicator.ranks),
        *(Communicator("messages", ends) for ends in directions(plan)),
        *sorted(layers),
    ]


def members_by_rank(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each rank's tensor-parallel group; empty without groups."""
    groups = [tuple(plan.ranks_of(name)) for name in plan.ranks]
    return {rank: ranks for ranks in groups if len(ranks) > 1 for rank in ranks}


class _MemberActions:
    """Actions between groups, by their places, as actions between members of them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ends: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def of(self, action: Action, rank: int) -> list[Action]:
        """Return what a rank does of an action of its group.

        A message may go to several ranks or to none, and come from several.

        Args:
            action: of its group.
            rank: a member.
        """
        here = self._plan.place_of(rank)
        match action:
            case Compute():
                return [action]
            case Reduce():
                ranks = (self._plan.ranks_of(self._plan.ranks[place]) for place in action.ranks)
                return [replace(action, ranks=tuple(row[here.member] for row in ranks))]
        there = self._plan.ranks[action.peer]
        sent = self._between(here.replica, there)
        if action.direction == "send":
            return [replace(action, peer=target) for source, target in sent if source == rank]
        return [
            # Of what this rank has sent to other members than that it is not known.
            replace(action, peer=peer, arrived=action.arrived if (rank, peer) in sent else ())
            for peer, target in self._between(there, here.replica)
            if target == rank
        ]

    def _between(self, source: str, target: str) -> list[tuple[int, int]]:
        key = source, target
        if key not in self._ends:
            self._ends[key] = pairs_of_members(self._plan, source, target)
        return self._ends[key]


def _in_order(plan: Plan, timeline: Timeline) -> list[list[Action]]:
    """Return the computations and messages of each device or group, in the simulated order.

    The two ends of a message stand before the first computation that starts once it is made.
    """
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    owner = owners(plan.parsed_orders())
    starts_s = [event.start_s for event in timeline.operations]
    # By (rank, source): what the rank has used, and the source does not know of yet.
    used: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    rows: list[tuple[tuple[int, bool, float], int, Action]] = []
    for number, event in enumerate(timeline.operations):
        rank, operation = rank_of[event.device], event.operation
        stage, kind, microbatch = operation
        rows.append(((number, True, 0.0), rank, Compute(operation)))
        needed = needed_by(operation, len(plan.stages))
        if needed is not None:
            used[rank, rank_of[owner[needed.stage, microbatch]]].append(needed)
        target = owner.get((stage + _STEP[kind], microbatch)) if kind in _STEP else None
        if target is None or rank_of[target] == rank:
            continue
        peer, made = rank_of[target], message_of(operation)
        when = max(number + 1, bisect_left(starts_s, event.end_s)), False, event.end_s
        arrived = tuple(used.pop((rank, peer), ()))
        rows.append((when, rank, Message("send", made, peer)))
        rows.append((when, peer, Message("receive", made, rank, arrived)))
    programs: list[list[Action]] = [[] for _ in plan.ranks]
    for _, rank, action in sorted(rows, key=itemgetter(0)):
        programs[rank].append(action)
    return programs


class _Moments(NamedTuple):
    """When a message sets off and when it has arrived in the simulated iteration."""

    ready_s: float
    arrived_s: float


def _moments(timeline: Timeline) -> dict[Operation, _Moments]:
    made_s = {message_of(row.operation): row.end_s for row in timeline.operations}
    return {row.operation: _Moments(made_s[row.operation], row.end_s) for row in timeline.transfers}


def _ahead(
    program: Sequence[Action], lead: int, moments: Mapping[Operation, _Moments] | None = None
) -> list[Action]:
    """Return a program whose receives are moved ahead of at most ``lead`` computations.

    Args:
        program: with each receive at the moment of its send.
        lead: how many.
        moments: of all messages; receives move ahead of sends and of receives from other ranks as
            well then, and of all that is sent to their rank and has not arrived when it sends.
            None: ahead of no message.
    """
    moved: list[Action] = []
    for action in program:
        place = len(moved)
        if isinstance(action, Message) and action.direction == "receive":
            place = _place_of(action, moved, lead, moments)
        moved.insert(place, action)
    return moved


def _place_of(
    receive: Message,
    program: Sequence[Action],
    lead: int,
    moments: Mapping[Operation, _Moments] | None,
) -> int:
    """Return where in a program a receive goes; the arguments are those of :func:`_ahead`."""
    place = len(program)
    for at in reversed(range(len(program))):
        before = program[at]
        if isinstance(before, Compute):
            lead -= 1
        elif moments is None or _keeps_order(before, receive):
            break
        if lead >= 0 or (moments is not None and _is_on_its_way(before, receive, moments)):
            place = at
    return place


def _keeps_order(before: Action, receive: Message) -> bool:
    """Return whether an action is a receive from the same rank."""
    return (
        isinstance(before, Message)
        and before.direction == "receive"
        and before.peer == receive.peer
    )


def _is_on_its_way(before: Action, receive: Message, moments: Mapping[Operation, _Moments]) -> bool:
    """Return whether an action sends there what has not arrived when what is received sets off."""
    if not isinstance(before, Message) or before.peer != receive.peer:
        return False
    if before.operation not in moments or receive.operation not in moments:
        return False  # Of no bytes.
    return moments[before.operation].arrived_s > moments[receive.operation].ready_s


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
