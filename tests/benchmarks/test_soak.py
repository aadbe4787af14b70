"""The soak in short: ranks are killed and stopped at random, and nothing hangs or is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.soak import hostile
from benchmarks.soak.figures import Hit, figures_of
from benchmarks.soak.history import GroupWait, History, Life
from benchmarks.soak.run import STRATEGIES, run_cases
from benchmarks.soak.waits import LongGap, long_gaps, read_waits
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


def test_a_long_gap_tells_what_it_waited_for(tmp_path: Path) -> None:
    """The push and the group overlap, as they may on two threads; short waits are left out."""
    lives = [Life(pipeline, hello_s=0.0) for pipeline in range(3)]
    lives[0].told[0] = {1: 9.0, 2: 9.5, 3: 12.0}
    lives[1].told[0] = {1: 9.0, 2: 9.5, 3: 11.0, 4: 11.1}
    history = History(1, lives=lives)
    history.group_waits = [GroupWait(0, 10.6, 11.6, "2 was given up")]
    history.group_waits += [GroupWait(1, 9.6, 9.7, "0 asked after step 2")]
    log = tmp_path / "waits.jsonl"
    rank = {"pipeline": 0, "place": 0}
    rows = [
        {"why": "push", "whom": [2, 1], "at_s": 9.6, "seconds": 1.2, "outcome": "CallError"},
        {"why": "group", "whom": [], "at_s": 10.6, "seconds": 1.0, "outcome": "answered"},
    ]
    log.write_text("".join(json.dumps({**rank, **row}) + "\n" for row in rows))
    figures = figures_of(history, [Hit("stop", 9.7, 2, seconds=2.0)], [[], [], []], "ad_psgd")
    found = long_gaps(history, figures, read_waits(log), bar_s=2.0, most=2)
    event = "stop of 2 for 2.0 s, never given up"
    told = "push of 2 and 1 (CallError) 1.20; group, until 2 was given up 1.00; else 0.50"
    assert found == [LongGap(event, 0, 2.5, told), LongGap(event, 1, 1.5, "else 1.50")]
    assert long_gaps(history, figures, [], bar_s=2.0, most=0)[0].pipeline == 0


@pytest.mark.extensive
def test_hostile_callers_end_no_server_and_take_little_memory() -> None:
    assert hostile.main(["--only", "callers", "--number", "60"]) == 0
