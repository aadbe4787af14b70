"""SDPipe's groups of those who are ready: waits, deadlines and the guarantee."""

from dataclasses import replace

import networkx as nx
import pytest
from group_world import Setting, readiness_options, run, settings_of
from hypothesis import given
from hypothesis import strategies as st

from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Finished, GroupRequest, Joined, Left, Tick
from planner.sync.groups.readiness import SyncGraph
from planner.sync.groups.scheduler import Scheduler
from planner.sync.strategies import SemiDecentralizedOptions

PLAIN = SemiDecentralizedOptions(
    first_wait_s=1, least_wait_s=0.5, most_wait_s=4, guarantee_period=None
)
GUARANTEED = PLAIN.model_copy(update={"guarantee_period": 1})


def ask(
    scheduler: Scheduler, worker: int, iteration: int, now_s: float = 0, key: int = 0
) -> list[tuple[int, ...]]:
    return [g.members for g in scheduler.handle(GroupRequest(worker, key, iteration), now_s)]


def alone(scheduler: Scheduler, worker: int, iteration: int, key: int = 0) -> None:
    """A worker asks and goes on by itself, once its deadline has come."""
    assert ask(scheduler, worker, iteration, key=key) == []
    assert scheduler.deadline_s is not None
    (group,) = scheduler.handle(Tick(), scheduler.deadline_s)
    assert group.members == (worker,)


@given(settings_of(), readiness_options())
def test_without_a_guarantee_nobody_waits_beyond_the_deadline(
    setting: Setting, options: SemiDecentralizedOptions
) -> None:
    world = run(setting, options.model_copy(update={"guarantee_period": None}))
    most_s = options.most_wait_s + 1e-9  # Moments are added and subtracted.
    assert all(waited_s <= most_s for waited_s in world.answers.values())


@given(settings_of(fates=False), readiness_options(), st.integers(1, 3))
def test_groups_connect_everyone_within_the_bound(
    setting: Setting, options: SemiDecentralizedOptions, period: int
) -> None:
    setting = replace(setting, iterations=30)
    world = run(setting, options.model_copy(update={"guarantee_period": period}))
    most = setting.workers * (period + 2 * setting.keys)
    retired_s = min(now_s for event, now_s in world.log if isinstance(event, Left))
    for key in range(setting.keys):
        everyone = nx.empty_graph(setting.workers)
        graph, updates = everyone.copy(), 0
        for group, now_s in world.groups:
            if group.key == key and now_s < retired_s:
                nx.add_path(graph, group.members)
                updates += len(group.members)
                assert updates < most
                if updates >= period * setting.workers and nx.is_connected(graph):
                    graph, updates = everyone.copy(), 0


def test_the_first_to_come_waits_as_long_as_it_may() -> None:
    scheduler = scheduler_of(PLAIN, 3, 1)
    assert scheduler.deadline_s is None
    assert ask(scheduler, 2, 1, now_s=5) == []
    assert scheduler.deadline_s == 6
    assert ask(scheduler, 0, 1, now_s=5.5) == []
    assert scheduler.deadline_s == 6
    assert scheduler.handle(Tick(), 5.9) == []
    (group,) = scheduler.handle(Tick(), 6)
    assert (group.members, group.iterations, group.number) == ((0, 2), (1, 1), 0)
    assert scheduler.deadline_s is None


def test_a_group_of_all_closes_at_once() -> None:
    scheduler = scheduler_of(PLAIN, 2, 1)
    assert ask(scheduler, 0, 1) == []
    assert ask(scheduler, 1, 1) == [(0, 1)]
    assert scheduler.deadline_s is None


def test_a_full_group_closes_at_once() -> None:
    scheduler = scheduler_of(PLAIN.model_copy(update={"most_members": 2}), 3, 1)
    assert ask(scheduler, 0, 1) == []
    assert ask(scheduler, 1, 1) == [(0, 1)]


def test_a_group_that_only_waits_for_one_that_leaves_closes() -> None:
    scheduler = scheduler_of(PLAIN, 3, 1)
    ask(scheduler, 0, 1)
    ask(scheduler, 1, 1)
    (group,) = scheduler.handle(Left(2), 0)
    assert group.members == (0, 1)


def test_waits_grow_where_nobody_comes_and_shrink_where_somebody_does() -> None:
    scheduler = scheduler_of(PLAIN, 3, 1)
    waits = []
    for iteration in range(1, 5):
        ask(scheduler, 0, iteration)
        waits.append(scheduler.deadline_s)
        scheduler.handle(Tick(), 9)
    assert waits == [1, 2, 4, 4]
    waits = []
    for iteration in range(5, 8):
        ask(scheduler, 0, iteration)
        waits.append(scheduler.deadline_s)
        ask(scheduler, 1, iteration - 4)
        (group,) = scheduler.handle(Tick(), 9)
        for worker in group.members:
            scheduler.handle(Finished(worker, group.number), 9)
    assert waits == pytest.approx([4, 3.6, 3.24])


def test_who_asks_before_its_group_has_ended_counts_from_its_end_on() -> None:
    scheduler = scheduler_of(PLAIN, 2, 1)
    ask(scheduler, 0, 1)
    ask(scheduler, 1, 1)
    assert ask(scheduler, 0, 2) == []
    assert scheduler.deadline_s is None
    assert scheduler.handle(Finished(0, 0), 3) == []
    assert scheduler.deadline_s == pytest.approx(3.9)


