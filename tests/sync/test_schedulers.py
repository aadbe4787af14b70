"""Making a scheduler, and what its driver gets wrong."""

import pytest

from planner.errors import PipeplanError
from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Event, Finished, GroupRequest, Joined, Left
from planner.sync.strategies import (
    AdPsgdOptions,
    AllReduceOptions,
    Options,
    PartialAllReduceOptions,
    SemiDecentralizedOptions,
)


@pytest.mark.parametrize("options", [AllReduceOptions(), AdPsgdOptions()])
def test_a_strategy_without_groups_has_no_scheduler(options: Options) -> None:
    with pytest.raises(PipeplanError, match="schedules no groups; use partial_all_reduce"):
        scheduler_of(options, 2, 1)


def test_every_wrong_number_is_named() -> None:
    with pytest.raises(PipeplanError) as error:
        scheduler_of(PartialAllReduceOptions(), 0, -1, 0)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "workers",
        "keys",
        "pipelines_per_node",
    ]


def test_groups_larger_than_all_are_of_all() -> None:
    scheduler = scheduler_of(PartialAllReduceOptions(group_size=9), 2, 1)
    assert scheduler.handle(GroupRequest(0, 0, 1), 0) == []
    (group,) = scheduler.handle(GroupRequest(1, 0, 1), 0)
    assert group.members == (0, 1)
    scheduler = scheduler_of(SemiDecentralizedOptions(most_members=9), 2, 1)
    assert scheduler.handle(GroupRequest(0, 0, 1), 0) == []
    assert len(scheduler.handle(GroupRequest(1, 0, 1), 0)) == 1


def test_an_iteration_that_was_left_out_is_an_error() -> None:
    scheduler = scheduler_of(SemiDecentralizedOptions(), 2, 1)
    with pytest.raises(PipeplanError, match="worker 1 asks at key 0 for iteration 2, where it"):
        scheduler.handle(GroupRequest(1, 0, 2), 0)
    scheduler.handle(Joined(1, 2), 0)
    assert scheduler.handle(GroupRequest(1, 0, 2), 0) == []
    with pytest.raises(PipeplanError, match="worker 1 asks at key 0 for iteration 3, where it"):
        scheduler.handle(GroupRequest(1, 0, 3), 0)
    assert len(scheduler.handle(GroupRequest(0, 0, 1), 0)) == 1


def test_who_has_left_is_not_answered_and_may_leave_again() -> None:
    scheduler = scheduler_of(SemiDecentralizedOptions(), 2, 1)
    assert scheduler.handle(Left(1), 0) == []
    assert scheduler.handle(Left(1), 0) == []
    assert scheduler.handle(GroupRequest(1, 0, 1), 0) == []
    assert scheduler.handle(Finished(1, 7), 0) == []
    assert len(scheduler.handle(GroupRequest(0, 0, 1), 0)) == 1


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (GroupRequest(2, 0, 1), "worker: 2 is not one of 0 to 1"),
        (GroupRequest(-1, 0, 1), "worker: -1 is not"),
        (GroupRequest(0, 3, 1), "key: 3 is not one of 0 to 2"),
        (Joined(2, 1), "worker: 2 is not"),
    ],
)
def test_who_or_what_does_not_exist_is_an_error(event: Event, message: str) -> None:
    scheduler = scheduler_of(SemiDecentralizedOptions(), 2, 3)
    with pytest.raises(PipeplanError, match=message):
        scheduler.handle(event, 0)
