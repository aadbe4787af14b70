"""A plan made by the command line, and a small one made by hand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import CLUSTERS, pipeplan
from traces import step_once
from transformers_by_hand import machines, problem, transformer

from planner import adopt
from planner.job import Job
from planner.tracing import trace as tracing
from planner.tracing.trace import Factory, TracedStep, trace_step

JOB = """
format = "pipeplan-job/1"
microbatches = 4
samples_per_microbatch = 64
replication = false

[model_arguments]
width = 512
"""


def _of_the_zoo_once(model: str | Factory, job: Job, name: str | None = None) -> TracedStep:
    is_of_zoo = isinstance(model, str) and model.startswith("models.")
    return (step_once if is_of_zoo else trace_step)(model, job, name)


@pytest.fixture(scope="module", autouse=True)
def _the_zoo_is_traced_once() -> Iterator[None]:
    """Dozens of commands here are given the same models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace_step", _of_the_zoo_once)
        yield


@pytest.fixture(scope="session")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of several stages for the irregular cluster, fresh from ``pipeplan plan``."""
    folder = tmp_path_factory.mktemp("plan")
    job = folder / "job.toml"
    job.write_text(JOB)
    path = folder / "plan.json"
    made = pipeplan(
        *("plan", "models.gpt:gpt_tiny", "--cluster", CLUSTERS / "irregular.toml"),
        *("--job", job, "--time-limit", 0.3, "--deterministic", "-o", path),
    )
    assert made.exit_code == 0, made.output
    assert len(json.loads(path.read_text())["stages"]) > 1
    return path


@pytest.fixture
def plan_data(plan_path: Path) -> dict[str, Any]:
    """The plan as plain data, free to be changed."""
    return json.loads(plan_path.read_text())


@pytest.fixture
def by_hand_path(tmp_path: Path) -> Path:
    """Stages of 2, 2 and 4 equal blocks."""
    path = tmp_path / "by_hand.json"
    adopt(problem(transformer(8), machines(3), microbatches=8), "Et*2|t*2|t*4L").save(path)
    return path
