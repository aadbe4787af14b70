"""Long chains and large clusters: each step gives way when the time is up."""

import time
from collections.abc import Callable

import pytest
from builders import boundary, graph, layer, star

from planner import Job, Problem
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.search.budget import Clock
from planner.search.partition.chain import Chain
from planner.search.partition.dynamic_programs import core
from planner.search.partition.dynamic_programs.device_orders import device_orders
from planner.search.partition.local_search.searches import OrderSearch
from planner.search.partition.optimiser import PartitionOptimiser


def long_chain(layers: int, devices: int) -> Problem:
    rows = [layer(f"l{index}", 1e-3, 2e-3, stash_bytes=1000) for index in range(layers)]
    cuts = [boundary(f"l{i}", f"l{i + 1}", bytes_=1000) for i in range(layers - 1)]
    return Problem(graph(rows, cuts), star(devices), Job())


def least_seconds(work: Callable[[], object], times: int = 3) -> float:
    spent = []
    for _ in range(times):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return min(spent)


def test_placing_many_stages_takes_little_longer_than_placing_few() -> None:
    """One pass over layers and tensors, not one a stage."""
    problem = long_chain(2000, 64)

    def stages(count: int) -> list[StageSpec]:
        each = 2000 // count
        names = Chain(problem).names
        return [StageSpec(names[j * each : (j + 1) * each], (f"d{j}",)) for j in range(count)]

    few, many = stages(2), stages(50)
    assert least_seconds(lambda: place(problem, many)) < 3 * least_seconds(
        lambda: place(problem, few)
    )


def test_orders_are_worked_out_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(*_: object) -> None:
        raise AssertionError("minimum cuts take seconds on large clusters")

    monkeypatch.setattr(
        "planner.search.partition.dynamic_programs.device_orders.recursive_minimum_cut", too_long
    )
    cluster = star(8)
    assert next(device_orders(cluster, {"unit": 1.0})) == cluster.device_names
    chain = Chain(long_chain(20, 8))
    optimiser = PartitionOptimiser(chain, 8, Clock(1.0, deterministic=True), seed=0)
    optimiser.start(lambda: False)
    assert optimiser.best is not None


def test_a_start_along_an_order_ends_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(long_chain(20, 4))
    optimiser = PartitionOptimiser(chain, 4, Clock(1.0, deterministic=True), seed=0)
    order = tuple((number,) for number in range(4))
    tried: list[float] = []
    keeps = core.keeps_limit
    monkeypatch.setattr(
        core, "keeps_limit", lambda space: tried.append(space.limit_s) or keeps(space)
    )
    search = OrderSearch(optimiser._program, order, 0.0, optimiser.clock, 0)
    partition = search.start(10.0, may_go_on=lambda: len(tried) < 3)
    assert len(tried) == 3
    assert partition is not None
    assert optimiser.offer(partition) <= max(tried)
