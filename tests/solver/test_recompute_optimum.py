"""Plans that recompute, against every partition with every recomputation and every schedule."""

from dataclasses import replace
from itertools import pairwise

import pytest
from brute_force import brute_force
from builders import boundary, cluster, device_type, graph, layer, link, parameter
from tiny_problems import tiny_problem

from planner import InfeasibleError, Job, Problem, solve, verify
from planner.costs.placement import place
from planner.search.partition.candidates import even_partition
from planner.search.partition.chain import Chain
from planner.search.recomputed import RecomputedSchedules
from planner.search.schedule.heuristic import best_heuristic_schedule, fits_memory
from planner.simulation.simulator import simulate_plan


def tight(seed: int, memory_mib: float, **settings: object) -> Problem:
    settings = {"layers": 3, "devices": 2, "microbatches": 2, "replication": False, **settings}
    return tiny_problem(seed, memory_mib=memory_mib, recompute=True, **settings)


def without_recompute(problem: Problem) -> Problem:
    return replace(problem, job=problem.job.model_copy(update={"recompute": False}))


SETTINGS = {
    "one device a stage": {},
    "replicas": {"layers": 2, "replication": True},
    "three devices": {"devices": 3, "microbatches": 1},
    "two types": {"types": 2},
    "two stages a device": {"layers": 2, "max_stages_per_device": 2},
}


@pytest.mark.extensive
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("memory_mib", [70, 90, 120])
@pytest.mark.parametrize("seed", range(4))
def test_plan_and_bound_enclose_the_best_of_all_plans_that_recompute(
    seed: int, memory_mib: float, kind: str
) -> None:
    problem = tight(seed, memory_mib, **SETTINGS[kind])
    best = brute_force(problem)
    if best.time_s == float("inf"):
        with pytest.raises(InfeasibleError):
            solve(problem, time_limit_s=0.3, deterministic=True)
        return
    result = solve(problem, time_limit_s=0.3, deterministic=True)
    assert verify(result.plan) == []
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9)
    assert result.iteration_time_s >= best.time_s * (1 - 1e-9)
    if result.status == "optimal":
        assert result.iteration_time_s <= best.time_s * (1 + 1e-4)


def test_recomputing_matters_in_these_problems() -> None:
    """Some have no plan without, some have a faster one with it, some need none."""
    found = []
    for seed in range(4):
        for memory_mib in (70, 90, 120):
            problem = tight(seed, memory_mib)
            free, none = brute_force(problem), brute_force(without_recompute(problem))
            found.append((free.time_s, none.time_s))
    assert any(none == float("inf") > free for free, none in found)
    assert any(free < none < float("inf") for free, none in found)
    assert any(free == none < float("inf") for free, none in found)


@pytest.mark.extensive
@pytest.mark.parametrize(("seed", "memory_mib"), [(0, 126), (1, 115), (2, 126), (3, 115)])
def test_what_fits_only_with_recomputation_is_planned_and_keeps_within_memory(
    seed: int, memory_mib: float
) -> None:
    problem = tight(seed, memory_mib, layers=8, devices=3, microbatches=6)
    with pytest.raises(InfeasibleError):
        solve(without_recompute(problem), time_limit_s=0.3, deterministic=True)
    plan = solve(problem, time_limit_s=0.3, deterministic=True).plan
    assert any(stage.recompute for stage in plan.stages)
    timeline = simulate_plan(plan)
    for device, peak in timeline.peak_memory_bytes.items():
        assert peak <= timeline.pipeline.capacity_bytes(device)


def transformer(recompute: bool) -> Problem:
    """24 equal blocks between an embedding and a head; a block's stash is 30 times its input.

    A device holds the state of seven blocks; with their stashes, of one microbatch only.
    """
    mib = 2**20
    names = ["embedding", *(f"block{i}" for i in range(24)), "head"]
    rows = [
        layer(
            name,
            0.010,
            0.020,
            stash_bytes=(300 if "block" in name else 10) * mib,
            parameters=[f"p{name}"],
        )
        for name in names
    ]
    cuts = [boundary(u, v, bytes_=10 * mib, saved_by=None) for u, v in pairwise(names)]
    parameters = [parameter(f"p{name}", 12 * mib) for name in names]
    small = {"unit": device_type(memory_gib=2.6)}
    devices = [f"d{i}" for i in range(4)]
    links = [link(u, v, 50) for u, v in pairwise(devices)]
    machines = cluster(devices, links, types=small)
    job = Job(microbatches=12, recompute=recompute)
    return Problem(graph(rows, cuts, parameters), machines, job)


def test_a_transformer_whose_stashes_do_not_fit_is_planned_by_recomputing() -> None:
    """All blocks recomputed: 33 % more work than a bound that assumes none; plus the bubble."""
    with pytest.raises(InfeasibleError, match="what would help: recompute = true"):
        solve(transformer(recompute=False), time_limit_s=0.5, deterministic=True)
    result = solve(transformer(recompute=True), time_limit_s=0.5, deterministic=True)
    assert verify(result.plan) == []
    assert "any layers recomputed" in str(result.plan.provenance.bound_covers)
    assert any(stage.recompute for stage in result.plan.stages)
    assert result.gap is not None
    assert result.gap < 1.0


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(6))
def test_being_allowed_to_recompute_does_no_harm(seed: int) -> None:
    problem = tight(seed, 140, layers=6, devices=3, microbatches=5)
    free = solve(problem, time_limit_s=0.3, deterministic=True)
    try:
        none = solve(without_recompute(problem), time_limit_s=0.3, deterministic=True)
    except InfeasibleError:
        return
    assert free.iteration_time_s <= none.iteration_time_s * (1 + 1e-3)
    assert free.lower_bound_s <= none.iteration_time_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_schedule_does_not_need_is_not_recomputed(seed: int) -> None:
    """Everything recomputed at first; the same orders fit with less of it."""
    problem = tight(seed, 160, layers=6, devices=3, microbatches=5)
    chain = Chain(problem)
    plain = even_partition(chain, 3)
    everything = tuple(
        replace(stage, recompute=tuple(range(stage.begin, stage.end))) for stage in plain
    )
    schedule = best_heuristic_schedule(place(problem, chain.specs(everything)))
    assert schedule is not None
    less = RecomputedSchedules(chain).relaxed(plain, schedule)
    assert fits_memory(less.timeline)
    assert less.iteration_time_s < schedule.iteration_time_s
    assert less.orders == schedule.orders
