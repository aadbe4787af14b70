"""Plans that offload stashes: against every plan there is, and where they are the quicker ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from brute_force import all_orders, all_partitions, busiest_s
from builders import boundary, cluster, device_type, graph, layer, link, parameter
from tiny_problems import tiny_problem

from planner import InfeasibleError, Job, Problem, solve, verify
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import is_connected, place
from planner.errors import PipeplanError
from planner.plan.runtimes import for_runtime
from planner.simulation.simulator import simulate
from planner.variants.problems import with_job

MIB = 2**20


def with_host_links(problem: Problem, gb_per_s: float, **job: object) -> Problem:
    types = {
        name: kind.model_copy(update={"host_link_gb_per_s": gb_per_s})
        for name, kind in problem.cluster.device_types.items()
    }
    machines = problem.cluster.model_copy(update={"device_types": types})
    return with_job(replace(problem, cluster=machines), **job)


def every_fate(problem: Problem, specs: tuple[StageSpec, ...]) -> Iterator[list[StageSpec]]:
    """Every choice of layers that keep their stashes, recompute or offload them."""
    fates = ("keep", "offload", "recompute")[: 3 if problem.job.recompute else 2]
    names = [name for spec in specs for name in spec.layers]
    for row in product(fates, repeat=len(names)):
        fate = dict(zip(names, row, strict=True))
        yield [
            StageSpec(
                spec.layers,
                spec.devices,
                tuple(name for name in spec.layers if fate[name] == "recompute"),
                tuple(name for name in spec.layers if fate[name] == "offload"),
            )
            for spec in specs
        ]


def best_s(problem: Problem) -> float:
    """The time of the fastest plan, by trying every plan; infinity without one."""
    best = math.inf
    for specs in all_partitions(problem):
        for stages in every_fate(problem, specs):
            placed = place(problem, stages)
            if not is_connected(placed):
                continue
            for orders in all_orders(placed):
                if busiest_s(placed, orders) > best * (1 + 1e-12):
                    continue
                try:
                    timeline = simulate(placed, orders)
                except PipeplanError:
                    continue
                if timeline.iteration_time_s < best and not timeline.overflow_bytes:
                    best = timeline.iteration_time_s
    return best


CASES = [
    (seed, memory_mib, rate) for seed in range(2) for memory_mib in (60, 90) for rate in (1, 50)
]


@pytest.mark.parametrize(
    ("seed", "memory_mib", "rate"),
    [
        pytest.param(*row, marks=() if number == 3 else pytest.mark.extensive)
        for number, row in enumerate(CASES)
    ],
)
def test_plan_and_bound_enclose_the_best_of_all_plans_that_offload(
    seed: int, memory_mib: float, rate: float
) -> None:
    problem = tiny_problem(
        seed,
        layers=2,
        devices=2,
        microbatches=3,
        replication=False,
        memory_mib=memory_mib,
        recompute=True,
    )
    problem = with_host_links(problem, rate, offload=True)
    best = best_s(problem)
    if best == math.inf:
        with pytest.raises(InfeasibleError):
            solve(problem, time_limit_s=0.3, deterministic=True)
        return
    result = solve(problem, time_limit_s=0.3, deterministic=True)
    assert verify(result.plan) == []
    assert result.lower_bound_s <= best * (1 + 1e-9)
    assert result.iteration_time_s >= best * (1 - 1e-9)


def blocks(devices: int, gb_per_s: float, **job: object) -> Problem:
    """Two blocks a device between a small embedding and head; memory for three of their stashes.

    A block's stash is thirty times its input; its forward takes 10 ms, its copy over 50 GB/s 6 ms.
    """
    names = ["embedding", *(f"block{i}" for i in range(2 * devices)), "head"]
    rows = [
        layer(
            name,
            *((0.010, 0.020) if "block" in name else (0.001, 0.002)),
            stash_bytes=(300 if "block" in name else 10) * MIB,
            parameters=[f"p{name}"],
        )
        for name in names
    ]
    cuts = [boundary(u, v, bytes_=10 * MIB, saved_by=v) for u, v in pairwise(names)]
    parameters = [parameter(f"p{name}", 12 * MIB) for name in names]
    types = {"unit": device_type(memory_gib=2.0, host_link_gb_per_s=gb_per_s)}
    on = [f"d{i}" for i in range(devices)]
    machines = cluster(on, [link(u, v, 50) for u, v in pairwise(on)], types=types)
    fields = {"microbatches": 12, "replication": False, **job}
    return Problem(graph(rows, cuts, parameters), machines, Job(**fields))


def test_offloading_is_taken_where_it_is_quicker_than_recomputing() -> None:
    """Copies of 12 ms hide behind operations of 20 ms; recomputing takes a third more work."""
    kept = solve(blocks(6, 50.0), time_limit_s=1.0, deterministic=True)
    result = solve(blocks(6, 50.0, offload=True), time_limit_s=1.0, deterministic=True)
    assert result.iteration_time_s < 0.92 * kept.iteration_time_s
    assert any(stage.recompute for stage in kept.plan.stages)
    assert any(stage.offload for stage in result.plan.stages)
    assert verify(result.plan) == []
    proof = result.plan.proof
    assert proof is not None
    assert proof.certificate is not None
    assert proof.certificate.space.offload is True
    assert proof.certificate.bound_s >= 0.9 * result.lower_bound_s


@pytest.mark.extensive
def test_over_a_slow_host_link_nothing_is_offloaded() -> None:
    result = solve(blocks(4, 0.01, offload=True), time_limit_s=0.3, deterministic=True)
    assert not any(stage.offload for stage in result.plan.stages)
    assert result.plan.job.offload is True
    assert verify(result.plan) == []


@pytest.mark.extensive
def test_if_needed_offloads_only_what_does_not_fit_otherwise() -> None:
    easy = solve(blocks(4, 50.0, offload="if_needed"), time_limit_s=0.3, deterministic=True)
    assert easy.plan.job.offload is False


def test_what_does_not_go_together_is_refused() -> None:
    problem = blocks(2, 50.0, offload=True)
    with pytest.raises(PipeplanError, match=r"offload = true: robust = True supports"):
        solve(problem, robust=True)
    with pytest.raises(PipeplanError, match="a plan for deepspeed supports"):
        for_runtime(problem, "deepspeed")
    with pytest.raises(
        PipeplanError, match='offload = true is for whole backwards; set backward = "any"'
    ):
        Job.parse({"offload": True, "backward": "split"}, "job")
    with pytest.raises(PipeplanError, match="offload = true is for single devices"):
        Job.parse({"offload": True, "tensor_parallel": 2}, "job")
