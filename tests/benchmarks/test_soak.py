"""The soak in short: ranks are killed and stopped at random, and nothing hangs or is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import hostile
from benchmarks.soak.figures import History, Hit, Life, figures_of
from benchmarks.soak.run import STRATEGIES, run_cases
from benchmarks.soak.world import Case
from planner.sync.simulation.comparison import ALL_STRATEGIES
from planner.sync.strategies import SYNCHRONOUS, sync_name


def test_every_strategy_whose_pipelines_train_by_themselves_is_tried() -> None:
    """Of the rest, whose ranks are one job, a lost rank ends the training."""
    names = {sync_name(sync) for sync in ALL_STRATEGIES if sync.strategy not in SYNCHRONOUS}
    assert set(STRATEGIES) == names


@pytest.mark.extensive
@pytest.mark.parametrize(
    ("strategy", "pipelines", "places"),
    [("semi_decentralized", 4, 1), ("parameter_server", 2, 2)],
)
def test_training_survives_random_kills_and_stops(
    tmp_path: Path, strategy: str, pipelines: int, places: int
) -> None:
    case = Case(strategy, pipelines, places, events=3, steps=200, seed=1)
    (row,) = run_cases([case], tmp_path)
    assert row.kills + row.stops + row.coordinators == case.events
    assert not row.hung
    assert row.strange == 0
    assert row.faults == ()
    assert row.shares == case.steps * case.pipelines
    assert row.returns >= row.kills


def test_gaps_count_for_a_hit_only_if_nothing_else_was_hit_meanwhile() -> None:
    history = History(1, lives=[Life(pipeline, hello_s=0.0) for pipeline in range(3)])
    hits = [
        Hit("kill", 10.0, 0),
        Hit("kill", 10.4, 1, is_alone=False),
        Hit("stop", 20.0, 2, seconds=0.5),
        Hit("kill", 30.0, 0),
    ]
    found = figures_of(history, hits, [[], [], []], "ad_psgd")
    assert [figures.is_alone for figures in found] == [False, False, True, True]


@pytest.mark.extensive
def test_hostile_callers_end_no_server_and_take_little_memory() -> None:
    assert hostile.main(["--only", "callers", "--number", "60"]) == 0
