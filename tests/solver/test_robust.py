"""Robust plans: hardly slower than the fastest, and better at keeping their time."""

import numpy as np
import pytest
from tiny_problems import tiny_problem, two_stages_or_one

from planner import Noise, PipeplanError, Problem, Result, simulate, solve, verify
from planner.search.choices import SLOWER
from planner.simulation.noise import sample_times_s
from planner.simulation.timeline import Timeline

NOISE = Noise(jitter=0.2, samples=400)


def percentile_s(timeline: Timeline, noise: Noise = NOISE) -> float:
    return float(np.percentile(sample_times_s(timeline, noise), 95))


OFTEN_SLOW = Noise(jitter=0, slow_probability=0.03, samples=1000)
"""One device is slow in 3 % of iterations, one of two in 5.9 %: the 95th percentile tells."""


def solved(robust: bool | Noise, problem: Problem | None = None) -> Result:
    return solve(
        problem or two_stages_or_one(), time_limit_s=0.5, deterministic=True, robust=robust
    )


def test_a_robust_plan_may_be_slower_and_says_so() -> None:
    fastest, robust = solved(robust=False), solved(robust=OFTEN_SLOW)
    assert fastest.status == "optimal"
    assert fastest.robustness is None
    assert fastest.iteration_time_s == pytest.approx(1.99)
    assert len(fastest.plan.ranks) == 2
    assert robust.iteration_time_s == pytest.approx(2.01)
    assert len(robust.plan.ranks) == 1
    # What is proved is about the time without noise: the search is done, the plan not optimal.
    assert robust.status == "feasible"
    assert robust.ended == "proved"
    assert robust.lower_bound_s == fastest.lower_bound_s
    assert robust.gap == pytest.approx(2.01 / 1.99 - 1, abs=1e-4)
    assert robust.robustness is not None
    assert robust.robustness.fastest.predicted_s == fastest.iteration_time_s
    assert robust.robustness.times.percentile_95_s == percentile_s(
        simulate(robust.plan), OFTEN_SLOW
    )
    assert robust.robustness.fastest.percentile_95_s == percentile_s(
        simulate(fastest.plan), OFTEN_SLOW
    )
    assert f"chosen for robustness under noise ({OFTEN_SLOW})" in robust.plan.provenance.solver
    assert "robust" not in fastest.plan.provenance.solver
    assert "the fastest plan found takes 1990 ms" in robust.summary()
    assert not verify(robust.plan)


def test_rare_slowness_changes_nothing() -> None:
    rare = Noise(jitter=0, slow_probability=0.001, samples=1000)
    result = solved(robust=rare)
    assert result.status == "optimal"
    assert result.iteration_time_s == pytest.approx(1.99)
    assert result.robustness is not None
    assert result.robustness.times.predicted_s <= result.robustness.fastest.predicted_s


@pytest.mark.parametrize("seed", range(2))
def test_robust_plans_hold_and_are_the_same_every_time(seed: int) -> None:
    problem = tiny_problem(seed, layers=5, devices=3, microbatches=6)
    result = solved(robust=True, problem=problem)
    assert result.plan == solved(robust=True, problem=problem).plan
    assert not verify(result.plan)
    assert result.robustness is not None
    assert result.robustness.noise == Noise(seed=0)
    fastest_s = result.robustness.fastest.predicted_s
    assert result.lower_bound_s <= fastest_s == result.history[-1].iteration_time_s
    assert fastest_s <= result.iteration_time_s <= (1 + SLOWER) * fastest_s


def test_a_wrong_noise_is_refused() -> None:
    with pytest.raises(PipeplanError, match="jitter: 20 is not"):
        solved(robust=Noise(jitter=20))
