"""Deciding all partitions of tiny problems, against every plan of them."""

import pytest
from test_proved_bounds import ROUNDING, drawn, last
from tiny_problems import seeds

from benchmarks.plans.oracle import faster_plan, optimum_below
from planner import PipeplanError, Problem
from planner.bounds import prove
from planner.costs.stage_table import StageTable
from planner.search.cp_sat.decide import Decided, Limits, decide, may_decide
from planner.variants.problems import with_job


def decided(problem: Problem, best_s: float, bound_s: float, limit_s: float = 5.0) -> Decided:
    """Return the last row, with the best plan of all rows."""
    spent_s = [0.0]

    def spend(seconds: float) -> None:
        spent_s[0] += seconds

    limits = Limits(lambda: limit_s - spent_s[0], spend, deterministic=True)
    better, rows = None, [Decided(bound_s, None)]
    for row in decide(problem, StageTable(problem), best_s, bound_s, limits):
        better, rows = row.better or better, [*rows, row]
    assert [row.bound_s for row in rows] == sorted(row.bound_s for row in rows)
    return Decided(rows[-1].bound_s, better)


@pytest.mark.parametrize("seed", seeds(6, 24))
def test_the_decided_bound_is_below_every_plan_and_meets_the_best_one(seed: int) -> None:
    problem = drawn(8 * seed + seed % 2)  # every other one has little memory
    bound_s = last(prove(problem)).bound_s
    optimum = optimum_below(problem, 2 * bound_s)
    if optimum.best is None:
        return
    found = decided(problem, 1.2 * optimum.time_s, bound_s)
    assert bound_s <= found.bound_s <= optimum.time_s / ROUNDING
    if found.better is not None:
        assert found.better.iteration_time_s >= optimum.time_s * ROUNDING
        assert not found.better.overflow_bytes
    if seed % 2 == 0:  # what fits at once is a matter of orders alone
        assert found.better is not None
        time_s = found.better.iteration_time_s
        # The oracle's optimum is that of links which are not shared; replays say what there is.
        assert time_s <= optimum.time_s * 1.01 or faster_plan(problem, time_s / 1.01).time_s is None


def test_bounds_are_raised_to_the_best_plan() -> None:
    """They would all be sound if nothing was decided."""
    gaps = []
    for seed in range(0, 80, 8):
        problem = drawn(seed)
        bound_s = last(prove(problem)).bound_s
        optimum_s = optimum_below(problem, 3 * bound_s).time_s
        gaps.append(optimum_s / decided(problem, optimum_s, bound_s).bound_s - 1)
    assert sorted(gaps)[len(gaps) // 2] < 2e-4


def test_what_is_not_decided_is_refused() -> None:
    problem = with_job(drawn(0), max_stages_per_device=2)
    assert not may_decide(problem)
    with pytest.raises(PipeplanError, match="one stage a device"):
        list(decide(problem, StageTable(problem), 1.0, 0.1, Limits(lambda: 1.0)))
