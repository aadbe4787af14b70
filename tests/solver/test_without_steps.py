"""Steps of a search can be left out by name, to see what each of them finds."""

import pytest
from tiny_problems import tiny_problem

from planner import PipeplanError, solve
from planner.analysis.comparison import OURS, compare
from planner.search import steps
from planner.search.partition import baselines


def test_an_independent_search_never_asks_the_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny_problem(0, layers=6, devices=3, microbatches=4)
    asked = []

    def ask(*arguments: object) -> list[object]:
        asked.append(arguments)
        return list(baselines.classic_partitions(*arguments))

    monkeypatch.setattr(steps, "classic_partitions", ask)
    for independent in (False, True):
        asked.clear()
        found = compare(
            problem, ["even"], time_limit_s=1, deterministic=True, independent=independent
        )
        assert found[0].planner == OURS
        assert (asked == []) is independent


def test_names_of_no_step_are_refused_with_the_names_there_are() -> None:
    problem = tiny_problem(0, layers=3, devices=2, microbatches=2)
    with pytest.raises(PipeplanError, match=r"no step is named 'baseline'.*baselines"):
        solve(problem, time_limit_s=1, without_steps=["baseline"])
