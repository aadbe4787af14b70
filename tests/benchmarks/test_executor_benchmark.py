"""``benchmarks.executor``: random plans train as a single process does, and the table says so."""

import json
import random
import sys

import pytest
from warm_python import warm_python

from benchmarks.executor import __main__ as executor
from benchmarks.executor import freedoms
from benchmarks.executor import parity as executor_parity
from benchmarks.executor.features import FEATURES
from benchmarks.executor.parity import Outcome, summary
from benchmarks.executor.plans import (
    MAX_MICROBATCHES,
    MAX_REPLICAS,
    MAX_STAGES,
    PRECISIONS,
    random_training,
)
from benchmarks.executor.single_process import Alone, Held, error_of_training
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync
from planner.prediction import with_strategy
from planner.verification import verify

pytestmark = pytest.mark.extensive


@pytest.fixture(autouse=True)
def _ranks_share_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("PYTHON_EXEC", warm_python())  # What torchrun starts ranks with.


def test_random_trainings_agree_with_a_single_process(capsys: pytest.CaptureFixture[str]) -> None:
    status = executor.main(["--parity", "6", "--seed", "5", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["trainings"] == 12
    assert found["failures"] == []
    assert status == 0
    assert found["max_relative_error"]["float32"] <= 1e-6
    assert found["max_relative_error"]["float64"] <= 1e-12


def test_random_plans_hold_and_use_every_rank() -> None:
    """Those of a training are for the same weights, and equal in every precision."""
    trainings = []
    for seed in range(12):
        ranks = 2 + seed % 5
        plans, others = (random_training(random.Random(seed), ranks, p) for p in PRECISIONS)
        assert [plan.orders for plan in plans] == [plan.orders for plan in others]
        assert len({_weights(plan) for plan in plans}) == 1
        for plan in plans:
            assert verify(plan) == []
            assert plan.world_size == ranks
            assert len(plan.stages) <= MAX_STAGES
            assert plan.microbatches <= MAX_MICROBATCHES
            assert all(len(stage.devices) <= MAX_REPLICAS for stage in plan.stages)
        trainings.append(plans)
    missing = {name for name, has in FEATURES.items() if not any(map(has, trainings))}
    assert missing == set()


def _weights(plan: Plan) -> tuple[tuple[str, int], ...]:
    return tuple((row.name, row.elements) for row in plan.model.graph.parameters)


def outcome(number: int, error: float, *problems: str) -> Outcome:
    errors = dict.fromkeys(executor_parity.ERRORS, error)
    return Outcome(number, "float64", errors, problems)


def test_failures_are_listed_and_the_largest_error_is_told() -> None:
    found = summary([outcome(0, 1e-16), outcome(1, 1e-3, "replicas differ")], 0, 1.0)
    assert found["max_relative_error"] == {"float32": None, "float64": 1e-3}
    assert [failure["training"] for failure in found["failures"]] == [1]


def test_a_failure_ends_with_another_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executor_parity, "parity", lambda *_: [outcome(0, 1.0, "wrong")])
    assert executor.main(["--parity", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failures"][0]["problems"] == ["wrong"]


def test_the_table_has_a_row_for_each_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executor_parity, "parity", lambda *_: [outcome(0, 1e-16)])
    assert executor.main(["--rows", "parity"]) == 0
    text = capsys.readouterr().out
    assert "## Against a single process" in text
    assert "| any | float64 | 1 | 1e-12 | 1.0e-16 |" in text


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert executor.main(["--rows", "speed"]) == 1
    assert "speed is not known; choose from parity" in capsys.readouterr().err


def test_plans_that_lack_a_freedom_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in freedoms.CASES if case.name == "llama_tiny/two_nodes")
    plan = freedoms.plan_of(case)
    uses = freedoms.Uses.of(plan)
    assert uses.missing == []
    assert (uses.split, uses.chunks) == (uses.backwards, 4)
    assert uses.shares == dict.fromkeys(range(4), (4, 4))
    assert 0 < uses.early < uses.buckets
    late = with_strategy(plan, Sync(options={"overlap": False}))
    assert freedoms.Uses.of(late).missing == ["overlapped reduction"]
    monkeypatch.setattr(freedoms, "with_strategy", lambda *_: late)
    with pytest.raises(PipeplanError, match="the plan has no overlapped reduction"):
        freedoms.plan_of(case)


def test_the_error_of_a_training_is_that_of_its_losses_and_last_weights() -> None:
    (plan,) = random_training(random.Random(3), 2, "float64")
    alone, iterations = Alone(plan), []
    for step in (1, 2):
        loss = alone.forward_backward(step)
        alone.optimizer.step()
        weights = {name: p.detach().clone() for name, p in alone.parameters.items()}
        iterations.append([Held(loss, {}, {}, weights)])
    assert error_of_training(plan, iterations) == 0
    largest = max(iterations[1][0].parameters.values(), key=lambda weight: weight.norm())
    largest.mul_(1 + 1e-3)
    assert error_of_training(plan, iterations) == pytest.approx(1e-3, rel=1e-2)
    iterations[0][0] = Held(2 * iterations[0][0].loss, {}, {}, {})
    assert error_of_training(plan, iterations) == pytest.approx(1)
