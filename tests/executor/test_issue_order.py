"""The check of what ranks issue: it refuses exactly what hangs, and no plan of ours does."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from executor_plans import DEVICES, on_groups, scheduled
from hypothesis import given
from hypothesis import strategies as st
from test_lower import chain, plans

from executor.runtime.lowering import lower
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.plan.programs import Action, Compute, Message, Reduce, message_of
from planner.verification import verify
from planner.verification.issue_order import (
    Communicator,
    communicator_of,
    issue_problems,
    require_issuable,
)

Programs = list[list[Action]]


def copied(plan: Plan) -> Programs:
    return [list(program) for program in lower(plan)]


def all_opened(programs: Programs) -> list[Communicator]:
    used = {communicator_of(a, rank) for rank, program in enumerate(programs) for a in program}
    return sorted(communicator for communicator in used if communicator is not None)


class Streams:
    """GPUs that have been given all actions: a queue of computations, and one a communicator.

    What a communicator carries starts when it is the head of its queue on all its ranks and the
    computations issued before it have ended; it matches by order alone. A computation starts when
    it is the head and its input is there.
    """

    def __init__(self, programs: Programs, stages: int) -> None:
        self.stages = stages
        self.queues: dict[tuple[object, int], list[tuple[Action, int]]] = defaultdict(list)
        self.held: list[set[Operation]] = [set() for _ in programs]
        self.computed = [0 for _ in programs]
        self.right = True
        for rank, program in enumerate(programs):
            issued, made = 0, set()
            for action in program:
                if isinstance(action, Compute):
                    made.add(message_of(action.operation))
                elif isinstance(action, Message) and action.direction == "send":
                    self.right &= action.operation in made
                self.queues[communicator_of(action, rank), rank].append((action, issued))
                issued += isinstance(action, Compute)

    def ends(self) -> bool:
        """Whether all is done in the end, and every message is what its receiver expected."""
        while any(self.advance(place, rank) for place, rank in list(self.queues)):
            pass
        return self.right and not any(self.queues.values())

    def advance(self, place: object, rank: int) -> bool:
        queue = self.queues[place, rank]
        if not queue:
            return False
        return self.compute(rank, queue) if place is None else self.carry(place, rank)

    def compute(self, rank: int, queue: list[tuple[Action, int]]) -> bool:
        action = queue[0][0]
        assert isinstance(action, Compute)
        stage, kind, microbatch = action.operation
        if kind == "F" and stage > 0:
            needed = Operation(stage - 1, "F", microbatch)
        elif kind in "BI" and stage < self.stages - 1:
            needed = Operation(stage + 1, "B", microbatch)
        else:
            needed = None
        if needed is not None and needed not in self.held[rank]:
            return False
        queue.pop(0)
        self.computed[rank] += 1
        self.held[rank].add(message_of(action.operation))
        return True

    def carry(self, communicator: object, rank: int) -> bool:
        assert isinstance(communicator, Communicator)
        rows = [self.queues[communicator, member] for member in communicator.ranks]
        if not all(
            row and self.computed[member] >= row[0][1]
            for row, member in zip(rows, communicator.ranks, strict=True)
        ):
            return False
        first, *others = [row.pop(0)[0] for row in rows]
        if isinstance(first, Message):
            other = others[0]
            assert isinstance(other, Message)
            self.right &= first.operation == other.operation
            self.held[communicator.ranks[1]].add(first.operation)
        else:
            self.right &= all(other == first for other in others)
        return True


@given(plans())
def test_all_plans_pass_from_the_plan_alone_and_as_they_are_lowered(plan: Plan) -> None:
    programs = copied(plan)
    assert issue_problems(programs, len(plan.stages), all_opened(programs)) == []
    assert Streams(programs, len(plan.stages)).ends()
    assert [p for p in verify(plan) if p.startswith("orders")] == []


@given(plan=plans(), seed=st.integers(0, 2**32))
def test_a_corrupted_order_is_refused_if_and_only_if_it_hangs_or_mixes_messages_up(
    plan: Plan, seed: int
) -> None:
    programs = copied(plan)
    corrupt(programs, random.Random(seed))
    # What is over with a receive is a promise about memory, of which streams know nothing.
    bare = [[replace(a, arrived=()) if isinstance(a, Message) else a for a in p] for p in programs]
    found = issue_problems(bare, len(plan.stages), all_opened(bare))
    assert bool(found) != Streams(bare, len(plan.stages)).ends()


def corrupt(programs: Programs, rng: random.Random) -> None:
    """Move, drop or repeat an action of some rank, a few times."""
    for _ in range(rng.randint(1, 3)):
        program = rng.choice([program for program in programs if program])
        action = program.pop(rng.randrange(len(program)))
        what = rng.choice(["move", "move", "swap", "drop"])
        if what == "drop" and isinstance(action, Message):
            continue
        program.insert(rng.randint(0, len(program)), action)


def looped(microbatches: int = 2) -> Plan:
    """Three ranks with two stages each, the plan that hung under NCCL before all was opened."""
    pipeline = chain([[device] for device in DEVICES[:3] * 2], [1] * 6, microbatches)
    return scheduled(pipeline)


def positions(program: Sequence[Action], wanted: Callable[[Any], bool]) -> list[int]:
    return [place for place, action in enumerate(program) if wanted(action)]


def is_receive(action: Any) -> bool:
    return isinstance(action, Message) and action.direction == "receive"


def test_two_ends_that_disagree_are_named_with_what_each_issues() -> None:
    plan = looped()
    programs = copied(plan)
    source = next(a.peer for a in programs[1] if is_receive(a))
    first, second = positions(programs[1], lambda a: is_receive(a) and a.peer == source)[:2]
    programs[1][first], programs[1][second] = programs[1][second], programs[1][first]
    (problem, *_) = issue_problems(programs, 6, all_opened(programs))
    assert problem == ("messages from rank 0 to rank 1, number 1: rank 0 issues 0F0, rank 1 0F1")


def test_first_uses_wait_for_each_other_unless_all_is_opened_before() -> None:
    """Receives ahead of sends to other ranks hung at NCCL's first step."""
    f0, f1, f2, f3 = (Operation(stage, "F", 0) for stage in range(4))
    programs: Programs = [
        [Compute(f0), Message("receive", f2, 2), Message("send", f0, 1), Compute(f3)],
        [Message("receive", f0, 0), Compute(f1), Message("send", f1, 2)],
        [Message("receive", f1, 1), Compute(f2), Message("send", f2, 0)],
    ]
    (problem,) = issue_problems(programs, 4)
    assert problem == (
        "communicators that are first used in the iteration wait for each other: "
        "rank 0 waits in messages from rank 2 to rank 0 with 2F0; "
        "rank 1 waits in messages from rank 0 to rank 1 with 0F0; "
        "rank 2 waits in messages from rank 1 to rank 2 with 1F0"
    )
    assert issue_problems(programs, 4, all_opened(programs)) == []


