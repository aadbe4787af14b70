"""The search over tensor-parallel groups against every plan of tiny problems."""

from dataclasses import replace
from pathlib import Path

import pytest
from brute_force import brute_force
from group_problems import tiny_problem

from planner import Problem, solve, verify
from planner.cluster.group_packing import packed
from planner.errors import InfeasibleError, PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.prediction import refresh
from planner.verification.proof import prove

SETTINGS = {"time_limit_s": 0.5, "deterministic": True}


def with_degree(problem: Problem, degree: int | str) -> Problem:
    return replace(problem, job=problem.job.model_copy(update={"tensor_parallel": degree}))


def of_groups(problem: Problem, degree: int) -> Problem:
    """The problem of one size of groups, made apart from the search."""
    if degree == 1:
        return with_degree(problem, 1)
    groups = packed(problem.cluster, degree)
    return grouped_problem(problem, TensorParallel(degree=degree, groups=groups))


def job(**fields: object) -> dict[str, object]:
    return {"microbatches": 2, "backward": "whole", "overlap_reduction": False, **fields}


@pytest.mark.parametrize("seed", range(2))
def test_bounds_hold_and_any_size_is_as_good_as_each(seed: int) -> None:
    problem = tiny_problem(seed, layers=2 + seed % 2, **job(replication=seed == 0))
    best_s = {n: brute_force(of_groups(problem, n)).time_s for n in (1, 2)}
    found = {n: solve(with_degree(problem, n), **SETTINGS) for n in (1, 2, "any")}
    for degree in (1, 2):
        assert found[degree].lower_bound_s <= best_s[degree] * (1 + 1e-9)
        assert found[degree].iteration_time_s >= best_s[degree] * (1 - 1e-9)
        assert found["any"].iteration_time_s <= found[degree].iteration_time_s * (1 + 1e-9)
    assert found["any"].lower_bound_s <= min(best_s.values()) * (1 + 1e-9)
    assert found["any"].iteration_time_s >= min(best_s.values()) * (1 - 1e-9)
    for result in found.values():
        assert verify(result.plan) == []
        assert refresh(result.plan).predicted.lower_bound_s == result.lower_bound_s
    for degree in (1, 2):
        assert prove(found[degree].plan).problems == ()


def test_the_same_plan_on_every_run() -> None:
    problem = with_degree(tiny_problem(1, **job()), "any")
    assert solve(problem, **SETTINGS).plan == solve(problem, **SETTINGS).plan


def test_what_a_bound_covers() -> None:
    problem = tiny_problem(2, **job())
    two, every = (solve(with_degree(problem, n), **SETTINGS).plan for n in (2, "any"))
    assert "in tensor-parallel groups of 2" in str(two.provenance.bound_covers)
    assert "groups of one size" in str(every.provenance.bound_covers)
    assert "over every size of tensor-parallel groups" in prove(every).problems[0]
    # Other groups are another problem: the bound is dropped.
    for plan in (two, every):
        if plan.tensor_parallel is None:
            continue
        names = list(plan.tensor_parallel.groups)
        swapped = [
            group.model_copy(update={"devices": other.devices})
            for group, other in zip(names, names[::-1], strict=True)
        ]
        parallel = plan.tensor_parallel.model_copy(update={"groups": tuple(swapped)})
        changed = refresh(plan.model_copy(update={"tensor_parallel": parallel}))
        assert changed.predicted.lower_bound_s == 0 or swapped == names
        assert verify(changed) == []


def test_a_size_without_devices_is_refused_and_left_out_of_any() -> None:
    problem = tiny_problem(4, degrees=(2, 8), **job())
    with pytest.raises(PipeplanError, match="no 8 devices of one type"):
        solve(with_degree(problem, 8), **SETTINGS)
    assert (
        "groups of 8" not in solve(with_degree(problem, "any"), **SETTINGS).plan.provenance.solver
    )


def test_a_graph_without_splits_is_refused() -> None:
    problem = tiny_problem(4, degrees=(), **job())
    for degree in (2, "any"):
        with pytest.raises(PipeplanError, match="trace the model again"):
            solve(with_degree(problem, degree), **SETTINGS)


def test_where_single_devices_are_too_small_groups_hold_the_layers() -> None:
    """Each layer's parameters fill more than half of a group's memory."""
    problem = tiny_problem(5, devices=2, **job(optimizer="sgd"))
    rows = [
        row.model_copy(update={"bytes": 600 * 2**20, "elements": 150 * 2**20})
        if row.name == "p1"
        else row
        for row in problem.graph.record.parameters
    ]
    record = problem.graph.record.model_copy(update={"parameters": tuple(rows)})
    kinds = {
        name: kind.model_copy(update={"memory_gib": 1.0, "reserved_gib": 0.0})
        for name, kind in problem.cluster.device_types.items()
    }
    small = replace(
        problem,
        graph=LayerGraph.from_record(record),
        cluster=problem.cluster.model_copy(update={"device_types": kinds}),
    )
    with pytest.raises(InfeasibleError):
        solve(with_degree(small, 1), **SETTINGS)
    found = solve(with_degree(small, "any"), **SETTINGS)
    assert found.plan.degree == 2
    # No plan of single devices fits, so that their bound does not count.
    alone = solve(with_degree(small, 2), **SETTINGS)
    assert 0.9 * alone.lower_bound_s <= found.lower_bound_s <= alone.lower_bound_s


def test_a_plan_of_groups_starts_the_search_for_another(tmp_path: Path) -> None:
    problem = with_degree(tiny_problem(6, **job()), 2)
    plan = solve(problem, **SETTINGS).plan
    again = solve(problem, time_limit_s=1e-3, deterministic=True, warm_starts=[plan])
    assert again.iteration_time_s <= plan.predicted.iteration_time_s * (1 + 1e-9)
