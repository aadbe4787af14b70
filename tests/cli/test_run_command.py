"""The command that `plan` prints last."""

from __future__ import annotations

from pathlib import Path

from builders import boundary, graph, layer, orders, star

from planner.artifacts.job import Job
from planner.artifacts.plan import Plan
from planner.artifacts.problem import ModelSource, Problem
from planner.assemble import plan_by_hand
from planner.costs.placement import StageSpec, place
from planner.run_command import leave_words, run_command


def plan_of(factory: str | None, loss: str = "cross_entropy") -> Plan:
    the_graph = graph([layer("a"), layer("b")], [boundary("a", "b")])
    job = Job(microbatches=1, loss=loss)
    problem = Problem(the_graph, star(2), job, ModelSource(factory))
    pipeline = place(problem, [StageSpec(("a",), ("d0",)), StageSpec(("b",), ("d1",))])
    return plan_by_hand(pipeline, orders(d0="0F0 0B0", d1="1F0 1B0"))


def test_a_model_of_the_zoo_needs_no_leave() -> None:
    command = run_command(plan_of("models.gpt:gpt_tiny"), Path("out/my plan.json"))
    assert command == "torchrun --nproc-per-node 2 -m executor 'out/my plan.json'"


def test_code_of_the_users_own_is_named() -> None:
    command = run_command(plan_of("lib.net:make", "lib.net:loss"), Path("plan.json"))
    assert command == (
        "torchrun --nproc-per-node 2 -m executor plan.json --model lib.net:make --loss lib.net:loss"
    )


def test_without_a_model_there_is_nothing_to_run() -> None:
    assert run_command(plan_of(None), Path("plan.json")) is None


def test_a_model_that_the_plan_does_not_name_is_left_to_fill_in() -> None:
    assert leave_words(plan_of(None)) == ["--model", "MODULE:FACTORY"]
