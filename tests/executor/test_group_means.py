"""Means over a group: taken together, or given up as soon as the coordinator gives a member up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from executor.coordinator.client import GroupAssignment
from executor.elastic.process_groups import DynamicGroups

HOUR_S = 3600.0
BOTH = GroupAssignment(1, ((0, 1), (1, 1)), 0)


class Meeting:
    """The store where members meet, and who takes part.

    Attributes:
        there: incarnations of the pipelines that take part, by number.
    """

    def __init__(self) -> None:
        self.store = HashStore()
        self.there = {0: 1, 1: 1}


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def nothing() -> None:
    """What most tests do before a reduction."""


def of_pipeline(
    meeting: Meeting, number: int, before_reduction: Callable[[], object] = nothing
) -> DynamicGroups:
    """Groups that would wait for an hour."""
    return DynamicGroups(
        lambda: meeting.store,
        lambda: meeting.there,
        *(number, 0, "127.0.0.1", HOUR_S, before_reduction),
    )


def test_members_take_the_mean_together(meeting: Meeting) -> None:
    tensors = [torch.full((5,), 2.0), torch.full((5,), 4.0)]
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(of_pipeline(meeting, number).mean, BOTH, [tensor])
            for number, tensor in enumerate(tensors)
        ]
        assert [one.result(timeout=600) for one in found] == [True, True]
    assert all(tensor.eq(3.0).all() for tensor in tensors)


def test_a_member_that_never_came_is_not_waited_for_once_it_is_given_up(meeting: Meeting) -> None:
    meeting.there = {0: 1, 1: 2}  # Another incarnation of it is there.
    tensor = torch.ones(5)
    assert not of_pipeline(meeting, 0).mean(BOTH, [tensor])
    assert tensor.eq(1.0).all()


def test_a_member_that_ends_before_it_connects_is_not_waited_for(meeting: Meeting) -> None:
    # It came to the meeting, and is given up; gloo would wait for its address for an hour.
    PrefixStore("group/0/0.1,1.1/0", meeting.store).set("at/1", "")
    meeting.there = {0: 1}
    tensor = torch.ones(5)
    assert not of_pipeline(meeting, 0).mean(BOTH, [tensor])
    assert tensor.eq(1.0).all()


def test_a_member_that_stops_within_is_not_waited_for_once_it_is_given_up(meeting: Meeting) -> None:
    # The other one meets, and is given up as the reduction begins without it.
    groups = of_pipeline(meeting, 0, lambda: meeting.there.pop(1))
    other = of_pipeline(meeting, 1)
    tensor = torch.ones(5)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(other._group_of, BOTH)
        assert not groups.mean(BOTH, [tensor])
        assert tensor.eq(1.0).all()
        met.result(timeout=600)
    # Its connections close, and with them ends the reduction that nobody waits for.
    del met
    other._made.clear()
