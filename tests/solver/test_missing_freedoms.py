"""Problems without a plan: the freedom that is missing, and what a plan with it takes."""

import re
from collections.abc import Callable

import pytest
from tiny_problems import renamed, tiny_problem

from planner import InfeasibleError, Problem, solve
from planner.plan.runtimes import for_runtime
from planner.search.remedies import wider_spaces
from planner.space import Space
from planner.variants.problems import with_job

NAMES = ("embed", "layers.0", "layers.1", "loss")


def said_of(problem: Problem) -> str:
    """The message that no plan fits."""
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, time_limit_s=0.1, deterministic=True)
    return str(caught.value)


def short_of_memory(**job: object) -> Problem:
    """A problem whose stages fit their devices only if layers are recomputed."""
    fields = {"layers": 4, "devices": 2, "microbatches": 2, "memory_mib": 80}
    return with_job(tiny_problem(3, **fields), **job)


MISSING = [
    ({"recompute": False}, {"recompute": True}, "recompute = true"),
    ({"recompute": True, "max_stages": 1}, {"max_stages": None}, "max_stages = 2"),
]


@pytest.mark.parametrize(("job", "wider", "words"), MISSING)
def test_a_missing_freedom_is_named_with_the_time_of_a_plan_that_uses_it(
    job: dict[str, object], wider: dict[str, object], words: str
) -> None:
    problem = short_of_memory(**job)
    found = re.search(f"with {words} a plan of ([0-9.]+) ms fits", said_of(problem))
    assert found is not None
    result = solve(with_job(problem, **wider), time_limit_s=0.5, deterministic=True)
    assert result.iteration_time_s <= float(found[1]) * 1e-3 * (1 + 1e-3)


def one_device() -> Problem:
    """torchtitan on one device, which is no pipeline."""
    return tiny_problem(0, layers=4, devices=1, microbatches=2)


def one_cut_too_few() -> Problem:
    """torchtitan with weights tied from the first layer to the last, so that no cut is allowed."""
    names = ("model.embed", "model.layers", "model.norm", "loss")
    return renamed(tiny_problem(0, layers=4, devices=2, microbatches=2), names)


WITHOUT: list[tuple[Callable[[], Problem], str, str]] = [
    (
        one_device,
        "torchtitan needs at least 2 stages on several devices, but the cluster has 1 device",
        "with min_stages = 1 a plan of",
    ),
    (
        one_cut_too_few,
        "torchtitan needs at least 2 stages, but may cut the layers at 0 places only (never "
        "inside a module, where several tensors cross, or between layers that share weights)",
        "with cuts = any a plan of",
    ),
]


@pytest.mark.parametrize(("problem_of", "why", "helps"), WITHOUT)
def test_what_a_runtime_lacks_is_named(
    problem_of: Callable[[], Problem], why: str, helps: str
) -> None:
    said = said_of(for_runtime(problem_of(), "torchtitan"))
    assert why in said
    assert helps in said
    assert "but torchtitan cannot run it" in said


def test_every_freedom_that_a_space_lacks_is_tried_alone() -> None:
    narrow = Space(
        max_stages=2,
        cuts=("a",),
        order="1f1b",
        backward="whole",
        equal_pipelines=True,
        recompute=False,
    )
    tried = [next(iter(fields)) for fields in wider_spaces(narrow)]
    assert tried == [
        "recompute",
        "max_stages",
        "cuts",
        "shard_optimizer",
        "shard_parameters",
        "order",
    ]
    divided = {"shard_parameters": True, "equal_pipelines": True, "backward": "whole"}
    assert list(wider_spaces(Space())) == [{"shard_optimizer": True}, divided]
    assert list(wider_spaces(Space(shard_optimizer=True))) == [divided]
    assert not list(wider_spaces(Space(shard_optimizer=True, shard_parameters="if_needed")))
