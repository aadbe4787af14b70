"""Random moves, interchangeable devices and walks judged by probes."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from brute_force import all_partitions
from hypothesis import given
from hypothesis import strategies as st
from tiny_problems import tiny_problem

from planner import Problem
from planner.costs.placement import is_connected, place
from planner.search.budget import Clock, Settings, TimeShare
from planner.search.local_search import anneal
from planner.search.partition.bounds.quick import Numbered, NumberedStage, QuickBound
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.partition.bounds.shared import SharedBound
from planner.search.partition.chain import Chain, Partition, StageChoice
from planner.search.partition.intervals import Intervals
from planner.search.partition.local_search.neighbourhood import PartitionMoves
from planner.search.partition.local_search.searches import ANNEALING_SHARES, Anneal
from planner.search.partition.symmetry import Interchange, interchangeable_devices
from planner.search.schedule.heuristic import (
    best_heuristic_schedule,
    quick_estimate_s,
    quick_schedules,
)
from planner.search.state import Search, SearchTask


def search_of(problem: Problem, limit_s: float = 5.0) -> Search:
    return Search(SearchTask(problem, Settings(0, 1, True), 0.0), Clock(limit_s, True))


# --- moves ----------------------------------------------------------------------------------------


def require_partition(stages: Numbered, cells: int, devices: int) -> None:
    edges = [stage.begin for stage in stages] + [stages[-1].end]
    assert (edges[0], edges[-1]) == (0, cells)
    assert all(first < second for first, second in pairwise(edges))
    assert all(a.end == b.begin for a, b in pairwise(stages))
    held = [device for stage in stages for device in stage.devices]
    assert len(held) == len(set(held))
    assert set(held) <= set(range(devices))
    assert all(stage.devices == tuple(sorted(stage.devices)) for stage in stages)
    assert all(stage.devices for stage in stages)


@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_moves_lead_from_partition_to_partition(seed: int, replication: bool) -> None:
    problem = tiny_problem(seed, layers=8, devices=6, microbatches=2, replication=replication)
    chain = Chain(problem)
    quick = QuickBound(Intervals(chain, range(chain.length + 1)), problem.cluster.link_table)
    rng = random.Random(seed)
    moves = PartitionMoves(quick, rng)
    stages: Numbered = (NumberedStage(0, 4, (0,)), NumberedStage(4, 8, (1,)))
    made: dict[str, int] = {}
    for _ in range(3000):
        place_ = rng.randrange(len(stages))
        kind = rng.choice(["shift", "exchange", "merge", "split", "drop", "hand_over"])
        if not replication and kind in ("drop", "hand_over"):
            continue
        found = getattr(moves, kind)(stages, place_)
        if found is None:
            continue
        require_partition(found, 8, 6)
        if not replication:
            assert all(len(stage.devices) == 1 for stage in found)
        made[kind] = made.get(kind, 0) + 1
        stages = found
    assert len(made) == (6 if replication else 4)
    assert min(made.values()) > 20


def require_shared_partition(stages: Numbered, layers: int, devices: int, most: int) -> None:
    assert [stage.begin for stage in stages] == [0, *(stage.end for stage in stages[:-1])]
    assert stages[-1].end == layers
    held = Counter(device for stage in stages for device in stage.devices)
    assert max(held.values()) <= most
    assert set(held) <= set(range(devices))
    assert all(stage.begin < stage.end and stage.devices for stage in stages)
    assert all(stage.devices == tuple(sorted(set(stage.devices))) for stage in stages)


def several_a_device(seed: int, *, replication: bool, devices: int) -> SharedBound:
    problem = tiny_problem(
        seed,
        layers=8,
        devices=devices,
        microbatches=4,
        types=2,
        replication=replication,
        max_stages_per_device=2,
        memory_mib=4000.0,
    )
    chain, links = Chain(problem), problem.cluster.link_table
    return SharedBound(QuickBound(Intervals(chain, range(chain.length + 1)), links))


@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_moves_keep_to_two_stages_a_device(seed: int, replication: bool) -> None:
    rng = random.Random(seed)
    moves = PartitionMoves(several_a_device(seed, replication=replication, devices=4), rng)
    stages: Numbered = (NumberedStage(0, 4, (0,)), NumberedStage(4, 8, (1,)))
    most = 0
    for _ in range(2000):
        found = moves.draw(stages, rng.randrange(len(stages)), rng.random(), ANNEALING_SHARES)
        if found is not None:
            require_shared_partition(found, 8, 4, 2)
            stages, most = found, max(most, len(found))
    assert most > 4


@pytest.mark.parametrize("seed", range(12))
def test_no_quick_schedule_beats_the_score_of_several_stages_a_device(seed: int) -> None:
    """Without replicas the score is a bound."""
    rng = random.Random(seed)
    scorer = several_a_device(seed, replication=False, devices=3)
    cuts = [0, *sorted(rng.sample(range(1, 8), 4)), 8]
    places = rng.sample([0, 0, 1, 1, 2, 2], 5)
    stages = tuple(
        NumberedStage(begin, end, (device,))
        for (begin, end), device in zip(pairwise(cuts), places, strict=True)
    )
    chain = scorer.intervals.chain
    placed = place(chain.problem, chain.specs(scorer.named(stages)))
    times = [schedule.iteration_time_s for schedule in quick_schedules(placed)]
    assert 0.5 * min(times) < scorer.score(stages).bound_s <= min(times) * (1 + 1e-9)


# --- interchangeable devices ----------------------------------------------------------------------


@given(st.data())
def test_partitions_that_differ_by_interchangeable_devices_have_one_representative(
    data: st.DataObject,
) -> None:
    problem = tiny_problem(0, layers=5, devices=5, microbatches=2, types=2, topology="switches")
    cluster = problem.cluster
    groups = interchangeable_devices(cluster)
    assert groups
    moved = dict(zip(cluster.device_names, cluster.device_names, strict=True))
    for group in groups:
        moved.update(zip(group, data.draw(st.permutations(group)), strict=True))
    devices = data.draw(st.permutations(cluster.device_names))
    first = tuple(devices[: data.draw(st.integers(1, 2))])
    second = tuple(devices[len(first) : len(first) + data.draw(st.integers(1, 3))])
    partition = (StageChoice(0, 2, first), StageChoice(2, 5, second))
    renamed: Partition = tuple(
        StageChoice(stage.begin, stage.end, tuple(moved[d] for d in stage.devices))
        for stage in partition
    )
    interchange = Interchange(cluster)
    found = interchange.representative(partition)
    assert found == interchange.representative(renamed) == interchange.representative(found)
    chain = Chain(problem)
    bounds = [schedule_bound_s(place(problem, chain.specs(p))) for p in (partition, found)]
    assert bounds[0] == pytest.approx(bounds[1])


def test_devices_with_links_of_their_own_stand_for_themselves() -> None:
    problem = tiny_problem(0, layers=4, devices=4, microbatches=2, topology="mesh")
    assert interchangeable_devices(problem.cluster) == []
    partition = (StageChoice(0, 2, ("d3",)), StageChoice(2, 4, ("d1", "d2")))
    assert Interchange(problem.cluster).representative(partition) == partition


# --- probes and walks -----------------------------------------------------------------------------


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(6))
def test_a_probe_is_a_schedule_s_time_and_close_to_the_best_quick_one(seed: int) -> None:
    problem = tiny_problem(seed, layers=5, devices=3, microbatches=6)
    ratios = []
    for specs in all_partitions(problem):
        pipeline = place(problem, specs)
        if not is_connected(pipeline):
            continue
        probed_s, best = quick_estimate_s(pipeline), best_heuristic_schedule(pipeline)
        assert probed_s is not None
        assert best is not None
        assert probed_s >= best.iteration_time_s * (1 - 1e-9)
        ratios.append(probed_s / best.iteration_time_s)
    assert sorted(ratios)[len(ratios) // 2] < 1.01


def test_a_probe_that_memory_is_too_small_for_says_nothing() -> None:
    problem = tiny_problem(1, layers=4, devices=2, microbatches=4, memory_mib=1.0)
    pipeline = place(problem, next(iter(all_partitions(problem))))
    assert quick_estimate_s(pipeline) is None


@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_walk_from_a_poor_start_finds_what_trying_all_partitions_finds(
    seed: int, replication: bool
) -> None:
    problem = tiny_problem(seed, layers=5, devices=3, microbatches=4, replication=replication)
    search = search_of(problem, limit_s=5.0)
    search.consider((StageChoice(0, 5, ("d0",)),))
    poor_s = search.best_s
    anneal(search, TimeShare(0.4).slice_of(search.clock))
    times = []
    for specs in all_partitions(problem):
        pipeline = place(problem, specs)
        if is_connected(pipeline):
            schedule = best_heuristic_schedule(pipeline)
            times.append(schedule.iteration_time_s if schedule else math.inf)
    assert search.best_s < poor_s
    assert search.best_s <= min(times) * 1.01


def test_a_walk_without_any_plan_has_nowhere_to_start() -> None:
    search = search_of(tiny_problem(0, layers=4, devices=2, microbatches=2))
    anneal(search, TimeShare(0.4).slice_of(search.clock))
    assert search.best is None


def test_a_walk_without_time_goes_nowhere() -> None:
    search = search_of(tiny_problem(0, layers=4, devices=2, microbatches=2), limit_s=0.5)
    search.consider((StageChoice(0, 4, ("d0",)),))
    for seconds in (0.5, 1e-9, 0.5):
        search.clock.spend(seconds)
        anneal(search, TimeShare(0.4).slice_of(search.clock))
    assert search.found.tried == 1


def test_a_walk_ends_with_its_time() -> None:
    search = search_of(tiny_problem(0, layers=8, devices=6, microbatches=4), limit_s=0.5)
    search.consider((StageChoice(0, 8, ("d0",)),))
    anneal(search, TimeShare(0.4).slice_of(search.clock))
    assert search.clock.elapsed_s < 0.6


@pytest.mark.parametrize("seed", range(3))
def test_annealing_by_bounds_finds_better_and_better_partitions(seed: int) -> None:
    problem = tiny_problem(seed, layers=5, devices=3, microbatches=4)
    chain = Chain(problem)
    quick = QuickBound(Intervals(chain, range(chain.length + 1)), problem.cluster.link_table)
    walk = Anneal(quick, 3, Clock(1e3, True), seed)
    found = list(walk.improve((StageChoice(0, 5, ("d0",)),), lambda: True))
    bounds = [schedule_bound_s(place(problem, chain.specs(partition))) for partition in found]
    assert bounds == sorted(bounds, reverse=True)
    start_s = schedule_bound_s(place(problem, chain.specs((StageChoice(0, 5, ("d0",)),))))
    assert bounds[-1] < bounds[0] < start_s
