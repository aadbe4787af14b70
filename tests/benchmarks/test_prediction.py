"""The benchmark of predictions: its plans hold, its figures are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prediction.__main__ import chosen, parser
from benchmarks.prediction.plans import MODELS, Model, plans_of, predicted_again, problem_of
from benchmarks.prediction.run import Row, spread, trained, verdicts
from benchmarks.prediction.worker import COSTS
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.verification import verify

TINY = Model("tiny", "models.gpt:gpt_tiny", 2, {"layers": 3})


def row(**fields: object) -> Row:
    given = {
        "model": "gpt",
        "plan": "even",
        "ranks": 2,
        "predicted_s": 1.1,
        "measured_s": 1.0,
        "spread": 0.01,
        "predicted_bytes": 98,
        "measured_bytes": 100,
        "lowest": -0.02,
        **fields,
    }
    return Row(**given)


def test_every_plan_of_a_model_holds_and_no_two_are_alike() -> None:
    cluster = Cluster.load("examples/clusters/this_machine.toml")
    problem = problem_of(TINY, TINY.traced(), cluster, None)
    plans = dict(plans_of(problem, time_limit_s=1.0))
    assert len(plans) == 5
    assert all(predicted_again(plan, problem) == plan for plan in plans.values())
    assert all(verify(plan) == [] for plan in plans.values())
    assert len({str(plan.orders) + str(plan.stages) for plan in plans.values()}) == 5
    assert any("W" in text for text in plans["even, zero bubble"].orders.values())
    assert plans["interleaved, recomputed"].stages[0].recompute


@pytest.mark.extensive
def test_a_plan_is_trained_in_turns_and_its_layers_profiled_between_them(tmp_path: Path) -> None:
    cluster, graph = Cluster.load("examples/clusters/this_machine.toml"), TINY.traced()
    plans = dict(plans_of(problem_of(TINY, graph, cluster, None), time_limit_s=1.0))
    plan = plans["even, 1F1B"]
    seconds, peaks = trained("tiny", plan, 2, 3, tmp_path)
    assert [len(turn) for turn in seconds] == [3, 3]
    assert all(second > 0 for turn in seconds for second in turn)
    assert len(peaks) == len(plan.ranks)
    assert all(peaks)
    for turn in range(3):
        problem = problem_of(TINY, graph, cluster, tmp_path / COSTS.format(turn))
        measured = [layer.measured for layer in problem.graph.record.layers]
        assert all("CPU-core" in row for row in measured)
        assert verify(predicted_again(plan, problem)) == []


def test_the_spread_is_between_the_quartiles() -> None:
    assert spread([1.0]) == 0.0
    assert spread([0.9, 1.0, 1.2, 1.0, 5.0]) == pytest.approx(0.2)


def test_bars_are_told_with_what_was_reached() -> None:
    low = {"lowest": -0.04, "predicted_bytes": 96}
    told = verdicts([row(), row(predicted_s=1.2, **low), row(ranks=4, predicted_s=1.05)])
    assert told == [
        "median error of the iteration time, 2 ranks: 15.0% (bar 4%): **not reached**",
        "worst error of the iteration time, 2 ranks: 20.0% (bar 10%): **not reached**",
        "median error of the iteration time, 4 ranks: 5.0% (bar 8%): reached",
        "worst error of the iteration time, 4 ranks: 5.0% (bar 15%): reached",
        "worst error of the heaviest rank's peak memory: 4.0% (bar 5%): reached",
        "furthest below a rank's peak memory: 4.0% (bar 3%): **not reached**",
    ]


def test_models_are_chosen_by_name_or_made_of_any_factory() -> None:
    assert chosen(parser().parse_args([])) == list(MODELS)
    assert [m.name for m in chosen(parser().parse_args(["--short"]))] == ["gpt", "unet"]
    words = ["--model", "lib.nets:net", "--set", "width=8", "--samples", "3"]
    (own,) = chosen(parser().parse_args(words))
    assert (own.factory, own.samples, dict(own.arguments)) == ("lib.nets:net", 3, {"width": 8})
    with pytest.raises(PipeplanError, match="--models: nonsense is not known"):
        chosen(parser().parse_args(["--models", "gpt,nonsense"]))
