"""Ripples' static schedule, by the figure of the paper and by what must hold for any nodes."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Finished, GroupRequest, Joined, Left
from planner.sync.groups.levels import nodes_of
from planner.sync.groups.ripples import PERIOD, static_groups
from planner.sync.strategies import PartialAllReduceOptions

STATIC = PartialAllReduceOptions(schedule="static", pipelines_per_node=4)
partitions = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(
    lambda sizes: tuple(
        tuple(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))
    )
)


def test_four_nodes_of_four_as_in_the_paper() -> None:
    """The figure of Luo et al. 2019 that shows the schedule of 16 workers on 4 nodes."""
    nodes = nodes_of(16, 4)
    whole = {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)}
    first = {(2, 3), (6, 7), (10, 11), (14, 15), (1,), (5,), (9,), (13,), (0, 4, 8, 12)}
    third = {(0, 3), (4, 7), (8, 11), (12, 15), (2,), (6,), (10,), (14,), (1, 5, 9, 13)}
    groups = [set(static_groups(nodes, iteration)) for iteration in range(1, 6)]
    assert groups == [first, whole, third, whole, first]


@given(partitions, st.integers(1, 20))
def test_everyone_is_in_exactly_one_group_an_iteration(
    nodes: tuple[tuple[int, ...], ...], iteration: int
) -> None:
    members = [worker for group in static_groups(nodes, iteration) for worker in group]
    assert sorted(members) == [worker for node in nodes for worker in node]


def connected(groups: list[tuple[int, ...]]) -> bool:
    graph = nx.Graph()
    for group in groups:
        nx.add_path(graph, group)
    return bool(nx.is_connected(graph))


@given(partitions, st.integers(1, 20))
def test_the_groups_of_any_period_connect_everyone(
    nodes: tuple[tuple[int, ...], ...], first: int
) -> None:
    period = [group for shift in range(PERIOD) for group in static_groups(nodes, first + shift)]
    assert connected(period)


@given(st.integers(1, 40), st.none() | st.integers(1, 40))
def test_nodes_hold_everyone_once(workers: int, per_node: int | None) -> None:
    nodes = nodes_of(workers, per_node)
    assert [worker for node in nodes for worker in node] == list(range(workers))
    assert connected([group for i in range(PERIOD) for group in static_groups(nodes, i + 1)])


@pytest.mark.parametrize(
    ("workers", "per_node", "sizes"),
    [(8, 4, [4, 4]), (10, 4, [4, 4, 2]), (4, 4, [2, 2]), (9, 9, [4, 4, 1]), (9, None, [4, 4, 1])],
)
def test_nodes_that_tell_nothing_are_made_up(
    workers: int, per_node: int | None, sizes: list[int]
) -> None:
    assert [len(node) for node in nodes_of(workers, per_node)] == sizes


def test_who_returns_behind_the_others_is_waited_for_from_its_iteration_on() -> None:
    scheduler = scheduler_of(PartialAllReduceOptions(schedule="static"), 2, 1)
    scheduler.handle(Left(1), 0)
    for iteration in (1, 2, 3):
        (group,) = scheduler.handle(GroupRequest(0, 0, iteration), 0)
        assert group.members == (0,)
    scheduler.handle(Joined(1, 3), 0)
    assert scheduler.handle(GroupRequest(0, 0, 4), 0) == []
    (alone,) = scheduler.handle(GroupRequest(1, 0, 3), 0)
    assert alone.members == (1,)
    (pair,) = scheduler.handle(GroupRequest(1, 0, 4), 0)
    assert (pair.members, pair.iterations) == ((0, 1), (4, 4))


def test_who_returns_ahead_waits_and_holds_up_nobody() -> None:
    scheduler = scheduler_of(PartialAllReduceOptions(schedule="static"), 2, 1)
    scheduler.handle(Left(1), 0)
    scheduler.handle(Joined(1, 4), 0)
    assert scheduler.handle(GroupRequest(1, 0, 4), 0) == []
    members = [
        [group.members for group in scheduler.handle(GroupRequest(0, 0, iteration), 0)]
        for iteration in (1, 2, 3, 4)
    ]
    assert members == [[(0,)], [(0,)], [(0,)], [(0, 1)]]


def test_who_joins_while_its_group_gathers_is_one_more_to_wait_for() -> None:
    scheduler = scheduler_of(STATIC, 8, 1)
    for worker in (0, 1, 2, 4):
        scheduler.handle(GroupRequest(worker, 0, 1), 0)
    scheduler.handle(Finished(0, 1), 0)
    scheduler.handle(Left(3), 0)
    assert scheduler.handle(GroupRequest(1, 0, 2), 0) == []
    scheduler.handle(Joined(3, 2), 0)
    assert scheduler.handle(GroupRequest(3, 0, 2), 0) == []
    assert scheduler.handle(GroupRequest(0, 0, 2), 0) == []
    (group,) = scheduler.handle(GroupRequest(2, 0, 2), 0)
    assert group.members == (0, 1, 2, 3)
