"""What is announced when, and in which order buckets are launched."""

import pytest
import torch
from executor_plans import scheduled, zoo_pipeline
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from executor.sync.all_reduce import InOrder
from executor.sync.gradients import (
    MIB,
    BucketSum,
    GradientReadiness,
    SharedGradients,
    buckets_of,
    last_backwards,
)
from executor.sync.shared_parameters import shared_parameters
from planner.costs.placement import place_plan
from planner.errors import PipeplanError
from planner.plan.operations import Operation, parse_order
from planner.plan.plan import Sync
from planner.plan.programs import Reduce

LAST = Operation(0, "B", 1)
SHARED = [
    SharedGradients(
        Reduce((stage,), ranks),
        {f"{stage}.{k}": nn.Parameter(torch.zeros(k + 1)) for k in range(count)},
    )
    for stage, ranks, count in ((2, (0, 1), 5), (1, (0, 2), 3), (0, (0, 1), 4))
]


def test_the_last_backward_of_a_parameter_is_that_of_all_its_stages() -> None:
    order = parse_order("0F0 1F0 1B0 0B0 0F1 1F1 1I1 0B1 1W1", "orders")
    users = {"both": (0, 1), "first": (0,), "second": (1,), "elsewhere": (2,)}
    found = last_backwards(order, users)
    assert {str(op): names for op, names in found.items()} == {
        "1W1": ["both", "second"],
        "0B1": ["first"],
    }


def test_a_gradient_is_announced_with_its_last_part_from_the_second_iteration_on() -> None:
    told: list[str] = []
    weight, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    readiness = GradientReadiness({"weight": weight, "idle": idle}, {LAST: ["weight"]}, told.append)

    def iteration(parts: int) -> list[str]:
        seen = []
        readiness.begin_iteration()
        (weight * 3).sum().backward()  # Of another operation.
        readiness.before(LAST)
        for part in range(parts):
            ((weight * 2).sum() + weight.sum()).backward()  # Two uses are one part.
            seen.append(f"{part}: {told}")
        readiness.after(LAST)
        told.append("end")
        seen.append(str(told))
        told.clear()
        return seen

    assert iteration(2) == ["0: ['idle']", "1: ['idle']", "['idle', 'weight', 'end']"]
    assert iteration(2) == [
        "0: ['idle']",
        "1: ['idle', 'weight']",
        "['idle', 'weight', 'end']",
    ]
    assert iteration(1)[-1] == "['idle', 'weight', 'end']"
    with pytest.raises(PipeplanError, match="gradient of 'weight' came in more parts"):
        iteration(3)


@given(st.permutations([name for row in SHARED for name in row.parameters]), st.booleans())
def test_buckets_are_launched_in_order_and_when_they_are_complete(
    names: list[str], fused: bool
) -> None:
    buckets = buckets_of(SHARED, 16 / MIB, over_reductions=fused)
    launched: list[int] = []
    order = InOrder(buckets, launched.append)
    order.begin()
    for count, name in enumerate(names, 1):
        order.ready(name)
        there = set(names[:count])
        complete = [set(bucket.parameters) <= there for bucket in buckets]
        assert launched == list(range([*complete, False].index(False)))
    assert len(launched) == len(buckets)


@given(st.permutations(SHARED), st.booleans())
def test_a_reduction_that_is_over_completes_its_own_gradients_alone(
    rows: list[SharedGradients], fused: bool
) -> None:
    """A bucket of several reductions waits for all of them."""
    buckets = buckets_of(SHARED, 1, over_reductions=fused)
    launched: list[int] = []
    order = InOrder(buckets, launched.append)
    order.begin()
    there: set[str] = set()
    for row in rows:
        order.over(row.reduce)
        there |= row.parameters.keys()
        complete = [set(bucket.parameters) <= there for bucket in buckets]
        assert launched == list(range([*complete, False].index(False)))


def test_buckets_hold_every_gradient_once_and_are_in_one_order_on_all_ranks() -> None:
    for fused in (False, True):
        whole = buckets_of(SHARED, 16 / MIB, over_reductions=fused)
        names = [name for bucket in whole for name in bucket.parameters]
        assert sorted(names) == sorted(n for row in SHARED for n in row.parameters)
        for rank in (1, 2):
            held = [row for row in SHARED if rank in row.reduce.ranks]
            own = buckets_of(held, 16 / MIB, over_reductions=fused)
            mine = [list(bucket.parameters) for bucket in own]
            assert mine == [list(b.parameters) for b in whole if rank in b.ranks]
    buckets = buckets_of(SHARED, 1, over_reductions=True)
    assert [tuple(bucket.reduces) for bucket in buckets] == [
        (SHARED[1].reduce,),
        (SHARED[0].reduce, SHARED[2].reduce),
    ]


@pytest.mark.parametrize("mib", [1e-6, 0.02, 0.1, 25])
def test_buckets_are_those_of_the_cost_model(mib: float) -> None:
    """Of stages with replicas, in the order in which they are filled."""
    pipeline = zoo_pipeline("gpt_tiny", [2, 4], ["d0 d1", "d2 d3", "d0"], 4)
    plan = scheduled(pipeline).model_copy(update={"sync": Sync(options={"bucket_mib": mib})})
    elements = {row.name: row.elements for row in plan.model.graph.parameters}
    shared = [
        SharedGradients(
            row.reduce, {name: nn.Parameter(torch.zeros(elements[name])) for name in row.names}
        )
        for row in shared_parameters(plan)
        if len(row.stages) == 1
    ]
    found = [
        (reduce.stages, sum(4 * p.numel() for p in bucket.parameters.values()))
        for bucket in buckets_of(shared, mib)
        for reduce in bucket.reduces
    ]
    wanted = place_plan(plan).synchronisations
    assert found == [(row.stages, row.bytes) for row in wanted if len(row.stages) == 1]
    assert len(found) > 2 or mib == 25


def test_gradients_are_views_of_a_flat_buffer_filled_up_with_zeros() -> None:
    (bucket,) = buckets_of(SHARED[:1], 1)
    buffer = BucketSum(bucket, None, multiple=4)
    assert buffer.flat.tolist() == [0.0] * 16
    buffer.attach()
    for number, parameter in enumerate(bucket.parameters.values()):
        assert parameter.grad is not None
        parameter.grad += number + 1
    assert buffer.flat.tolist() == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 0]
