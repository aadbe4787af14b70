"""Lowered programs: every message has two ends, in one order, and nobody waits for ever.

Gradients are reduced once they are whole, in one order on all ranks.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from builders import graph, layer, parameter, star
from executor_plans import DEVICES, random_orders, random_owners
from hypothesis import given
from hypothesis import strategies as st

from executor.runtime.lowering import lower
from executor.sync.shared_parameters import shared_parameters
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.programs import Action, Compute, Message, Reduce
from planner.schedules.assignment import balanced_assignment
from planner.schedules.whole import one_forward_one_backward


def chain(places: Sequence[Sequence[str]], times: Sequence[int], count: int) -> PlacedPipeline:
    """A layer a stage, with the given seconds; times of zero make all sorts of ties.

    Each layer has a parameter of its own, and the first and the last share one.
    """
    names = [[f"p{i}", *(["tied"] if i in (0, len(times) - 1) else [])] for i in range(len(times))]
    rows = [
        layer(f"l{i}", forward_s=t, backward_s=2 * t, parameters=names[i])
        for i, t in enumerate(times)
    ]
    parameters = [parameter(name) for name in sorted({n for held in names for n in held})]
    job = Job(microbatches=count, optimizer="sgd", max_stages_per_device=16)
    stages = [StageSpec((f"l{i}",), tuple(place)) for i, place in enumerate(places)]
    return place(Problem(graph(rows, parameters=parameters), star(4), job), stages)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Replicas, several stages a device, split backwards, any order that does not deadlock."""
    count = draw(st.integers(1, 6))
    places = draw(
        st.lists(
            st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3, unique=True),
            min_size=count,
            max_size=count,
        )
    )
    times = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    pipeline = chain(places, times, draw(st.integers(1, 6)))
    rng = random.Random(draw(st.integers(0, 2**32)))
    owners = random_owners(pipeline, rng)
    split = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return plan_by_hand(pipeline, random_orders(pipeline, owners, rng, split))


def needs(plan: Plan, operation: Operation) -> Operation | None:
    """The name of the result that an operation takes from the neighbouring stage."""
    stage, kind, microbatch = operation
    if kind == "W":
        return None
    stage += -1 if kind == "F" else 1
    there = 0 <= stage < len(plan.stages)
    return Operation(stage, "F" if kind == "F" else "B", microbatch) if there else None


def made(operation: Operation) -> Operation:
    """The name of the result that an operation makes."""
    return operation._replace(kind="B") if operation.kind == "I" else operation


def messages(program: Sequence[Action], direction: str, peer: int) -> list[Operation]:
    return [
        action.operation
        for action in program
        if isinstance(action, Message) and (action.direction, action.peer) == (direction, peer)
    ]


@given(plans())
def test_a_rank_computes_what_the_plan_says_in_its_order(plan: Plan) -> None:
    for device, program in zip(plan.ranks, lower(plan), strict=True):
        computed = [action.operation for action in program if isinstance(action, Compute)]
        assert computed == list(plan.parsed_orders()[device])


@given(plans())
def test_messages_between_two_ranks_are_sent_and_received_in_one_order(plan: Plan) -> None:
    programs = lower(plan)
    for source, sender in enumerate(programs):
        for target, receiver in enumerate(programs):
            sent = messages(sender, "send", target)
            assert sent == messages(receiver, "receive", source)
            assert not sent or source != target


@given(plans())
def test_every_result_that_changes_ranks_is_sent_once_to_who_needs_it(plan: Plan) -> None:
    rank_of = {op: rank for rank, d in enumerate(plan.ranks) for op in plan.parsed_orders()[d]}
    maker = {made(operation): rank for operation, rank in rank_of.items()}
    expected = Counter(
        (maker[source], rank, source)
        for operation, rank in rank_of.items()
        if (source := needs(plan, operation)) is not None and maker[source] != rank
    )
    found = Counter(
        (rank, action.peer, action.operation)
        for rank, program in enumerate(lower(plan))
        for action in program
        if isinstance(action, Message) and action.direction == "send"
    )
    assert found == expected


@given(plans())
def test_reductions_are_those_of_the_shared_parameters_in_one_order_on_all_ranks(
    plan: Plan,
) -> None:
    found = [[a for a in program if isinstance(a, Reduce)] for program in lower(plan)]
    expected = {row.reduce for row in shared_parameters(plan)}
    for rank, reductions in enumerate(found):
        assert len(set(reductions)) == len(reductions)
        assert set(reductions) == {reduce for reduce in expected if rank in reduce.ranks}
    for first, second in combinations(found, 2):
        both = set(first) & set(second)
        assert [r for r in first if r in both] == [r for r in second if r in both]


