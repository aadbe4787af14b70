"""Workers that leave and return, under every strategy: nobody waits for ever."""

from dataclasses import replace

import pytest
from small_worlds import pipeline_world, run_of, small_world

from planner.errors import PipeplanError
from planner.sync.simulation.comparison import ALL_STRATEGIES
from planner.sync.strategies import sync_name

NAMES = [sync_name(sync) for sync in ALL_STRATEGIES]
ITERATIONS = 25
SLOWNESS = [
    "drift:0.2+sleep:0.1:0.3",
    "fault:0:0",
    "fault:0:1:2+fault:1:1:2",
    "fault:0:0.15:0.16+fault:0:1.05:1.06+slow:1x3",
]


@pytest.mark.extensive
@pytest.mark.parametrize("slowness", SLOWNESS)
@pytest.mark.parametrize("name", NAMES)
def test_all_iterations_are_done_whoever_leaves(name: str, slowness: str) -> None:
    two_places = pipeline_world(5)
    for world in (small_world(3), replace(two_places, pipelines_per_node=2)):
        run = run_of(name, world, slowness, ITERATIONS)
        assert sum(run.done) >= ITERATIONS * world.workers
        assert all(observation.loss < 2 for observation in run.observations)


@pytest.mark.parametrize("name", NAMES)
def test_one_pipeline_trains_by_itself(name: str) -> None:
    assert run_of(name, small_world(1), iterations=ITERATIONS).done == (ITERATIONS,)


@pytest.mark.extensive
@pytest.mark.parametrize(("leaves_s", "away_s"), [(0, 5.0), (0.05, 0.02), (1, 5.0)])
@pytest.mark.parametrize("name", NAMES)
def test_time_in_which_nobody_is_there_passes(name: str, leaves_s: float, away_s: float) -> None:
    until_s = leaves_s + away_s
    slowness = "+".join(f"fault:{worker}:{leaves_s}:{until_s}" for worker in range(4))
    steady, left = (run_of(name, small_world(4), text, 30) for text in ("steady", slowness))
    # Who is in no step with others does its iteration anew.
    assert left.time_s >= steady.time_s + 0.9 * away_s


def test_a_round_is_lost_if_nobody_is_there_and_nothing_more() -> None:
    steady = run_of("all_reduce", small_world(2), "steady", 30)
    left = run_of("all_reduce", small_world(2), "fault:0:0.05:0.3+fault:1:0.1:0.2", 30)
    # Until 0.2 s nothing is done, then worker 1 is by itself: at most one round more.
    round_s = steady.time_s / 30
    assert 0.2 < left.time_s - steady.time_s <= 0.2 + round_s


def test_a_run_from_which_all_leave_for_good_is_refused() -> None:
    with pytest.raises(PipeplanError, match="all workers leave for good"):
        run_of("ad_psgd", small_world(2), "fault:0:1+fault:1:2")


@pytest.mark.parametrize("strategy", ["semi_decentralized", "semi_decentralized:overlap=true"])
def test_who_returns_begins_on_the_others_weights(strategy: str) -> None:
    run = run_of(strategy, slowness="fault:2:1:30", iterations=400)
    after = next(observation for observation in run.observations if observation.at_s > 31)
    assert after.distance < 0.1
