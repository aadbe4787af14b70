"""The changes that are valued unless told otherwise can be made and are about what binds."""

import pytest
from builders import GIGA
from hypothesis import given
from plans_by_hand import chain_plan, crowded_plan, slow_second_stage
from strategies import plans

from planner.analysis.explain import explain
from planner.analysis.what_if import default_changes, parse_change
from planner.analysis.what_if.altered import alter, unaltered
from planner.plan.plan import Plan
from planner.simulation.simulator import simulate_plan


@pytest.mark.extensive
@given(plans())
def test_the_usual_changes_can_all_be_made(plan: Plan) -> None:
    changes = default_changes(plan, explain(simulate_plan(plan)), solve_anew=True)
    assert len(set(changes)) == len(changes)
    for change in changes:
        alter(unaltered(plan), change)
        assert parse_change(str(change)) == change


def test_the_usual_changes_are_about_what_binds() -> None:
    def texts(plan: Plan) -> list[str]:
        return [str(c) for c in default_changes(plan, explain(simulate_plan(plan)))]

    assert texts(slow_second_stage()) == [
        "device d1 speed x1.2",
        "device d0 speed x1.2",
        "type unit speed x1.2",
    ]
    assert "device d0 memory x1.2" in texts(crowded_plan())
    assert "recompute a" in texts(crowded_plan())
    assert "keep a" in texts(crowded_plan(2.5, recompute=("a",)))
    slow_links = chain_plan((1, 2), (1, 2), bytes_=8 * GIGA)
    assert texts(slow_links)[:2] == [
        "link d0-hub bandwidth x2",
        "links like d0-hub bandwidth x2",
    ]
    assert "microbatches x2" in texts(chain_plan((1, 2), (1, 2), samples_per_microbatch=2))
