"""What is refused or left out, what an interruption keeps, and that seeds decide."""

import pytest
from plans_by_hand import crowded_plan, slow_second_stage

import planner.analysis.what_if.search as what_if_search
from planner.analysis.what_if import WhatIf, parse_change, what_if
from planner.errors import PipeplanError


def test_a_plan_beyond_memory_has_nothing_to_compare_with() -> None:
    with pytest.raises(PipeplanError, match="overflows memory"):
        what_if(crowded_plan(0.5))


def test_all_changes_that_cannot_be_made_are_told() -> None:
    changes = [parse_change(text) for text in ("recompute x", "device d9 speed x2", "another d0")]
    with pytest.raises(PipeplanError) as error:
        what_if(slow_second_stage(), changes)
    assert len(error.value.problems) == 2


def test_changes_beyond_a_quick_answer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if_search, "MOST_EVENTS", 40)
    changes = [parse_change(f"device d1 speed x{factor}") for factor in (2, 3, 4)]
    found = what_if(slow_second_stage(), changes)
    assert (len(found.values), found.left_out) == (1, 2)
    thorough = what_if(
        slow_second_stage(), changes, solve_anew=True, deterministic=True, time_limit_s=0.1
    )
    assert (len(thorough.values), thorough.left_out) == (3, 0)


SEARCH = {"solve_anew": True, "deterministic": True, "time_limit_s": 0.5}


def test_the_same_seed_gives_the_same_values() -> None:
    changes = [parse_change(text) for text in ("device d0 memory x2", "with split", "another d0")]
    first, second = (what_if(crowded_plan(), changes, seed=3, **SEARCH) for _ in range(2))
    assert first == second
    assert first.solved_anew


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(what_if_search, "solve", stop)
    found: WhatIf = what_if(crowded_plan(), [parse_change("device d0 memory x2")], **SEARCH)
    assert found.interrupted
    assert found.values[0].iteration_time_s == 15
    assert found.values[0].lower_bound_s is None


def test_steps_are_told_as_they_are_through() -> None:
    told: list = []
    what_if(crowded_plan(), [parse_change("device d0 memory x2")], progress=told.append, **SEARCH)
    assert [(row.step, row.change) for row in told if row.step == "solved"] == [
        ("solved", None),
        ("solved", "device d0 memory x2"),
    ]
    elapsed = [row.elapsed_s for row in told]
    assert elapsed == sorted(elapsed)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(PipeplanError, match="time_limit_s"):
        what_if(crowded_plan(), time_limit_s=0)