def test_a_circle_of_waits_is_named() -> None:
    """Each rank computes first what needs the other's result."""
    f0, f1, g0, g1 = (Operation(s, "F", m) for m in range(2) for s in range(2))
    b1, c0 = Operation(1, "B", 1), Operation(0, "B", 1)
    receives = [Message("receive", f0, 0), Message("receive", g0, 0)]
    sends: list[Action] = [Message("send", f0, 1), Message("send", g0, 1)]
    programs: Programs = [
        [Compute(f0), Message("receive", b1, 1), Compute(c0), Compute(g0), *sends],
        [*receives, Compute(f1), Compute(g1), Compute(b1), Message("send", b1, 0)],
    ]
    with pytest.raises(PipeplanError) as caught:
        require_issuable(programs, 2, all_opened(programs))
    (problem,) = caught.value.problems
    assert problem.startswith("in a circle: ")
    assert "0B1 on rank 0" in problem
    assert "1B1 in messages from rank 1 to rank 0" in problem


def test_reductions_in_another_order_on_one_rank_are_named() -> None:
    first, second = Reduce((0,), (0, 1)), Reduce((1,), (0, 1))
    (problem,) = issue_problems([[first, second], [second, first]], 2)
    assert problem == (
        "reductions of ranks 0, 1, number 1: rank 0 issues the reduction of stages 0, rank 1 the "
        "reduction of stages 1"
    )


def test_a_message_said_to_be_over_too_soon_is_a_circle() -> None:
    programs = copied(looped())
    place = positions(programs[0], lambda a: is_receive(a) and a.operation == Operation(2, "F", 0))
    receive = programs[0][place[0]]
    assert isinstance(receive, Message)
    # Rank 0 sends the gradients of stage 3 to rank 2 long after it has used what this brings.
    programs[0][place[0]] = replace(receive, arrived=(Operation(3, "B", 0),))
    found = issue_problems(programs, 6, all_opened(programs))
    assert any(problem.startswith("in a circle") for problem in found)


def test_members_of_a_group_that_compute_in_another_order_are_named() -> None:
    """Each computation has collectives inside, which the members come to together."""
    first, second = (Compute(Operation(0, "F", microbatch)) for microbatch in range(2))
    group = Communicator("members", (0, 1))
    members = {0: group.ranks, 1: group.ranks}
    (problem,) = issue_problems([[first, second], [second, first]], 1, [group], members)
    assert problem == ("computations of ranks 0, 1, number 1: rank 0 issues 0F0, rank 1 0F1")


def test_members_run_the_same_and_talk_to_those_of_their_place() -> None:
    plan = on_groups("gpt_tiny", [5], ["g0", "g1"], scheduled, microbatches=2)
    programs = lower(plan)
    assert len(programs) == 4
    for rank, program in enumerate(programs):
        peers = {action.peer for action in program if isinstance(action, Message)}
        assert peers == {(rank + 2) % 4}
    assert [a for a in programs[0] if isinstance(a, Compute)] == [
        a for a in programs[1] if isinstance(a, Compute)
    ]
    (tied,) = {a for a in programs[1] if isinstance(a, Reduce)}
    assert tied.ranks == (1, 3)