def test_the_guarantee_waits_for_one_of_each_component_only() -> None:
    scheduler = scheduler_of(GUARANTEED, 4, 1)
    ask(scheduler, 0, 1)
    ask(scheduler, 1, 1)
    (group,) = scheduler.handle(Tick(), 9)
    for worker in group.members:
        scheduler.handle(Finished(worker, group.number), 9)
    alone(scheduler, 2, 1)
    alone(scheduler, 2, 2)  # Four updates of four workers: the guarantee is due.
    assert ask(scheduler, 2, 3) == []
    assert scheduler.deadline_s is None
    assert ask(scheduler, 1, 2) == []
    assert ask(scheduler, 3, 1) == [(1, 2, 3)]  # 0 is connected through 1.
    alone(scheduler, 0, 2)  # All begins anew.
    assert ask(scheduler, 0, 3) == []
    assert scheduler.deadline_s is not None


def test_the_guarantee_does_not_wait_for_who_has_left() -> None:
    scheduler = scheduler_of(GUARANTEED, 3, 1)
    for iteration in (1, 2, 3):
        alone(scheduler, 0, iteration)
    ask(scheduler, 0, 4)
    assert ask(scheduler, 1, 1) == []
    (group,) = scheduler.handle(Left(2), 0)
    assert group.members == (0, 1)


def together(scheduler: Scheduler, workers: tuple[int, ...], iteration: int) -> None:
    """Workers ask and average, as nobody else comes."""
    for worker in workers:
        assert ask(scheduler, worker, iteration) == []
    assert scheduler.deadline_s is not None
    (group,) = scheduler.handle(Tick(), scheduler.deadline_s)
    assert group.members == workers
    for worker in workers:
        scheduler.handle(Finished(worker, group.number), 0)


def test_who_leaves_a_group_held_for_the_guarantee_does_not_count_in_it() -> None:
    scheduler = scheduler_of(GUARANTEED, 3, 1)
    for iteration in (1, 2, 3):
        alone(scheduler, 0, iteration)
    ask(scheduler, 0, 4)
    ask(scheduler, 1, 1)
    assert scheduler.handle(Left(0), 0) == []
    assert ask(scheduler, 2, 1) == [(1, 2)]


def test_the_guarantee_is_fulfilled_once_those_that_it_missed_have_left() -> None:
    scheduler = scheduler_of(GUARANTEED, 3, 1)
    together(scheduler, (0, 1), 1)
    together(scheduler, (0, 1), 2)
    assert scheduler.handle(Left(2), 0) == []
    assert ask(scheduler, 0, 3) == []
    assert scheduler.deadline_s is not None


def test_a_guarantee_that_is_due_is_fulfilled_even_if_others_join() -> None:
    scheduler = scheduler_of(PLAIN.model_copy(update={"guarantee_period": 3}), 4, 1)
    for worker in (2, 3):
        scheduler.handle(Left(worker), 0)
    for iteration in range(1, 7):
        alone(scheduler, 0, iteration)  # Six updates of two workers: due. Twelve would be of four.
    for worker in (2, 3):
        scheduler.handle(Joined(worker, 1), 9)
    for worker, iteration in ((0, 7), (1, 1), (2, 1)):
        assert ask(scheduler, worker, iteration) == []
    assert ask(scheduler, 3, 1) == [(0, 1, 2, 3)]
    for worker in range(4):
        scheduler.handle(Finished(worker, 6), 9)
    assert ask(scheduler, 0, 8, now_s=9) == []
    assert scheduler.deadline_s is not None


def test_who_returns_waits_as_at_first() -> None:
    scheduler = scheduler_of(PLAIN, 3, 1)
    alone(scheduler, 0, 1)
    scheduler.handle(Left(0), 3)
    scheduler.handle(Joined(0, 5), 3)
    ask(scheduler, 0, 5, now_s=3)
    assert scheduler.deadline_s == 4


def test_one_key_at_a_time_waits_for_its_guarantee() -> None:
    scheduler = scheduler_of(GUARANTEED, 2, 2)
    for iteration in (1, 2):
        for key in (0, 1):
            alone(scheduler, 0, iteration, key)
    assert ask(scheduler, 0, 3, key=0) == []
    assert scheduler.deadline_s is None
    alone(scheduler, 0, 3, key=1)  # Its turn has not come.
    assert ask(scheduler, 1, 1, key=0) == [(0, 1)]
    assert ask(scheduler, 0, 4, key=1) == []
    assert scheduler.deadline_s is None
    assert ask(scheduler, 1, 1, key=1) == [(0, 1)]


@given(st.lists(st.tuples(st.sampled_from("mljr"), st.sets(st.integers(0, 6), min_size=1))))
def test_the_sync_graph_counts_components_as_networkx_does(
    steps: list[tuple[str, set[int]]],
) -> None:
    graph, plain, there = SyncGraph(range(7)), nx.empty_graph(7), {w: w for w in range(7)}
    for step, workers in steps:
        worker = min(workers)
        known = sorted(workers & set(there))
        if step == "m" and known:
            graph.merge(known)
            nx.add_path(plain, [there[w] for w in known])
        elif step == "l" and worker in there:
            graph.leave(worker)
            del there[worker]
        elif step == "j" and worker not in there:
            graph.join(worker)
            there[worker] = len(plain)
            plain.add_node(there[worker])
        components = [c for c in nx.connected_components(plain) if c & set(there.values())]
        assert graph.components == len(components)
        for a in there:
            for b in there:
                same = nx.has_path(plain, there[a], there[b])
                assert (graph.component(a) == graph.component(b)) == same
