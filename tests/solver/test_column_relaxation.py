"""The bound over plans with several stages a device, against every plan of tiny problems."""

import random
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from tiny_problems import tiny_problem

from benchmarks.plans.oracle import optimum_below
from planner import Problem
from planner.search.budget import Clock
from planner.search.partition.bounds.partition import work_bound_s
from planner.search.partition.chain import Chain
from planner.search.partition.relaxations.column_figures import ColumnFigures
from planner.search.partition.relaxations.column_knapsack import ColumnKnapsack
from planner.search.partition.relaxations.column_pairs import ColumnPairs, interval_pairs
from planner.search.partition.relaxations.column_relaxation import ColumnRelaxation
from planner.space import Backward

ROUNDING = 1 + 1e-6
"""The oracle rounds durations down to ticks."""


def relaxation_of(problem: Problem) -> ColumnRelaxation:
    clock = Clock(1e9, deterministic=True)
    return ColumnRelaxation(Chain(problem), problem.cluster.link_table, clock)


def optimum_s(problem: Problem) -> float:
    one_by_one_s = problem.job.microbatches * float(Chain(problem).work_s.sum(axis=1).max())
    return optimum_below(problem, 1.5 * one_by_one_s).time_s


def bound_s(problem: Problem, known_s: float) -> float:
    return relaxation_of(problem).bound_s(known_s, tolerance=1e-4)


def drawn(seed: int, *, replication: bool, devices: int = 2) -> Problem:
    """A random problem of two or three stages a device."""
    rng = random.Random(seed)
    return tiny_problem(
        seed,
        layers=3 if replication or devices > 2 else rng.choice([3, 4]),
        devices=devices,
        microbatches=rng.choice([2, 3]),
        types=rng.choice([1, 2]),
        replication=replication,
        max_stages_per_device=2 if replication else rng.choice([2, 2, 3]),
        tied=rng.random() < 0.4,
        topology=rng.choice(["mesh", "mesh", "switches"]),
        memory_mib=4000.0,
        cut_mib=rng.choice([0.5, 2.0, 7.5]),
        link_scale=rng.choice([0.3, 1.0, 3.0]),
        backward=rng.choice(["whole", "any", "split"]),
    )


def held(problem: Problem) -> float:
    """Return the bound as a share of the best plan's time, which it does not exceed."""
    best_s = optimum_s(problem)
    found_s = bound_s(problem, 1.5 * best_s)
    assert work_bound_s(Chain(problem)) <= found_s * ROUNDING
    assert found_s <= best_s * ROUNDING
    return found_s / best_s


SMALLEST: dict[str, Any] = {"layers": 3, "devices": 2, "microbatches": 2, "memory_mib": 4000.0}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("replication", [False, True])
def test_no_plan_with_two_stages_a_device_beats_the_bound(seed: int, replication: bool) -> None:
    backward = ("whole", "any", "split")[seed]
    held(
        tiny_problem(
            seed,
            replication=replication,
            max_stages_per_device=2,
            backward=backward,
            tied=seed == 1,
            **SMALLEST,
        )
    )


def test_replicas_of_neighbouring_stages_need_no_hop_between_them() -> None:
    """Both stages of the best plan lie on both devices."""
    problem = tiny_problem(
        45, replication=True, max_stages_per_device=2, cut_mib=2, link_scale=0.3, **SMALLEST
    )
    held(problem)


@pytest.mark.extensive
@pytest.mark.parametrize("first", range(0, 40, 4))
@pytest.mark.parametrize("replication", [False, True])
def test_no_plan_of_any_tiny_problem_beats_the_bound(first: int, replication: bool) -> None:
    shares = [held(drawn(seed, replication=replication)) for seed in range(first, first + 4)]
    assert max(shares) > 0.9


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_on_three_devices_beats_the_bound(seed: int) -> None:
    held(drawn(seed, replication=False, devices=3))


def test_layers_that_cannot_be_shared_out_evenly_raise_the_bound() -> None:
    problem = tiny_problem(
        0, replication=False, max_stages_per_device=2, **{**SMALLEST, "microbatches": 12}
    )
    work_s = Chain(problem).work_s[0]
    parts = ([layer in held for layer in range(3)] for held in combinations(range(3), 1))
    fair_s = min(max(work_s[part].sum(), work_s[~np.array(part)].sum()) for part in parts)
    assert bound_s(problem, 1e3) >= 12 * fair_s * (1 - 1e-3)


