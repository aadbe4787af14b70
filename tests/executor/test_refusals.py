"""What the executor cannot run it refuses with a remedy, before the processes meet."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from executor_plans import DEVICES, pipeline_of, scheduled, traced
from launch import ROOT

import executor.distributed.process_group
import executor.launch.console
from executor.__main__ import main
from executor.launch.model import structure_differences
from models import ZOO
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.trace import trace_step

GPT = ZOO["gpt_tiny"]
Run = Callable[..., tuple[int, list[str]]]


def plan_of(
    factory: str | None = GPT,
    ranks: int = 2,
    recompute: Sequence[str] = (),
    precision: str = "float32",
) -> Plan:
    """A tiny GPT in stages of two layers, the last of what is left."""
    graph = traced("gpt_tiny", precision)
    layers = list(graph.layers)
    stages = [
        (layers[2 * i : 2 * i + 2 if i < ranks - 1 else None], [DEVICES[i]]) for i in range(ranks)
    ]
    stages[0] = (*stages[0], recompute)
    return scheduled(pipeline_of(graph, factory, stages, microbatches=2, precision=precision))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call ``main`` as torchrun would on one rank: its status, and the lines it prints to stderr.

    Whoever would meet the other ranks fails the test.
    """

    def meet(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a process group was made")

    def run_main(plan: Plan | str, *options: str, ranks: int = 2, rank: int = 0) -> tuple:
        path = tmp_path / "plan.json"
        if isinstance(plan, Plan):
            plan.save(path)
        else:
            path.write_text(plan)
        monkeypatch.setattr(executor.distributed.process_group, "_meeting_place", meet)
        monkeypatch.setattr(executor.launch.console, "FIRST_COME_S", 0)
        monkeypatch.setattr(sys, "argv", ["executor", str(path), "--no-check", *options])
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        status = main()
        captured = capsys.readouterr()
        assert captured.out == ""
        return status, captured.err.splitlines()

    return run_main


REFUSED: dict[str, tuple[Callable[[], Plan], str]] = {
    "other number of ranks": (
        lambda: plan_of(ranks=4),
        "error: the plan has 4 ranks, 2 processes were started; run it with "
        "torchrun --nproc-per-node 4 -m executor PLAN",
    ),
    "no factory": (
        lambda: plan_of(factory=None),
        "error: the plan does not say how its model is built; name it: --model module:factory",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rank_zero_says_what_is_wrong_and_what_to_do(run: Run, case: str) -> None:
    build, message = REFUSED[case]
    status, lines = run(build())
    assert status == 1
    assert lines[0] == message
    assert all(line.startswith("error: ") for line in lines)


@pytest.mark.parametrize("case", REFUSED)
def test_other_ranks_say_who_they_are(run: Run, case: str) -> None:
    build, message = REFUSED[case]
    status, lines = run(build(), rank=1)
    assert status == 1
    assert lines[0] == message.replace("error: ", "error: rank 1: ")


def change_graph(data: dict) -> None:
    data["model"]["graph"]["layers"][0]["stash_bytes"] += 1


def promise_more(data: dict) -> None:
    data["predicted"]["iteration_time_s"] /= 2


def lose_an_operation(data: dict) -> None:
    data["orders"]["d0"] = data["orders"]["d0"].removesuffix(" 0B1")


def deadlock(data: dict) -> None:
    data["orders"]["d1"] = "1B0 1F0 1F1 1B1"


def add_a_field(data: dict) -> None:
    data["run"] = "import os"


TAMPERED = {
    change_graph: "error: plan: model.graph_digest: ",
    promise_more: "error: plan: predicted.iteration_time_s: ",
    lose_an_operation: "error: plan: orders: microbatch 1 of stage 0 has F; ",
    deadlock: "error: plan: the orders deadlock: ",
    add_a_field: "error: ",
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_a_plan_that_was_tampered_with_is_refused(run: Run, tamper: Callable) -> None:
    data = json.loads(plan_of().model_dump_json())
    assert run_is_accepted(run, json.dumps(data))
    before = json.dumps(data)
    tamper(data)
    assert json.dumps(data) != before
    status, lines = run(json.dumps(data))
    assert status == 1
    assert lines[0].startswith(TAMPERED[tamper])
    assert all(line.startswith("error: ") for line in lines)


def run_is_accepted(run: Run, plan: Plan | str, *options: str) -> bool:
    """Whether nothing is left to do but meet the other ranks."""
    status, lines = run(plan, *options)
    return status == 1 and lines[-1] == "AssertionError: a process group was made"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "pipeplan/9"}'])
def test_a_file_that_is_no_plan_is_refused(run: Run, text: str) -> None:
    status, lines = run(text)
    assert status == 1
    assert lines
    assert all(line.startswith("error: ") for line in lines)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module outside the zoo that leaves a file behind when it is imported."""
    marker = tmp_path / "imported"
    source = f"open({str(marker)!r}, 'w').close()\nfrom models.gpt import gpt_tiny as net\n"
    (tmp_path / "elsewhere_for_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elsewhere_for_a_test", raising=False)
    return marker


def test_a_plan_imports_nothing_outside_the_zoo_unless_the_user_says_so(
    run: Run, elsewhere: Path
) -> None:
    plan = plan_of(factory="elsewhere_for_a_test:net")
    status, lines = run(plan)
    assert status == 1
    assert lines[0].startswith("error: the plan's model is 'elsewhere_for_a_test:net'")
    assert lines[0].endswith("add --model elsewhere_for_a_test:net")
    assert not elsewhere.exists()
    assert run_is_accepted(run, plan, "--model", "elsewhere_for_a_test:net")
    assert elsewhere.exists()


def test_a_package_that_bears_the_zoos_name_is_not_the_zoo(
    run: Run, elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text(f"open({str(elsewhere)!r}, 'w').close()\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
        monkeypatch.delitem(sys.modules, name)
    status, lines = run(plan_of())
    assert status == 1
    assert "not in Pipeplan's own package models" in lines[0]
    assert not elsewhere.exists()


def test_a_factory_other_than_the_plans_is_refused(run: Run, elsewhere: Path) -> None:
    assert run(plan_of(), "--model", "elsewhere_for_a_test:net") == (
        1,
        [f"error: --model elsewhere_for_a_test:net: the plan was made for {GPT!r}"],
    )
    assert not elsewhere.exists()


def test_a_factory_that_does_not_exist_is_refused(run: Run) -> None:
    plan = plan_of(factory="nowhere_to_be_found:net")
    status, lines = run(plan, "--model", "nowhere_to_be_found:net")
    assert status == 1
    assert "no module 'nowhere_to_be_found'" in lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "0"), "argument --steps: 0 is not at least 1"),
        (("--steps", "x"), "argument --steps: 'x' is not a whole number"),
        (("--timeout", "-1"), "argument --timeout: '-1' is not from 1 to 1e6 seconds"),
        (("--group-timeout", "-5"), "argument --group-timeout: '-5' is not from 1 to 1e6 seconds"),
    ],
)
def test_a_number_that_cannot_be_is_wrong_usage(
    run: Run, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(plan_of(), *words)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {message}; `python -m executor --help` says what there is"


# --- refused once the model is there: it takes a process group, here of one rank ----------------


@pytest.fixture
def run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Call ``main`` without torchrun."""

    def run_main(plan: Plan, *options: str) -> tuple[int, list[str]]:
        plan.save(tmp_path / "plan.json")
        monkeypatch.setattr(sys, "argv", ["executor", str(tmp_path / "plan.json"), *options])
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        status = main()
        assert not dist.is_initialized()
        captured = capsys.readouterr()
        errors = [row for row in captured.err.splitlines() if not row.startswith("note: memory is")]
        return status, errors or captured.out.splitlines()

    return run_main


def test_paths_that_cannot_be_written_are_refused_before_training(
    run_alone: Run, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere" / "timeline.json"
    status, lines = run_alone(plan_of(ranks=1), "--timeline", str(nowhere))
    assert (status, lines) == (
        1,
        [f"error: {nowhere}: cannot be written: there is no folder {nowhere.parent}; create it"],
    )
    (tmp_path / "file").write_text("")
    config = tmp_path / "train.toml"
    table = f'[checkpoint]\nfolder = "{tmp_path}/file"\nevery = 1000\n'
    config.write_text(f'format = "pipeplan-train/1"\n{table}')
    status, lines = run_alone(plan_of(ranks=1), "--config", str(config))
    assert status == 1
    assert lines[0].startswith(f"error: checkpoint.folder: {tmp_path}/file cannot be made: ")


def test_a_backend_for_gpus_is_refused_on_the_cpu(run_alone: Run) -> None:
    status, lines = run_alone(plan_of(ranks=1), "--device", "cpu", "--backend", "nccl")
    assert status == 1
    assert lines[0].startswith("error: backend: 'nccl' carries tensors of GPUs")


def test_text_for_a_model_of_images_is_refused(run_alone: Run) -> None:
    graph = traced("vgg_tiny")
    stages = [(list(graph.layers), DEVICES[:1])]
    plan = scheduled(pipeline_of(graph, ZOO["vgg_tiny"], stages, microbatches=1))
    status, lines = run_alone(plan)
    assert status == 1
    assert lines[0].startswith("error: --data text needs a model that reads")
    assert lines[0].endswith("use --data random")
    status, lines = run_alone(plan, "--data", "random", "--steps", "1")
    assert status == 0
    assert lines[-1].startswith("trained 1 steps on 1 ranks")


def test_a_model_that_has_changed_since_is_refused(run_alone: Run) -> None:
    plan = plan_of(ranks=1)
    model = plan.model.model_copy(update={"arguments": {"layers": 5}})
    status, lines = run_alone(plan.model_copy(update={"model": model}))
    assert status == 1
    assert lines[0].startswith("error: the model is not the one the plan was made for: ")
    assert lines[0].endswith("layer 'h.4' is only in the model; plan again with this model")


def test_a_renamed_module_is_named() -> None:
    step = trace_step(ZOO["gpt_tiny"], Job())
    layers = list(step.graph.layers)
    layers[2] = layers[2].model_copy(update={"name": "blocks.1"})
    renamed = step.graph.model_copy(update={"layers": tuple(layers)})
    [line] = structure_differences(renamed, step.exported, step.layers)
    assert line.startswith("layer 'blocks.1' of the plan is ")
    assert line.endswith(" in the model; give a renamed module its old name")


# --- what is not needed to run a plan -----------------------------------------------------------

WITHOUT_SOLVERS = """
import sys

BLOCKED = {"ortools", "typer", "rich", "matplotlib"}


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
import executor
import executor.training.training
from executor.__main__ import main

assert main() == 0
unwanted = ("planner.search", "planner.report")
assert not [name for name in sys.modules if name.startswith(unwanted)]
"""


def test_training_needs_no_solver_and_no_terminal_library(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(ranks=1).save(path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SOLVERS, str(path), "--steps", "1"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained 1 steps on 1 ranks" in done.stdout
