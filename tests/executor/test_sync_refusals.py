"""Strategies that cannot run are refused with a remedy, before the processes meet."""

import pytest
import torch
from executor_plans import scheduled, zoo_pipeline

import executor.training.training
from executor.emulation.pace import Pace
from executor.launch.command_line import parser, run_of
from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from executor.sync.halves import require_on_cpu
from executor.training.training import run_emulation, run_training
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync
from planner.verification import verify


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    def meet(*arguments: object) -> None:
        raise AssertionError("a process group was made")

    monkeypatch.setattr(executor.training.training, "process_group", meet)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return scheduled(zoo_pipeline("gpt_tiny", [4], ["d0", "d1"], 2))


REFUSED = {
    "gossip": r"sync\.strategy: 'gossip' is not known; expected one of all_reduce, fused",
    "all_reduce:bucket_mib=0": r"sync\.options of all_reduce.*bucket_mib",
    "fused:overlap=true": r"sync\.options of fused.*overlap",
    "decoupled:bucket": r"sync: 'bucket' in 'decoupled:bucket' is not OPTION=VALUE",
    "cross_iteration:approximation=none": r"sync\.options of cross_iteration.*approximation",
}


REFUSED_IF_SYNCHRONOUS = {
    "inject": (
        RunSettings(inject="fail_at(1,2)"),
        r"--inject fail_at\(1,2\): it has no effect with",
    ),
    "group_timeout_s": (
        RunSettings(group_timeout_s=5),
        r"--group-timeout 5: it has no effect with",
    ),
    "pipeline": (
        RunSettings(pipeline=0, coordinator="node1:29600"),
        r"--pipeline 0 --coordinator node1:29600: all_reduce runs all pipelines in step, as one "
        r"job that needs no coordinator; leave it out and start torchrun --nproc-per-node 2 ",
    ),
    "coordinator": (
        RunSettings(coordinator="node1:29600"),
        r"^--coordinator node1:29600: all_reduce",
    ),
}


@pytest.mark.parametrize("field", REFUSED_IF_SYNCHRONOUS)
def test_options_of_pipelines_side_by_side_are_refused_in_step(plan: Plan, field: str) -> None:
    run, message = REFUSED_IF_SYNCHRONOUS[field]
    with pytest.raises(PipeplanError, match=message):
        run_training(plan, TrainingConfig(), run)
    with pytest.raises(PipeplanError, match=message):
        run_emulation(plan, 1, run)


@pytest.mark.parametrize("word", ["all", "choose"])
def test_words_of_other_commands_are_told_where_they_belong(plan: Plan, word: str) -> None:
    with pytest.raises(PipeplanError, match=f"sync: '{word}' is of `pipeplan "):
        run_training(plan, TrainingConfig(), RunSettings(sync=word))


@pytest.mark.parametrize("text", REFUSED)
def test_a_strategy_that_cannot_be_is_refused(plan: Plan, text: str) -> None:
    with pytest.raises(PipeplanError, match=REFUSED[text]):
        run_training(plan, TrainingConfig(), RunSettings(sync=text))
    with pytest.raises(PipeplanError, match=REFUSED[text]):
        run_emulation(plan, 1, RunSettings(sync=text))


def test_a_plan_with_such_a_strategy_does_not_hold(plan: Plan) -> None:
    for sync, message in (
        (Sync(strategy="gossip"), "sync.strategy: 'gossip' is not known"),
        (Sync(strategy="fused", options={"bucket_mib": 3}), "sync.options of fused"),
    ):
        (problem,) = verify(plan.model_copy(update={"sync": sync}))
        assert problem.startswith(message)
    assert verify(plan.model_copy(update={"sync": Sync(strategy="decoupled")})) == []


PACES = {
    (None, None): Pace(),
    ("1=2.5, 3=4", None): Pace({1: 2.5, 3: 4.0}),
    (None, "0.1:0.3"): Pace(sleep_probability=0.1, sleep_s=0.3),
    ("x=2", None): "slow: 'x=2' is not RANK=FACTOR; write it as 1=2.0,3=4.0",
    ("1=0", None): "slow: '1=0': 0 is not from 0.001 to 1e+06",
    (None, "0.1"): "sleep: '0.1': '' is not a number",
    (None, "2:1"): "sleep: '2:1': 2 is not from 0 to 1",
}


@pytest.mark.parametrize("words", PACES, ids=str)
def test_a_pace_is_read_or_refused(words: tuple[str | None, str | None]) -> None:
    expected = PACES[words]
    if isinstance(expected, Pace):
        assert Pace.parse(*words) == expected
        return
    with pytest.raises(PipeplanError) as refused:
        Pace.parse(*words)
    assert refused.value.problems == (expected,) or str(refused.value) == expected


def test_a_rank_that_there_is_not_cannot_be_slow(plan: Plan) -> None:
    with pytest.raises(PipeplanError, match="slow: there is no rank 2; the plan has ranks 0 to 1"):
        run_training(plan, TrainingConfig(), RunSettings(pace=Pace({2: 2.0})))


def test_machines_that_are_not_emulated_cannot_be_slow() -> None:
    with pytest.raises(PipeplanError, match="add --emulate-speed, or --emulate"):
        run_of(parser().parse_args(["plan.json", "--slow", "1=2"]))


def test_pauses_are_drawn_anew_for_each_rank_and_step_and_are_the_same_again() -> None:
    pace = Pace(sleep_probability=0.3, sleep_s=1.0, seed=5)
    drawn = [pace.pause_s(rank, step) for rank in range(20) for step in range(50)]
    assert 250 < sum(drawn) < 350
    assert drawn == [pace.pause_s(rank, step) for rank in range(20) for step in range(50)]


def test_decoupled_is_refused_where_gloo_carries_the_gradients_of_gpus() -> None:
    with pytest.raises(
        PipeplanError, match=r"sync\.strategy: 'decoupled' with gradients on cuda:0"
    ):
        require_on_cpu(torch.device("cuda", 0), "sync.strategy: 'decoupled'", "use all_reduce")
