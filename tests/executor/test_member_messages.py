"""Messages between members of groups of several sizes, against chunks of whole tensors."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from executor.runtime.member_messages import MemberMessages, Shared, joined
from executor.runtime.worker import TensorSpec
from planner.plan.operations import Operation
from planner.plan.plan import RankPlace
from planner.plan.programs import pairs_of_members

MADE = Operation(0, "F", 0)
SIZES = [*product((1, 2, 3, 4, 6), repeat=2)]


def places(sizes: Sequence[int]) -> list[RankPlace]:
    return [
        RankPlace(f"g{number}", member, size)
        for number, size in enumerate(sizes)
        for member in range(size)
    ]


def plan_of(sizes: Sequence[int], *, sequence: bool) -> SimpleNamespace:
    """What is asked of a plan with two groups."""
    ranks = {"g0": range(sizes[0]), "g1": range(sizes[0], sum(sizes))}
    return SimpleNamespace(
        ranks_of=ranks.__getitem__, tensor_parallel=SimpleNamespace(sequence=sequence)
    )


def held(tensor: Tensor, dimension: int | None, place: RankPlace) -> Tensor:
    if dimension is None:
        return tensor
    return tensor.chunk(place.members, dimension)[place.member]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("sequence", [False, True])
def test_members_receive_what_they_need(sizes: tuple[int, int], sequence: bool) -> None:
    """A whole tensor, one shared by positions and, last, one of no boundary, a random state."""
    torch.manual_seed(0)
    tensors = [torch.randn(5, 2), torch.randn(2, 12, 3), torch.arange(7)]
    where = places(sizes)
    # Single devices have whole tensors.
    rows = [(None, 1 if sequence and size > 1 else None) for size in sizes]
    pairs = pairs_of_members(plan_of(sizes, sequence=sequence), "g0", "g1")  # type: ignore[arg-type]
    arrived: dict[int, list] = {}
    for source, target in pairs:
        sender = MemberMessages(where[source], where, {(0, "F"): Shared(*rows)})
        receiver = MemberMessages(where[target], where, {(0, "F"): Shared(*rows[::-1])})
        own = [held(t, d, where[source]) for t, d in zip(tensors, (*rows[0], None), strict=True)]
        sent = sender.sent(MADE, own, target)
        needed = [held(t, d, where[target]) for t, d in zip(tensors, (*rows[1], None), strict=True)]
        specs = [TensorSpec(tuple(t.shape), t.dtype) for t in needed]
        expected = receiver.expected(MADE, specs, source)
        assert [tuple(t.shape) for t in sent] == [spec.shape for _, spec in expected]
        parts = [part for part, _ in expected]
        arrived.setdefault(target, []).extend(zip(parts, sent, strict=True))
    assert sorted(arrived) == list(range(sizes[0], sum(sizes)))
    for target, parts in arrived.items():
        found = joined(parts)
        for tensor, dimension, got in zip(tensors, (*rows[1], None), found, strict=True):
            assert torch.equal(got, held(tensor, dimension, where[target]))
