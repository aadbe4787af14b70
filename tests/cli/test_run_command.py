"""The command that `plan` prints last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import boundary, cluster, graph, layer, link, orders, star

from executor.training.batches import batches
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.plan.run_command import MASTER, data_line, leave_words, resume_commands, run_commands


def plan_of(factory: str | None, loss: str = "cross_entropy", **job_fields: Any) -> Plan:
    the_graph = graph([layer("a"), layer("b")], [boundary("a", "b")])
    job = Job.parse({"microbatches": 1, "loss": loss, **job_fields}, "job")
    problem = Problem(the_graph, star(2), job, ModelSource(factory))
    pipeline = place(problem, [StageSpec(("a",), ("d0",)), StageSpec(("b",), ("d1",))])
    return plan_by_hand(pipeline, orders(d0="0F0 0B0", d1="1F0 1B0"))


def on_one_host(plan: Plan, path: str = "plan.json", text_problem: str | None = None) -> str:
    commands = run_commands(plan, Path(path), text_problem)
    assert commands is not None
    (only,) = commands.hosts
    assert commands.lines("run it") == [f"run it on one host with: {only.command}"]
    return only.command


def test_a_model_of_the_zoo_needs_no_leave() -> None:
    command = on_one_host(plan_of("models.gpt:gpt_tiny"), "out/my plan.json")
    assert command == "torchrun --nproc-per-node 2 -m executor 'out/my plan.json'"


def test_code_of_the_users_own_is_named() -> None:
    command = on_one_host(plan_of("lib.net:make", "lib.net:loss"))
    assert command == (
        "torchrun --nproc-per-node 2 -m executor plan.json --model lib.net:make --loss lib.net:loss"
    )


def test_without_a_model_there_is_nothing_to_run() -> None:
    assert run_commands(plan_of(None), Path("plan.json")) is None


def test_a_model_that_the_plan_does_not_name_is_left_to_fill_in() -> None:
    assert leave_words(plan_of(None)) == ["--model", "MODULE:FACTORY"]


def test_where_text_does_not_suit_random_batches_are_asked_for() -> None:
    plan, problem = plan_of("models.vit:vit_tiny"), "this one's batch is images"
    command = on_one_host(plan, text_problem=problem)
    assert command == "torchrun --nproc-per-node 2 -m executor plan.json --data random"
    assert data_line(problem).endswith(problem)
    assert "trains on text" not in data_line(problem)


TOKENS = {"shape": [16], "dtype": "int64", "below": 256}
INPUTS: dict[str, dict[str, Any]] = {
    "tokens": {"ids": TOKENS, "target": TOKENS},
    "too few tokens": {"ids": {**TOKENS, "below": 255}, "target": TOKENS},
    "too few classes": {"ids": TOKENS, "target": {**TOKENS, "below": 255}},
    "classes of samples": {"ids": TOKENS, "target": {**TOKENS, "shape": []}},
    "short integers": {"ids": {**TOKENS, "dtype": "int32"}, "target": TOKENS},
    "two inputs": {"ids": TOKENS, "mask": TOKENS, "target": TOKENS},
    "images": {"x": {"shape": [3, 8, 8], "dtype": "float32"}, "target": TOKENS},
}


@pytest.mark.parametrize("case", INPUTS)
def test_the_command_asks_for_random_batches_where_the_executor_refuses_text(case: str) -> None:
    plan = plan_of("models.gpt:gpt_tiny", inputs=INPUTS[case])
    try:
        batches("text", torch.nn.Identity(), plan.job, 0)
    except PipeplanError:
        words, resumed = " --data random", " --data DATA"
    else:
        words = resumed = ""
    assert (words == "") == (case == "tokens")
    start = "torchrun --nproc-per-node 2 -m executor plan.json"
    assert on_one_host(plan) == start + words
    commands = resume_commands(plan, Path("plan.json"))
    assert commands is not None
    assert commands.hosts[0].command == f"{start}{resumed} --resume CHECKPOINTS"


def plan_on(*devices: str) -> Plan:
    names = [f"l{index}" for index in range(len(devices))]
    problem = Problem(
        graph([layer(name) for name in names]),
        cluster(devices, [link(device, "hub") for device in devices], ["hub"]),
        Job.parse({"microbatches": 1}, "job"),
        ModelSource("models.gpt:gpt_tiny"),
    )
    stages = [StageSpec((name,), (device,)) for name, device in zip(names, devices, strict=True)]
    rows = {device: f"{index}F0 {index}B0" for index, device in enumerate(devices)}
    return plan_by_hand(place(problem, stages), orders(**rows))


def test_each_host_has_its_command() -> None:
    commands = run_commands(plan_on("a/gpu0", "a/gpu1", "b/gpu0"), Path("plan.json"))
    assert commands is not None
    tail = f"--master-addr {MASTER} --master-port 29500 -m executor plan.json"
    assert commands.lines("run it") == [
        f"run it with one command on each of 2 hosts, where {MASTER} stands for an address of a "
        "that the others reach:",
        f"  a: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 {tail}",
        f"  b: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 {tail}",
    ]


def test_the_only_host_of_a_plan_is_named() -> None:
    commands = run_commands(plan_on("a/gpu0", "a/gpu1"), Path("plan.json"))
    assert commands is not None
    command = "torchrun --nproc-per-node 2 -m executor plan.json"
    assert commands.lines("run it") == [f"run it on one host (a) with: {command}"]


def test_ranks_that_torchrun_cannot_number_are_told() -> None:
    commands = run_commands(plan_on("a/gpu0", "b/gpu0", "a/gpu1"), Path("plan.json"))
    assert commands is not None
    (line,) = commands.lines("run it")
    assert line.startswith("run it after planning again with the devices of each host together")
    assert line.endswith("and these are on a, b, a")
