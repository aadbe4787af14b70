"""Why a search ended, as its result says."""

from functools import cache
from itertools import pairwise

import pytest
from builders import boundary, cluster, graph, layer, link, parameter, star

from planner import Job, Problem, Result, solve
from planner.search.budget import TimeShare
from planner.search.solve import SearchStep
from planner.units import plural


@cache
def result(time_limit_s: float = 3, gap_limit: float = 1e-4, **job: object) -> Result:
    layers = graph([layer(name) for name in "abcdef"])
    problem = Problem(
        layers, star(3), Job.model_validate({"microbatches": 4, "backward": "whole", **job})
    )
    return solve(problem, time_limit_s=time_limit_s, gap_limit=gap_limit, deterministic=True)


@pytest.mark.parametrize(
    ("settings", "ended"),
    [
        ({"replication": False}, "proved"),
        ({"gap_limit": 0.5}, "gap limit"),
        ({"time_limit_s": 1e-3}, "time limit"),
        # Only the total work bounds plans with several stages a device: no step closes that gap.
        ({"max_stages_per_device": 2, "time_limit_s": 30}, "nothing left to try"),
    ],
)
def test_the_result_says_why_the_search_ended(settings: dict, ended: str) -> None:
    found = result(**settings)
    assert found.ended == ended
    assert found.summary().endswith(f"s: {ended}")
    assert (found.status == "optimal") == (ended == "proved")


def test_only_a_search_that_ran_out_of_time_took_all_of_it() -> None:
    assert result(time_limit_s=1e-3).search_s >= 1e-3
    through = result(max_stages_per_device=2, time_limit_s=30)
    assert through.search_s < 30
    assert f"ended after {through.search_s:.1f} deterministic s: " in through.summary()


def test_ctrl_c_before_any_plan_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    steps = (SearchStep("interrupted", interrupted, TimeShare(1)),)
    monkeypatch.setattr("planner.search.solve.STEPS", steps)
    with pytest.raises(KeyboardInterrupt, match="before any plan was found"):
        result()


def test_one_of_a_thing_is_singular() -> None:
    assert [plural(count, "stage") for count in (0, 1, 2, 5000)] == [
        *("0 stages", "1 stage", "2 stages", "5,000 stages")
    ]
    assert "1 stage on 2 of 3 devices, " in result(gap_limit=0.5).summary()


@pytest.mark.filterwarnings("error")
def test_devices_that_nothing_joins_to_the_plan_are_named() -> None:
    rows = [layer(name, parameters=[f"p{name}"]) for name in "abcdef"]
    cuts = [boundary(u, v) for u, v in pairwise("abcdef")]
    layers = graph(rows, cuts, [parameter(f"p{name}") for name in "abcdef"])
    machines = cluster(["d0", "d1", "d2"], [link("d0", "d1", 100)])
    found = solve(Problem(layers, machines, Job()), time_limit_s=1, deterministic=True)
    assert set(found.plan.ranks) == {"d0", "d1"}
    assert found.unjoined_devices == ("d2",)
    assert result(gap_limit=0.5).unjoined_devices == ()