def test_the_proof_is_of_the_bound_and_in_few_decimals() -> None:
    problem = tiny_problem(1, replication=False, max_stages_per_device=2, **SMALLEST)
    relaxation = relaxation_of(problem)
    found_s = relaxation.bound_s(1.0)
    proof = relaxation.proof
    assert proof is not None
    assert proof.limit_s == pytest.approx(found_s)
    assert proof.most_stages == 2
    assert all(round(price, 4) == price and 0 <= price <= 1 for price in proof.prices)
    # What the figures alone say of the proof: layers pay more than devices earn.
    figures = ColumnFigures(Chain(problem), problem.cluster.link_table)
    knapsack = ColumnKnapsack(figures, proof.limit_s, proof.steps, proof.most_stages)
    columns = knapsack.best(np.array(proof.prices))
    most = [max((c.value for c in columns if c.kind == k), default=0) for k in range(figures.kinds)]
    assert figures.microbatches * sum(proof.prices) > float(figures.counts @ most)


@pytest.mark.parametrize("seed", range(4))
def test_the_knapsack_finds_the_best_of_all_sets_of_layers(seed: int) -> None:
    problem = tiny_problem(
        seed,
        layers=6,
        devices=2,
        microbatches=3,
        types=2,
        replication=False,
        max_stages_per_device=2,
        memory_mib=4000.0,
        link_scale=100.0,
    )
    figures = ColumnFigures(Chain(problem), problem.cluster.link_table)
    rng = random.Random(seed)
    prices = np.array([rng.random() for _ in range(6)])
    limit_s, steps = 0.5 * problem.job.microbatches * float(figures.chain.work_s[0].sum()), 4000
    columns = ColumnKnapsack(figures, limit_s, steps, most_runs=2).best(prices)
    for kind in range(figures.kinds):
        found = max(column.value for column in columns if column.kind == kind)
        assert found == pytest.approx(_best_of_all_sets(figures, kind, limit_s, prices), rel=1e-2)
        best = max((c for c in columns if c.kind == kind), key=lambda c: c.value)
        assert float(best.taken @ prices) == pytest.approx(found)


def _best_of_all_sets(
    figures: ColumnFigures, kind: int, limit_s: float, prices: np.ndarray[Any, Any]
) -> float:
    """Return the most that layers in two runs pay, by the head and work of their device alone.

    With links so fast the way home and the messages take less than the work does.
    """
    best, count = 0.0, figures.microbatches
    for size in range(1, figures.length + 1):
        for held in map(list, combinations(range(figures.length), size)):
            runs = 1 + sum(later - earlier > 1 for earlier, later in pairwise(held))
            head_s = figures.forward_s.min(axis=0)[: held[0]].sum() + figures.hop_s[kind, held[0]]
            work_s = (figures.forward_s + figures.backward_s)[kind, held].sum() * count
            home_s = figures.gradient_s.min(axis=0)[: held[0]].sum() + figures.last_s
            if runs <= 2 and head_s + work_s + home_s <= limit_s:
                best = max(best, count * float(prices[held].sum()))
    return best


@pytest.mark.parametrize("backward", ["whole", "split"])
def test_the_best_column_of_two_stages_is_the_best_of_all_pairs(backward: Backward) -> None:
    """With links so fast that neither messages nor reductions count."""
    problem = tiny_problem(
        3,
        types=2,
        replication=True,
        max_stages_per_device=2,
        backward=backward,
        link_scale=1e6,
        **{**SMALLEST, "layers": 4, "microbatches": 4},
    )
    figures = ColumnFigures(Chain(problem), problem.cluster.link_table)
    limit_s = 1.1 * work_bound_s(figures.chain)
    columns = ColumnPairs(figures, limit_s, interval_pairs(4)).best(np.ones(4))
    for kind in range(figures.kinds):
        found = max(column.value for column in columns if column.kind == kind)
        adjoining = [(a, b, b, e) for a, b, e in combinations(range(5), 3)]
        pairs = [*combinations(range(5), 4), *adjoining]
        taken = product(pairs, range(5), range(1, 5))
        best = max(
            n1 * (b - a) + n2 * (e - c)
            for (a, b, c, e), n1, n2 in taken
            if _time_of_pair(figures, kind, (a, b, c, e), n1, n2) <= limit_s * (1 + 1e-3)
        )
        assert found == best


def _time_of_pair(
    figures: ColumnFigures, kind: int, cuts: tuple[int, ...], n1: int, n2: int
) -> float:
    """Return what two stages on one device take at least, by the formula of the module."""
    a, b, c, e = cuts
    parts = figures.forward_s[kind], figures.backward_s[kind], figures.gradient_s[kind]
    f1, b1, g1 = (float(part[a:b].sum()) for part in parts)
    f2, b2, g2 = (float(part[c:e].sum()) for part in parts)
    head_a, head_c = (float(figures.forward_s.min(axis=0)[:cut].sum()) for cut in (a, c))
    home_a, home_c = (float(figures.gradient_s.min(axis=0)[:cut].sum()) for cut in (a, c))
    if n1 == 0:
        return head_c + n2 * f2 + max(n2 * b2, home_c + n2 * g2)
    before = max(head_a + n1 * f1 + n2 * f2, head_c + n2 * f2)
    return before + max(n1 * b1 + n2 * b2, home_a + n1 * g1 + n2 * g2, home_c + n2 * g2)