@given(plans())
def test_gradients_are_reduced_after_the_last_backward_that_adds_to_them(plan: Plan) -> None:
    for program in lower(plan):
        reduced: set[int] = set()
        for action in program:
            if isinstance(action, Reduce):
                reduced.update(action.stages)
            elif isinstance(action, Compute) and action.operation.kind in "BW":
                assert action.operation.stage not in reduced


def sends_and_ends(plan: Plan, program: Sequence[Action]) -> Iterator[Message]:
    """Messages as they leave, and as those that came are waited for by who needs them."""
    posted: dict[Operation, Message] = {}
    for action in program:
        if isinstance(action, Message) and action.direction == "send":
            yield action
        elif isinstance(action, Message):
            posted[action.operation] = action
        elif isinstance(action, Compute):
            needed = needs(plan, action.operation)
            if needed in posted:
                yield posted.pop(needed)
    assert not posted


@given(plans())
def test_a_receive_that_ended_releases_earlier_sends_to_the_same_rank_once(plan: Plan) -> None:
    for program in lower(plan):
        under_way: dict[int, set[Operation]] = defaultdict(set)
        for message in sends_and_ends(plan, program):
            if message.direction == "send":
                under_way[message.peer].add(message.operation)
            else:
                assert under_way[message.peer].issuperset(message.arrived)
                assert len(set(message.arrived)) == len(message.arrived)
                under_way[message.peer].difference_update(message.arrived)


def test_few_sends_are_under_way_at_a_time_whatever_the_number_of_microbatches() -> None:
    pipeline = chain([[device] for device in DEVICES], [1, 1, 1, 1], 40)
    orders = one_forward_one_backward(pipeline, balanced_assignment(pipeline))
    plan = plan_by_hand(pipeline, orders)
    for program in lower(plan):
        under_way: set[Operation] = set()
        most = 0
        for message in sends_and_ends(plan, program):
            if message.direction == "send":
                under_way.add(message.operation)
                most = max(most, len(under_way))
            else:
                under_way.difference_update(message.arrived)
        assert most <= 8


def test_receives_are_posted_ahead_of_two_operations_and_not_more() -> None:
    pipeline = chain([[device] for device in DEVICES], [1, 1, 1, 1], 8)
    orders = one_forward_one_backward(pipeline, balanced_assignment(pipeline))
    plan = plan_by_hand(pipeline, orders)
    for late, early in zip(lower(plan, lead=0), lower(plan), strict=True):
        for message in (m for m in late if isinstance(m, Message) and m.direction == "receive"):
            assert 0 <= computes_before(late, message) - computes_before(early, message) <= 2


@given(plans())
def test_over_gloo_receives_pass_sends_and_each_direction_keeps_its_order(plan: Plan) -> None:
    for strict, loose in zip(lower(plan), lower(plan, in_one_order=False), strict=True):
        assert Counter(strict) == Counter(loose)
        for direction in ("send", "receive"):
            for peer in range(len(plan.ranks)):
                assert messages(strict, direction, peer) == messages(loose, direction, peer)
        computed = [[a for a in row if isinstance(a, Compute)] for row in (strict, loose)]
        assert computed[0] == computed[1]
        for message in (m for m in strict if isinstance(m, Message)):
            earlier = computes_before(strict, message) - computes_before(loose, message)
            assert earlier >= 0 if message.direction == "receive" else earlier == 0


def test_a_receive_is_posted_before_what_is_sent_the_same_way() -> None:
    """The word that it is posted goes to the sender behind what is sent there before."""
    pipeline = chain([[device] for device in DEVICES[:2]], [1, 1], 8)
    orders = one_forward_one_backward(pipeline, balanced_assignment(pipeline))
    last = lower(plan_by_hand(pipeline, orders), in_one_order=False)[1]
    posted = [last.index(m) for m in last if isinstance(m, Message) and m.direction == "receive"]
    sent = [last.index(m) for m in last if isinstance(m, Message) and m.direction == "send"]
    assert len(posted) == len(sent) == 8
    # The receive of microbatch m + 1 stands before the gradients of microbatch m.
    assert all(receive < send for receive, send in zip(posted[1:], sent, strict=False))


def computes_before(program: Sequence[Action], message: Message) -> int:
    return sum(isinstance(action, Compute) for action in program[: program.index(message)])
