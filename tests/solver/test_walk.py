"""The walk over whole plans: all that it finds is a plan of the job, with the time that it says."""

import random
from dataclasses import replace
from typing import Any

import pytest
from builders import star
from group_problems import tiny_problem
from hypothesis import given
from hypothesis import strategies as st
from offloading import with_host_links
from strategies import problems, runtimes
from unequal_graphs import SHARES, TOKENS, unequal

from planner import Job
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.cluster.group_packing import packed, packed_in_turn
from planner.costs.network_table import NetworkTable
from planner.costs.placement import has_equal_groups, place
from planner.costs.stage_table import StageTable
from planner.lengths import Lengths
from planner.plan.membership import outside
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.program.layout import Layout
from planner.search.clock import TASKS_PER_S, Clock, Part
from planner.search.walk.freedoms import freedoms_of
from planner.search.walk.search import WalkResult, WalkSearch
from planner.search.walk.starts import needs_of, starts
from planner.search.walk.walker import Walker
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.space import WITH_SHARDED_PARAMETERS
from planner.verification.verify import verify

DIVIDED = {"shard_parameters": True, **WITH_SHARDED_PARAMETERS}
FREEDOMS = (
    {},
    {"backward": "whole", "recompute": False},
    {"backward": "split", "replication": False},
    {"max_stages_per_device": 2},
    {"max_stages_per_device": 2, "placement": "loop", "replication": False, "backward": "whole"},
    {"max_stages_per_device": 2, "placement": "loop_or_v", "equal_pipelines": True},
    {"equal_pipelines": True, "min_stages": 2},
    {"order": "1f1b", "backward": "whole", "equal_pipelines": True},
    {"order": "1f1b", "backward": "whole", "replication": False, "max_stages": 2},
    {"shard_optimizer": True},
    {"shard_optimizer": True, "max_stages_per_device": 2},
    {"offload": True},
    DIVIDED,
    {**DIVIDED, "max_stages_per_device": 2, "placement": "loop_or_v"},
    {**DIVIDED, "order": "1f1b", "min_stages": 2},
)


def timeline_of(layout: Layout, table: StageTable) -> Timeline:
    """Simulate a layout as it is, with the replicas that run nothing."""
    placed = place(table.problem, list(layout.specs(table)))
    return simulate(placed, layout.operations(table))


def walked(problem: Problem, tasks: int = 2500, threads: int = 1) -> tuple[WalkResult, StageTable]:
    table = StageTable(problem)
    clock = Part(Clock(tasks / TASKS_PER_S, deterministic=True), 1.0)
    return WalkSearch(problem, table, clock, threads=threads).run(), table


def assert_plans_of_the_job(
    problem: Problem, single: tuple[Problem, TensorParallel] | None = None
) -> int:
    """All that a walk finds are plans of the job with these times; return how many it found."""
    result, table = walked(problem)
    times = [found.seconds for found in result.found]
    assert times == sorted(times)
    for found in result.found:
        timeline = timeline_of(found.layout, table)
        assert timeline.iteration_time_s == found.seconds
        assert not timeline.overflow_bytes
        pipeline = timeline.pipeline
        stages = [stage.spec for stage in pipeline.stages]
        layers = tuple(problem.graph.layers)
        assert has_equal_groups(problem, stages)
        assert not list(outside(problem.job.space, stages, timeline.orders, layers))
    for found in result.found[:1]:
        timeline = timeline_of(found.layout, table)
        plan = plan_by_hand(timeline.pipeline, timeline.orders)
        assert verify(plan if single is None else plan.of_problem(*single)) == []
    return len(times)


@given(st.data(), st.sampled_from(FREEDOMS))
def test_finds_plans_of_the_job(data: st.DataObject, freedoms: dict[str, Any]) -> None:
    problem, runtime = data.draw(problems()), data.draw(runtimes())
    problem = replace(problem, job=problem.job.model_copy(update=freedoms), runtime=runtime)
    if freedoms.get("offload"):
        problem = with_host_links(problem, data.draw(st.randoms(use_true_random=False)))
    assert_plans_of_the_job(problem)


@pytest.mark.parametrize("seed", range(4))
def test_finds_plans_of_tensor_parallel_groups(seed: int) -> None:
    """Groups of one size, or of one size for each of two types of devices."""
    several = {"max_stages_per_device": 1 + seed % 2, "tensor_parallel": "any"}
    problem = tiny_problem(seed, layers=5, devices=6, microbatches=4, **several)
    if seed % 4 < 2:
        groups = packed(problem.cluster, 2)
    else:
        problem = with_two_types(problem)
        groups = packed_in_turn(problem.cluster, [2, 1], among=problem.cluster.device_names[:4])
        groups += packed_in_turn(problem.cluster, [1], among=problem.cluster.device_names[4:])
    parallel = TensorParallel(groups=groups)
    assert assert_plans_of_the_job(grouped_problem(problem, parallel), (problem, parallel))


def with_two_types(problem: Problem) -> Problem:
    """The same with the last two devices of a type of their own."""
    cluster = problem.cluster
    slow = {"slow": cluster.device_types["unit"].model_copy(update={"efficiency": 0.5})}
    devices = tuple(
        row.model_copy(update={"type": "slow"}) if n >= 4 else row
        for n, row in enumerate(cluster.devices)
    )
    types = {**cluster.device_types, **slow}
    changed = cluster.model_copy(update={"device_types": types, "devices": devices})
    return replace(
        problem, cluster=Cluster.from_data(changed.model_dump(mode="json", exclude_none=True))
    )


@pytest.mark.parametrize("seed", range(2))
def test_finds_plans_for_microbatches_of_several_lengths(seed: int) -> None:
    """Those whose iteration of mean microbatches is short: their times by length are predicted."""
    rng = random.Random(seed)
    seconds = [[(k * rng.uniform(1, 2), k * 2.0) for k in (1, 2, 4)] for _ in range(5)]
    lengths = Lengths(tokens=TOKENS, shares=SHARES, iterations=20)
    job = Job(microbatches=4, lengths=lengths, max_stages_per_device=1 + seed % 2)
    graph = unequal(seconds, [0.1, 0.2, 0.4], stash=10**8)
    assert assert_plans_of_the_job(Problem(graph, star(4), job))


@given(st.data())
def test_annealed_orders_are_no_slower_and_take_what_they_say(data: st.DataObject) -> None:
    problem = data.draw(problems())
    table, network = StageTable(problem), NetworkTable.of(problem.cluster)
    freedoms = freedoms_of(problem)
    walker = Walker(problem, table, network, freedoms, seed=1)
    needs = needs_of(walker.memory, table, freedoms)
    found = (walker.start(start) for start in starts(network, freedoms, needs))
    candidate = next((row for row in found if row is not None), None)
    if candidate is None:
        return
    before_s, _ = walker.layout(candidate)
    # Annealing goes on from where it is, whatever order was asked for meanwhile.
    for heat in (0.1, 0.03, 0.01, 0.003):
        after_s = walker.polish(heat, 30)
        timeline = timeline_of(walker.polished_layout(), table)
        assert timeline.iteration_time_s == after_s
    assert after_s <= before_s
    assert not timeline.overflow_bytes
