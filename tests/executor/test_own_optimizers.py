"""Optimizers of several kinds train as on one process and resume bit by bit, or are refused."""

from __future__ import annotations

from pathlib import Path

import own_optimizers
import pytest
import test_equal_ranks
from executor_plans import on_groups, scheduled
from plain_torch import Alone, worst_error
from run_files import RunFiles

from executor.launch.prepare import prepare
from executor.launch.run import PlanRank
from executor.training.optimizer import own_optimizer
from executor.training.optimizer_check import require_divisible
from planner.errors import PipeplanError
from planner.plan.plan import Plan

STEPS, RATE = 4, 0.02
ALL = ("prodigy", "clipping")
"""Their step on a parameter depends on all parameters."""
BY_TENSOR = ("adamw", "sgd", "adafactor", "muon", "schedule_free", "eight_bit", "groups")
BY_ELEMENT = ("adamw", "sgd", "schedule_free")


def plan_of(devices: str) -> Plan:
    return test_equal_ranks.plan_of("Words", devices, drawn="nothing")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """Two stages where ranks can step by themselves, replicas elsewhere; each resumed halfway."""
    files = RunFiles(tmp_path_factory.mktemp("optimizers"), STEPS)
    plans = {"d0, d1": plan_of("d0, d1"), "d0 d1": plan_of("d0 d1")}
    for name in (*BY_TENSOR, *ALL):
        plan = plans["d0 d1" if name in ALL else "d0, d1"]
        text = f'optimizer = "own_optimizers:{name}"\nlearning_rate = {RATE}\n'
        files.add(name, plan, text, every=2, model="drawing:Words")
        half = files.checkpoints(name) / "step-00000002"
        files.add(f"{name}_resumed", plan, text, model="drawing:Words", resume=str(half))
    files.launch(2)
    return files


@pytest.mark.extensive
@pytest.mark.parametrize("name", [*BY_TENSOR, *ALL])
def test_it_trains_what_one_process_trains_and_resumes_bit_by_bit(
    runs: RunFiles, name: str
) -> None:
    plan = Plan.load(runs.folder / f"{name}.json")
    factory = getattr(own_optimizers, name)
    alone = Alone(
        plan, runs.config(name), optimizer=lambda named: started(factory(list(named.items()), RATE))
    )
    assert runs.losses(name) == pytest.approx(alone.train(STEPS), rel=1e-7)
    assert worst_error(runs.parameters(name), alone.parameters()) < 1e-7
    resumed, whole = runs.parameters(f"{name}_resumed"), runs.parameters(name)
    assert all(x.equal(whole[parameter]) for parameter, x in resumed.items())


def started(optimizer: object) -> object:
    getattr(optimizer, "train", lambda: None)()
    return optimizer


def tried(plan: Plan, name: str, *, saves: bool = False, strategy: str | None = None) -> None:
    prepared = prepare(plan, plan.model.factory, place=PlanRank(0, plan.world_size))
    factory = getattr(own_optimizers, name)
    require_divisible(
        prepared,
        lambda parameters: own_optimizer(factory, parameters, None, RATE),
        saves=saves,
        strategy=strategy,
    )


@pytest.mark.parametrize("name", ALL)
def test_what_depends_on_all_parameters_is_refused_where_ranks_have_some(name: str) -> None:
    with pytest.raises(PipeplanError, match="its step on a parameter depends on all parameters"):
        tried(plan_of("d0, d1"), name)


@pytest.mark.parametrize("name", [*BY_TENSOR, *ALL])
def test_on_shares_of_tensors_those_that_step_by_element_are_taken(name: str) -> None:
    plan = on_groups("gpt_tiny", [], ["g0"], scheduled)
    if name in BY_ELEMENT or name == "groups":
        tried(plan, name)
    else:
        with pytest.raises(PipeplanError, match="steps by whole parameters"):
            tried(plan, name)


def test_what_counts_its_calls_is_refused_where_it_is_called_in_turns() -> None:
    tried(plan_of("d0 d1"), "schedule_free")
    with pytest.raises(PipeplanError, match="'decoupled' calls it for some parameters after"):
        tried(plan_of("d0 d1"), "counting", strategy="decoupled")


def test_what_a_checkpoint_does_not_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    tried(plan_of("d0 d1"), "counting")
    with pytest.raises(PipeplanError, match="keeps numbers outside of its state and param_groups"):
        tried(plan_of("d0 d1"), "counting", saves=True)
