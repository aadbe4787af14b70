"""Whether the ranks of a plan can issue what they are to, whatever waits for whatever.

NCCL matches messages by their order alone, makes a communicator at its first use, where both ends
wait for each other, and runs what one communicator is given in that order on every rank. So the
order of messages has to be the same on both ends of each direction of a pair, first uses may not
wait in a circle, nor computations, messages and reductions. gloo asks for less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from typing import Literal, NamedTuple

from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.plan.programs import (
    Action,
    Compute,
    Message,
    Program,
    Reduce,
    message_of,
    needed_by,
)
from planner.verification.tasks import in_circles


class Communicator(NamedTuple):
    """Ranks that talk over a stream of their own.

    Attributes:
        kind: what it carries: messages, reductions, or the collectives within computations of a
            tensor-parallel group or of replicas that put layers together.
        ranks: source and target of messages; or all others, in ascending order.
    """

    kind: Literal["messages", "reductions", "members", "replicas"]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.kind == "messages":
            return f"messages from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"{_CARRIED[self.kind]} of ranks {', '.join(map(str, self.ranks))}"


_CARRIED = {"reductions": "reductions", "members": "computations", "replicas": "computations"}


Members = Mapping[int, tuple[int, ...]]
"""The ranks of the tensor-parallel group of each rank that is in one."""
Replicas = Mapping[int, tuple[int, ...]]
"""The ranks of each stage whose replicas put its layers together, in ascending order."""


def communicator_of(
    action: Action, rank: int, members: Members | None = None, replicas: Replicas | None = None
) -> Communicator | None:
    """Return what an action of a rank talks over; None of a computation that it runs alone."""
    if isinstance(action, Message):
        ends = (rank, action.peer) if action.direction == "send" else (action.peer, rank)
        return Communicator("messages", ends)
    if isinstance(action, Reduce):
        return Communicator("reductions", action.ranks)
    group, others = (members or {}).get(rank), (replicas or {}).get(action.operation.stage)
    if others is not None:
        return Communicator("replicas", others)
    return None if group is None else Communicator("members", group)


def require_issuable(
    programs: Sequence[Program],
    stages: int,
    opened: Sequence[Communicator] = (),
    members: Members | None = None,
    replicas: Replicas | None = None,
) -> None:
    """Refuse programs that disagree or could wait for each other for ever.

    Args:
        programs: of all ranks.
        stages: number of the plan's stages.
        opened: communicators that all their ranks open in this order before the first iteration.
        members: of tensor-parallel groups, which run each computation together.
        replicas: of stages, which run the n-th forward and the n-th backward together.

    Raises:
        PipeplanError: naming the first actions that disagree, or those that wait in a circle.
    """
    problems = issue_problems(programs, stages, opened, members, replicas)
    if problems:
        raise PipeplanError(problems)


def issue_problems(
    programs: Sequence[Program],
    stages: int,
    opened: Sequence[Communicator] = (),
    members: Members | None = None,
    replicas: Replicas | None = None,
) -> list[str]:
    """Return what :func:`require_issuable` refuses, one line each."""
    issued = [
        [(action, communicator_of(action, rank, members, replicas)) for action in program]
        for rank, program in enumerate(programs)
    ]
    wrong = [*_disagreements(issued), *_missing(programs, stages)]
    return wrong or [*_unopened(issued, opened), *_circle(issued, stages)]


_Issued = Sequence[Sequence[tuple[Action, Communicator | None]]]
"""The actions of each rank in order, with what each talks over."""


# --- the ends agree ------------------------------------------------------------------------------


def _disagreements(issued: _Issued) -> Iterator[str]:
    """The first place at which the ranks of a communicator issue different things."""
    carried: dict[Communicator, dict[int, list[Action]]] = {}
    for rank, rows in enumerate(issued):
        for action, communicator in rows:
            if communicator is not None:
                ends = carried.setdefault(communicator, {r: [] for r in communicator.ranks})
                ends[rank].append(action)
    for communicator, ends in sorted(carried.items()):
        (first, ours), *others = ends.items()
        for other, theirs in others:
            for number, (one, two) in enumerate(zip_longest(ours, theirs), 1):
                if _what(one, communicator) != _what(two, communicator):
                    yield (
                        f"{communicator}, number {number}: rank {first} issues {_named(one)}, "
                        f"rank {other} {_named(two)}"
                    )
                    break


def _what(action: Action | None, communicator: Communicator) -> object:
    if isinstance(action, Compute) and communicator.kind == "replicas":
        return action.operation[:2]  # Each of another microbatch.
    return action.operation if isinstance(action, Message) else action


def _named(action: Action | None) -> str:
    if isinstance(action, Reduce):
        return f"the reduction of stages {', '.join(map(str, action.stages))}"
    return "nothing more" if action is None else str(action.operation)


def _missing(programs: Sequence[Program], stages: int) -> Iterator[str]:
    """Inputs that are neither made before nor on their way, results that are sent too early."""
    for rank, program in enumerate(programs):
        there: set[Operation] = set()
        made: set[Operation] = set()
        for action in program:
            if isinstance(action, Compute):
                needed = needed_by(action.operation, stages)
                if needed is not None and needed not in there and needed not in made:
                    yield (
                        f"rank {rank} runs {action.operation}, which needs {needed}, before it "
                        "makes that or posts its receive"
                    )
                made.add(message_of(action.operation))
            elif isinstance(action, Message) and action.direction == "receive":
                there.add(action.operation)
            elif isinstance(action, Message) and action.operation not in made:
                yield f"rank {rank} sends {action.operation} before it is made"


# --- first uses ----------------------------------------------------------------------------------


def _unopened(issued: _Issued, opened: Sequence[Communicator]) -> Iterator[str]:
    """First uses that wait in a circle: each needs all ranks of its communicator at once."""
    uses: list[dict[Communicator, str]] = []
    earlier: dict[Communicator, set[Communicator]] = defaultdict(set)
    for rank, rows in enumerate(issued):
        first = {c: f"the opening of {c}" for c in opened if rank in c.ranks}
        for action, communicator in rows:
            if communicator is not None:
                first.setdefault(communicator, f"{communicator} with {_named(action)}")
        uses.append(first)
        for number, communicator in enumerate(order := list(first)):
            earlier[communicator].update(order[max(0, number - 1) : number])
    never = in_circles(earlier)
    heads = (next((how for c, how in first.items() if c in never), None) for first in uses)
    stuck = [f"rank {rank} waits in {how}" for rank, how in enumerate(heads) if how is not None]
    if stuck:
        yield (
            "communicators that are first used in the iteration wait for each other: "
            + "; ".join(stuck[:4])
        )


# --- waits ---------------------------------------------------------------------------------------

_Node = tuple[int | Communicator, Operation | Reduce]
"""An operation of a rank; or a message or a reduction, which is one thing on all its ranks."""


def _circle(issued: _Issued, stages: int) -> Iterator[str]:
    """The waits in a circle, if there are any."""
    try:
        TopologicalSorter(_waits(issued, stages)).prepare()
    except CycleError as error:  # Each node of its circle is waited for by the next one.
        circle = reversed(error.args[1])
        yield "in a circle: " + ", which waits for ".join(map(_described, circle))


def _waits(issued: _Issued, stages: int) -> dict[_Node, set[_Node]]:
    """What each computation, message and reduction waits for.

    A computation waits for the one before it on its rank and for its input. What a communicator
    carries waits for what it carried before, and on each of its ranks for the computation before.
    A computation of a tensor-parallel group is one on all its ranks, and so is the n-th forward or
    backward of a stage whose replicas put layers together.
    """
    before: dict[_Node, set[_Node]] = defaultdict(set)
    for rank, rows in enumerate(issued):
        latest: dict[int | Communicator, _Node] = {}
        received: dict[Operation, set[_Node]] = defaultdict(set)
        counts: Counter[tuple[int, str]] = Counter()
        for action, communicator in rows:
            place: int | Communicator = rank if communicator is None else communicator
            what = action if isinstance(action, Reduce) else action.operation
            if isinstance(what, Operation) and communicator and communicator.kind == "replicas":
                what = what._replace(microbatch=counts[what[:2]])
                counts[what[:2]] += 1
            node = place, what
            before[node].update(latest[p] for p in (rank, place) if p in latest)
            latest[place] = node
            if isinstance(action, Compute):
                latest[rank] = node
                needed = needed_by(action.operation, stages)
                before[node] |= received[needed] if needed else set()
            elif isinstance(action, Message) and action.direction == "receive":
                back = Communicator("messages", (rank, action.peer))
                # Members of a tensor-parallel group may have parts of it from several ranks.
                received[action.operation] |= {node, *((back, sent) for sent in action.arrived)}
    return before


def _described(node: _Node) -> str:
    place, what = node
    if isinstance(what, Reduce):
        return _named(what) + f" on ranks {', '.join(map(str, what.ranks))}"
    if isinstance(place, int):
        return f"{what} on rank {place}"
    if place.kind == "replicas":
        return f"{what.kind} number {what.microbatch} of stage {what.stage} in {place}"
    return f"{what} in {place}"


def replicas_together(plan: Plan) -> Replicas:
    """Return the ranks of the stages whose replicas put layers together."""
    if not plan.job.shards_parameters:
        return {}
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    rows = {s.index: tuple(sorted(rank_of[d] for d in s.devices)) for s in plan.stages}
    return {stage: ranks for stage, ranks in rows.items() if len(ranks) > 1}
