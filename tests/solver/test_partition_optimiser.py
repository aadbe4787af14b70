"""Programs along orders, quick scores, polish and the optimiser against every partition."""

import math
from itertools import permutations

import pytest
from brute_force import all_partitions
from hypothesis import given
from hypothesis import strategies as st
from tiny_problems import tiny_problem

from benchmarks.partition.best import best_partition
from planner import InfeasibleError, Problem
from planner.costs.placement import is_connected, place
from planner.search.budget import Clock
from planner.search.partition import optimiser as optimise
from planner.search.partition.bounds.partition import PartitionBound
from planner.search.partition.bounds.quick import NumberedStage, QuickBound
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.partition.chain import Chain, Partition
from planner.search.partition.dynamic_programs import device_orders as starts
from planner.search.partition.dynamic_programs.order_program import OrderProgram
from planner.search.partition.dynamic_programs.order_stages import OrderStageCosts
from planner.search.partition.intervals import Intervals
from planner.search.partition.local_search.searches import Polish
from planner.search.partition.optimiser import PartitionOptimiser
from planner.search.partition.relaxations.rounding import rounded_partitions
from planner.search.partition.relaxations.surrogate_relaxation import SurrogateRelaxation

ROUNDING = 1 + 1e-9


def exact_s(problem: Problem, partition: Partition) -> float:
    pipeline = place(problem, Chain(problem).specs(partition))
    return schedule_bound_s(pipeline, split=problem.job.splits)


def least_bound_s(problem: Problem) -> float:
    placed = (place(problem, specs) for specs in all_partitions(problem))
    return min((schedule_bound_s(p) for p in placed if is_connected(p)), default=math.inf)


@given(st.data())
def test_quick_scores_are_the_bound(data: st.DataObject) -> None:
    problem = tiny_problem(
        data.draw(st.integers(0, 50)),
        layers=6,
        devices=4,
        microbatches=data.draw(st.integers(1, 7)),
        types=data.draw(st.integers(1, 3)),
        topology=data.draw(st.sampled_from(["mesh", "switches"])),
        backward=data.draw(st.sampled_from(["whole", "any"])),
    )
    chain = Chain(problem)
    devices = data.draw(st.permutations(range(4)))
    count = data.draw(st.integers(1, 4))
    inner = sorted(data.draw(st.permutations(range(1, 6)))[: count - 1])
    cuts = [0, *inner, 6]
    edges = sorted(data.draw(st.permutations(range(1, 4)))[: count - 1])
    places = [0, *edges, 4]
    stages = [
        NumberedStage(cuts[j], cuts[j + 1], tuple(sorted(devices[places[j] : places[j + 1]])))
        for j in range(count)
    ]
    names = problem.cluster.device_names
    specs = chain.partition(
        [(chain.names[s.begin : s.end], [names[d] for d in s.devices]) for s in stages]
    )
    assert specs is not None
    score = QuickBound(Intervals(chain), problem.cluster.link_table).score(stages)
    assert score.bound_s == pytest.approx(exact_s(problem, specs), rel=1e-9)
    assert 0 <= score.critical < count


@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_program_finds_the_best_partition_along_an_order(seed: int, replication: bool) -> None:
    """Two devices: there is one pair for every transfer, so nothing is estimated."""
    problem = tiny_problem(
        seed, layers=6, devices=2, microbatches=5, types=2, replication=replication
    )
    chain = Chain(problem)
    costs = OrderStageCosts(Intervals(chain), problem.cluster.link_table)
    program = OrderProgram(costs, [1, 2] if replication else [1])
    found = []
    for order in permutations(range(2)):
        units = tuple((device,) for device in order)
        limit = program.least_limit_s(units, 0.0, 1e3, 1e-6)
        assert limit is not None
        partition = program.partition(units, limit)
        assert partition is not None
        assert exact_s(problem, partition) <= limit * (1 + 1e-6)
        found.append(exact_s(problem, partition))
    assert min(found) == pytest.approx(least_bound_s(problem), rel=1e-4)


def test_an_order_that_cannot_keep_a_limit_has_no_partition() -> None:
    problem = tiny_problem(0, layers=5, devices=3, microbatches=4)
    chain = Chain(problem)
    program = OrderProgram(OrderStageCosts(Intervals(chain), problem.cluster.link_table), [1])
    assert program.least_limit_s(((0,), (1,), (2,)), 0.0, 1e-9) is None
    assert program.partition(((0,), (1,), (2,)), 1e-9) is None


@pytest.mark.parametrize("seed", range(4))
def test_polishing_only_improves(seed: int) -> None:
    problem = tiny_problem(seed, layers=8, devices=4, microbatches=6, types=2)
    chain = Chain(problem)
    quick = QuickBound(Intervals(chain), problem.cluster.link_table)
    names = problem.cluster.device_names
    start = chain.partition([(chain.names[:4], names[:1]), (chain.names[4:], names[1:3])])
    assert start is not None
    last_s, left = exact_s(problem, start), 3000
    clock = Clock(1.0, True)

    def may_go_on() -> bool:
        nonlocal left
        left -= 1
        return left > 0

    for partition in Polish(quick, clock, seed).improve(start, may_go_on):
        time_s = exact_s(problem, partition)
        assert time_s < last_s * ROUNDING
        last_s = time_s
    assert last_s < exact_s(problem, start)


