"""Plans with several stages a device: loops and Vs, and the step that improves them."""

from collections import Counter

import pytest
from tiny_problems import tiny_problem

from planner import Problem
from planner.search.budget import Clock, Settings, Share
from planner.search.partition.candidates import shared_partitions
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
    for partition in shared_partitions(Chain(problem)):
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


def test_two_stages_a_device_beat_every_plan_with_one() -> None:
    """With few microbatches in a pipeline, the bubble of one stage a device is long."""
    problem = several_a_device(rounds=2, replication=False)
    search = Search(SearchTask(problem, Settings(0, 1, True), 0.0), Clock(3, deterministic=True))
    plan_shared(search, Share(1).slice_of(search.clock))
    assert search.best is not None
    assert search.best.shares_devices
    one_each_s = TypeRelaxation(search.chain, problem.cluster.link_table).bound_s(1e3)
    assert search.best_s < one_each_s
