"""The training inside the simulation: gradients, exactness, mixing."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_worlds import run_of, small_world

from planner.sync.simulation.observing import mixing_matrix, spectral_gap
from planner.sync.simulation.training import (
    DIMENSION,
    SAMPLES,
    Learning,
    LearningProblem,
    Training,
    parts_of,
)

GROUPED = [
    "ad_psgd",
    "ad_psgd:pairs=matching",
    "partial_all_reduce",
    "partial_all_reduce:overlap=true",
    "partial_all_reduce:schedule=static",
    "semi_decentralized",
    "semi_decentralized:overlap=true",
]
ALONE = [
    "parameter_server:mode=async",
    "eager_parameter_server",
    "wave_synchronous",
    "cross_iteration",
]


def test_gradients_are_those_of_the_loss() -> None:
    problem, draw = LearningProblem(3), np.random.default_rng(0)
    weights = draw.normal(size=(1, DIMENSION))
    every = np.arange(SAMPLES)[None]
    found = problem.gradients(weights, every)[0]
    for index in draw.choice(DIMENSION, 20, replace=False):
        step = np.zeros(DIMENSION)
        step[index] = 1e-5
        slope = (problem.loss(weights[0] + step) - problem.loss(weights[0] - step)) / 2e-5
        assert found[index] == pytest.approx(slope, abs=1e-7)


def test_gradients_of_many_workers_are_those_of_each() -> None:
    problem, draw = LearningProblem(), np.random.default_rng(1)
    weights = draw.normal(size=(5, DIMENSION))
    samples = problem.samples_of(np.arange(5), np.full(5, 7), 8)
    together = problem.gradients(weights, samples)
    for row in range(5):
        alone = problem.gradients(weights[row : row + 1], samples[row : row + 1])[0]
        assert np.array_equal(together[row], alone)


def test_a_gradient_belongs_to_the_weights_it_was_begun_on() -> None:
    training = Training(2, Learning())
    for worker in (0, 1):
        training.begin(worker, 1)
    training.weights[0] += 1.0
    late = training.gradient(0).copy()
    fresh = Training(2, Learning())
    fresh.begin(0, 1)
    assert np.array_equal(late, fresh.gradient(0))


def test_samples_differ_between_workers_iterations_and_seeds() -> None:
    one = LearningProblem().samples_of(np.arange(50), np.full(50, 1), 8)
    assert len(np.unique(one)) > 350
    assert not np.array_equal(one, LearningProblem().samples_of(np.arange(50), np.full(50, 2), 8))
    assert not np.array_equal(one, LearningProblem(1).samples_of(np.arange(50), np.full(50, 1), 8))


def test_exact_strategies_train_alike() -> None:
    exact = ["all_reduce", "all_reduce:overlap=false", "fused", "decoupled", "parameter_server"]
    waves = "wave_synchronous:distance=0"
    losses = {
        run_of(strategy, slowness="sleep:0.2:0.1").observations[-1].loss for strategy in exact
    }
    assert len(losses) == 1
    # It adds the changes of momentum steps in its place, in another order.
    with_waves = run_of(waves, slowness="sleep:0.2:0.1").observations[-1].loss
    assert with_waves == pytest.approx(losses.pop(), rel=1e-9)


@pytest.mark.parametrize("distance", [0, 1, 3])
@pytest.mark.parametrize("slowness", ["slow:1x4", "sleep:0.2:0.3", "slow:2x3+fault:0:1:2"])
def test_simulated_waves_stay_within_their_distance(distance: int, slowness: str) -> None:
    run = run_of(f"wave_synchronous:distance={distance}", slowness=slowness)
    assert run.staleness == distance


@pytest.mark.parametrize("strategy", ["all_reduce", *GROUPED, *ALONE])
def test_the_same_seed_gives_the_same_run(strategy: str) -> None:
    slowness = "drift:0.1+sleep:0.1:0.3+fault:2:1:2"
    first, again = (run_of(strategy, slowness=slowness, seed=4) for _ in range(2))
    assert first == again
    assert run_of(strategy, slowness=slowness, seed=5) != first


@pytest.mark.parametrize("strategy", ["all_reduce", *GROUPED, *ALONE])
def test_every_strategy_learns(strategy: str) -> None:
    run = run_of(strategy, slowness="slow:0x2", iterations=300)
    # The loss begins at about log 4 of four classes.
    assert run.observations[0].loss > 1.3
    assert run.observations[-1].loss < 0.7
    assert 2400 <= sum(run.done) < 2408
    assert 0 <= run.idle_share < 1


def test_averaging_keeps_the_mean() -> None:
    """Of all weights, with a gradient of zero: the learning rate is next to nothing."""
    from planner.sync.simulation.run import Scenario, simulate_sync
    from planner.sync.strategies import parse_sync

    for strategy in GROUPED:
        still = Scenario(small_world(), 20, learning=Learning(learning_rate=1e-300))
        observations = simulate_sync(still, parse_sync(strategy)).observations
        assert observations[-1].loss == pytest.approx(observations[0].loss, abs=1e-12)
        assert observations[-1].distance < 1e-12


@given(data=st.data(), workers=st.integers(2, 12))
@settings(max_examples=50, deadline=None)
def test_mixing_matrices_are_doubly_stochastic(data: st.DataObject, workers: int) -> None:
    members = st.sets(st.integers(0, workers - 1), min_size=2)
    groups = data.draw(st.lists(members.map(sorted).map(tuple), max_size=20))
    matrix = mixing_matrix(groups, workers)
    assert matrix.sum(axis=0) == pytest.approx(np.ones(workers))
    assert np.allclose(matrix, matrix.T)
    assert 0 <= spectral_gap(groups, workers) <= 1


def test_a_round_of_disjoint_groups_is_their_matrix() -> None:
    expected = np.kron(np.eye(3), np.full((2, 2), 0.5))
    assert mixing_matrix([(0, 1), (2, 3), (4, 5)], 6) == pytest.approx(expected)


def test_the_spectral_gap_tells_mixing_from_none() -> None:
    everybody = tuple(range(80))
    assert spectral_gap([everybody] * 5, 80) == pytest.approx(1)
    assert spectral_gap([(0, 1), (2, 3)] * 5, 4) == pytest.approx(0, abs=1e-12)
    assert spectral_gap([], 4) == 0
    # All pairs of 4: W = I - L/2 a pair, two pairs a round; the mean Laplacian has eigenvalue
    # 2 * 4 / (2 * 6).
    assert spectral_gap(list(combinations(range(4), 2)), 4) == pytest.approx(2 / 3)


def test_parts_cover_all_parameters() -> None:
    parts = parts_of((1, 0, 3), 100)
    assert [(part.start, part.stop) for part in parts] == [(0, 25), (25, 25), (25, 100)]