@pytest.mark.parametrize("seed", range(6))
def test_the_optimiser_encloses_the_best_partition(seed: int) -> None:
    problem = tiny_problem(seed, layers=6, devices=3, microbatches=6, types=1 + seed % 2)
    clock = Clock(0.5, True)
    optimiser = PartitionOptimiser(Chain(problem), 3, clock, 0)
    optimiser.start(lambda: clock.left_s > 0)
    optimiser.relax()
    optimiser.search(lambda: clock.left_s > 0)
    best_s = least_bound_s(problem)
    assert optimiser.bound_s <= best_s * ROUNDING
    assert optimiser.best is not None
    assert best_s <= optimiser.best_s * ROUNDING
    assert optimiser.best_s == pytest.approx(best_s, rel=0.02)
    for partition, time_s in optimiser.pool.items():
        assert time_s == pytest.approx(exact_s(problem, partition))


@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_partition_is_proved(seed: int, replication: bool) -> None:
    problem = tiny_problem(
        seed, layers=6, devices=3, microbatches=6, types=2, replication=replication
    )
    found = best_partition(problem, time_limit_s=600, workers=2)
    best_s = least_bound_s(problem)
    assert found.lower_bound_s <= best_s * ROUNDING
    assert found.status == "optimal"
    assert found.objective_s == pytest.approx(best_s, rel=2e-4)
    assert found.gap <= 1e-4


def test_the_same_seed_finds_the_same_partition() -> None:
    problem = tiny_problem(5, layers=8, devices=4, microbatches=6, types=2)
    first, second = (
        best_partition(problem, time_limit_s=0.5, deterministic=True) for _ in range(2)
    )
    assert first == second


@pytest.mark.extensive
def test_large_clusters_are_handed_out_in_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "MAX_UNITS", 4)
    problem = tiny_problem(2, layers=8, devices=8, microbatches=16, types=2)
    chain = Chain(problem)
    assert starts.unit_size(chain) == 2
    for order in starts.first_orders(chain):
        assert sorted(device for unit in order for device in unit) == list(range(8))
        for unit in order:
            assert len({problem.cluster.devices[device].type for device in unit}) == 1
    clock = Clock(1.0, True)
    optimiser = PartitionOptimiser(chain, 8, clock, 0)
    optimiser.start(lambda: True)
    assert optimiser.best is not None
    assert optimiser.bound_s <= optimiser.best_s


@pytest.mark.parametrize("types", [1, 3])
def test_bought_partitions_are_partitions(types: int) -> None:
    problem = tiny_problem(4, layers=8, devices=9, microbatches=24, types=types)
    chain = Chain(problem)
    relaxation = SurrogateRelaxation(chain, problem.cluster.link_table)
    bound_s = relaxation.bound_s(10.0)
    found = list(rounded_partitions(relaxation, bound_s))
    assert found
    for partition in found:
        assert [stage.begin for stage in partition] == [0, *(s.end for s in partition[:-1])]
        assert partition[-1].end == chain.length
        held = [device for stage in partition for device in stage.devices]
        assert len(set(held)) == len(held)
        assert exact_s(problem, partition) >= bound_s / ROUNDING


def test_partitions_with_too_many_stages_are_worth_nothing() -> None:
    problem = tiny_problem(0, layers=4, devices=3, microbatches=4)
    optimiser = optimise.PartitionOptimiser(Chain(problem), 1, Clock(1.0, True), 0)
    names = problem.cluster.device_names
    chain = Chain(problem)
    two = chain.partition([(chain.names[:2], names[:1]), (chain.names[2:], names[1:2])])
    assert two is not None
    assert optimiser.offer(two) == math.inf
    assert optimiser.best is None


@pytest.mark.extensive
@given(st.data())
def test_the_best_of_all_partitions_that_fit_is_found_and_proved(data: st.DataObject) -> None:
    problem = tiny_problem(
        data.draw(st.integers(0, 999)),
        layers=data.draw(st.integers(2, 4)),
        devices=data.draw(st.integers(2, 3)),
        microbatches=data.draw(st.integers(1, 5)),
        types=data.draw(st.integers(1, 3)),
        replication=data.draw(st.booleans()),
        tied=data.draw(st.booleans()),
        topology=data.draw(st.sampled_from(["mesh", "chain", "switches"])),
        memory_mib=data.draw(st.sampled_from([1000.0, 300.0, 150.0])),
        cut_mib=data.draw(st.sampled_from([1.0, 30.0])),
    )
    chain = Chain(problem)
    bound = PartitionBound(chain)
    best_s = math.inf
    for specs in all_partitions(problem):
        pipeline = place(problem, specs)
        partition = chain.partition([(stage.layers, stage.devices) for stage in specs])
        if is_connected(pipeline) and partition is not None and chain.may_fit(partition):
            best_s = min(best_s, bound.bound_s(partition, pipeline))
    try:
        found = best_partition(problem, time_limit_s=0.5, deterministic=True)
    except InfeasibleError:
        assert math.isinf(best_s)
        return
    assert found.objective_s == pytest.approx(best_s, rel=2e-4)
    assert found.lower_bound_s <= best_s * (1 + 2e-4)


def test_a_partition_is_found_where_few_devices_are_joined() -> None:
    problem = tiny_problem(
        26, layers=4, devices=3, microbatches=4, types=3, tied=True, topology="chain", link_scale=5
    )
    found = best_partition(problem, time_limit_s=0.3, deterministic=True)
    assert found.objective_s == pytest.approx(least_bound_s(problem))
