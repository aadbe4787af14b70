"""The grid that people try by hand, against layouts that are adopted one by one."""

import math
from itertools import product

import pytest
from builders import cluster, device_type, link
from group_problems import tiny_problem
from transformers_by_hand import machines, problem, transformer

from planner import PipeplanError, Problem, adopt, compare, solve, verify
from planner.analysis.comparison import OURS, plan_of_row
from planner.costs.placement import place
from planner.interop.adopt.orders import SCHEDULES
from planner.prediction import replay
from planner.search.baseline_schedules import BaselineSchedules, chunked_partitions
from planner.search.partition.baselines import GRID
from planner.search.partition.chain import Chain
from planner.search.recomputed import RecomputedSchedules
from planner.search.schedule.heuristic import best_classic_schedule
from planner.variants.problems import restricted_to


def shapes(told: Problem) -> list[tuple[int, int, list[int]]]:
    """Stages, replicas and layers of each stage of the grid."""
    return [
        (len(row), len(row[0].devices), [stage.end - stage.begin for stage in row])
        for row in GRID.partitions(Chain(told))
    ]


@pytest.mark.parametrize(
    ("blocks", "devices", "microbatches", "expected"),
    [
        # Two layers before the blocks, three behind.
        (4, 4, 4, [(1, 4, [9]), (2, 2, [4, 5]), (4, 1, [3, 1, 1, 4])]),
        (4, 6, 4, [(1, 4, [9]), (2, 2, [4, 5]), (4, 1, [3, 1, 1, 4])]),
        (6, 6, 6, [(1, 6, [11]), (2, 3, [5, 6]), (3, 2, [4, 2, 5]), (6, 1, [3, 1, 1, 1, 1, 4])]),
    ],
)
def test_the_grid_has_every_number_of_stages_that_divides_the_blocks(
    blocks: int, devices: int, microbatches: int, expected: list[tuple[int, int, list[int]]]
) -> None:
    assert shapes(problem(transformer(blocks), machines(devices), microbatches=microbatches)) == (
        expected
    )


def test_without_replication_the_grid_has_pipelines_alone() -> None:
    told = problem(transformer(4), machines(4), replication=False)
    assert [row[:2] for row in shapes(told)] == [(1, 1), (2, 1), (4, 1)]


def test_where_types_differ_the_grid_of_the_fastest_ones_is_there() -> None:
    """A slow device in between; neither it nor its place among the ranks counts."""
    kinds = {"a": "fast", "b": "slow", "c": "fast", "d": "fast", "e": "slow", "f": "fast"}
    types = {
        "fast": device_type(peak_tflop_per_s={"float32": 2}),
        "slow": device_type(peak_tflop_per_s={"float32": 0.25}),
    }
    mixed = cluster(kinds, [link(name, "hub", 1000) for name in kinds], ["hub"], types)
    told = problem(transformer(4), mixed, max_stages_per_device=1)
    found = [tuple(stage.devices for stage in row) for row in GRID.partitions(Chain(told))]
    assert found == [
        (("a", "b", "c", "d"),),
        (("a", "b"), ("c", "d")),
        (("a",), ("b",), ("c",), ("d",)),
        (("a", "c", "d", "f"),),
        (("a", "c"), ("d", "f")),
        (("a",), ("c",), ("d",), ("f",)),
    ]
    grid = compare(told, ["grid"], time_limit_s=0.1, deterministic=True)[1]
    alone = restricted_to(told, ("a", "c", "d", "f"))
    assert grid.time_s == compare(alone, ["grid"], time_limit_s=0.1, deterministic=True)[1].time_s


@pytest.mark.parametrize("memory_gib", [1024, 7])
def test_layouts_that_are_left_out_are_not_the_fastest(memory_gib: float) -> None:
    types = {"unit": device_type(memory_gib=memory_gib)}
    told = problem(transformer(4, stash_bytes=2**30), machines(4, 2, **types), microbatches=8)
    chain = Chain(told)
    every = [
        RecomputedSchedules(chain, best_classic_schedule).best(row, place(told, chain.specs(row)))
        for one in GRID.partitions(chain)
        for row in (one, *chunked_partitions(chain, one))
    ]
    fastest_s = min(schedule.iteration_time_s for schedule in every if schedule is not None)
    schedules = BaselineSchedules(chain)
    found = schedules.best(GRID)
    assert found is not None
    assert found.iteration_time_s == fastest_s
    assert schedules.best(GRID, fastest_s) is None
    assert schedules.best(GRID, fastest_s * (1 + 1e-9)) is not None


def by_hand_s(told: Problem, blocks: int, devices: int) -> float:
    """The least time of all even layouts, each adopted by itself under each schedule."""
    times = [math.inf]
    for degree, stages in product((1, 2, 4), (1, 2, 4)):
        replicas, rest = divmod(devices, degree * stages)
        if rest or told.job.microbatches % replicas:
            continue
        each = "t" * (blocks // stages)
        layout = f"E{'|'.join([each] * stages)}L"
        of_degree = told.job.model_copy(update={"tensor_parallel": degree})
        one = Problem(told.graph, told.cluster, of_degree)
        for schedule in SCHEDULES:
            try:
                plan = adopt(one, layout, schedule=schedule, replicas=replicas)
            except PipeplanError:
                continue  # Not defined for these stages.
            if not replay(plan).overflow_bytes:
                times.append(plan.predicted.iteration_time_s)
    return min(times)


@pytest.mark.parametrize("memory_gib", [1024, 7])
def test_compare_finds_the_best_layout_of_the_grid_and_plan_is_not_slower(
    memory_gib: float,
) -> None:
    """Where memory is short, fewer stages of larger groups hold what blocks keep."""
    types = {"unit": device_type(memory_gib=memory_gib)}
    model = transformer(4, degrees=(2, 4), stash_bytes=2**30)
    job = {"microbatches": 8, "recompute": False, "max_stages_per_device": 1}
    told = problem(model, machines(4, 2, **types), tensor_parallel="any", **job)
    rows = compare(told, ["grid"], time_limit_s=0.3, deterministic=True)
    ours, grid = rows
    assert grid.time_s <= by_hand_s(told, 4, 8) * (1 + 1e-9)
    assert ours.planner == OURS
    assert ours.time_s <= grid.time_s * (1 + 1e-9)
    plan = plan_of_row(told, grid)
    assert verify(plan) == []
    assert plan.predicted.iteration_time_s == pytest.approx(grid.time_s, rel=1e-12)
    assert plan.degrees == grid.degrees
    assert grid.devices == plan.world_size


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_any_groups_are_not_slower_than_the_grid(seed: int) -> None:
    """Random layers, collectives and links: the search begins with the grid of every size."""
    job = {"microbatches": 4, "tensor_parallel": "any"}
    told = tiny_problem(seed, layers=4, devices=4, degrees=(2, 4), **job)
    found = solve(told, time_limit_s=0.3, deterministic=True)
    _, grid = compare(told, ["grid"], time_limit_s=0.01, deterministic=True)
    assert found.iteration_time_s <= grid.time_s * (1 + 1e-9)


def test_cuts_of_baselines_keep_together_what_groups_split() -> None:
    """Every planner's stages for every seed are plans that hold."""
    for seed in range(4):
        told = tiny_problem(seed, layers=5, devices=4, tensor_parallel=2, microbatches=4)
        for row in compare(told, time_limit_s=0.05, deterministic=True):
            if row.figures is not None:
                assert verify(plan_of_row(told, row)) == []
