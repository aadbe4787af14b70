"""Plans with several stages a device: loops and Vs, and the step that improves them."""

from collections import Counter

import pytest
from tiny_problems import tiny_problem

from planner import Problem
from planner.search.budget import Clock, Settings, TimeShare
from planner.search.partition.candidates import (
    grouped_loops,
    looped_partitions,
    returning_partitions,
    shared_partitions,
)
from planner.search.partition.chain import Chain
from planner.search.partition.relaxations.type_relaxation import TypeRelaxation
from planner.search.shared_devices import plan_shared
from planner.search.state import Search, SearchTask


def several_a_device(*, rounds: int, replication: bool, devices: int = 4) -> Problem:
    return tiny_problem(
        0,
        layers=10,
        devices=devices,
        microbatches=4,
        replication=replication,
        max_stages_per_device=rounds,
        memory_mib=4000.0,
        cut_mib=0.5,
        link_scale=100.0,
    )


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("replication", [False, True])
def test_loops_and_vs_hold_every_layer_and_keep_the_number_of_stages_a_device(
    rounds: int, replication: bool
) -> None:
    problem = several_a_device(rounds=rounds, replication=replication)
    sizes, shapes, most = set(), set(), set()
    chain, order = Chain(problem), problem.cluster.device_names
    found = [p for n in range(2, rounds + 1) for p in looped_partitions(chain, order, n)]
    if replication:
        found += [p for n in range(2, rounds + 1) for p in grouped_loops(chain, order, n)]
    assert set(found) <= set(shared_partitions(chain))
    for partition in found:
        assert [stage.begin for stage in partition] == [0, *(s.end for s in partition[:-1])]
        assert partition[-1].end == 10
        held = Counter(device for stage in partition for device in stage.devices)
        [each] = set(held.values())
        most.add(each)
        sizes |= {len(stage.devices) for stage in partition}
        count = len(partition) // each
        shapes.add(partition[count].devices == partition[0].devices)
    assert sizes == ({1, 2} if replication else {1})
    assert shapes == {True, False}
    assert most == set(range(2, rounds + 1))


def test_some_of_the_first_devices_may_hold_a_second_stage_behind_all_others() -> None:
    problem = several_a_device(rounds=2, replication=False)
    order = problem.cluster.device_names
    shapes = set()
    for partition in returning_partitions(Chain(problem), order):
        devices = tuple(device for stage in partition for device in stage.devices)
        twice = len(devices) - len(order)
        assert devices[: len(order)] == order
        assert devices[len(order) :] in (order[:twice], order[:twice][::-1])
        assert [stage.begin for stage in partition] == [0, *(s.end for s in partition[:-1])]
        assert all(stage.begin < stage.end for stage in partition)
        assert partition[-1].end == 10
        shapes.add(devices)
    assert len(shapes) == 1 + 2 * (len(order) - 1)


def test_as_few_layers_as_stages_are_shared_out_too() -> None:
    """Two devices and three layers: only one of the devices can hold two stages."""
    problem = tiny_problem(
        0, layers=3, devices=2, microbatches=2, replication=False, max_stages_per_device=2
    )
    found = list(returning_partitions(Chain(problem), problem.cluster.device_names))
    assert [[len(s.devices) for s in p] for p in found] == [[1, 1, 1]] * len(found)
    assert found


def test_two_stages_a_device_beat_every_plan_with_one() -> None:
    """With few microbatches in a pipeline, the bubble of one stage a device is long."""
    problem = several_a_device(rounds=2, replication=False)
    search = Search(SearchTask(problem, Settings(0, 1, True), 0.0), Clock(3, deterministic=True))
    plan_shared(search, TimeShare(1).slice_of(search.clock))
    assert search.best is not None
    assert search.best.shares_devices
    one_each_s = TypeRelaxation(search.chain, problem.cluster.link_table).bound_s(1e3)
    assert search.best_s < one_each_s
