"""The comparison of the exported step with eager autograd."""

import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from traces import step_once

from models import ZOO
from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.check import Run, compare_with_eager
from planner.tracing.export import ExportedStep
from planner.tracing.factory import import_factory

JOB = Job(samples_per_microbatch=4, precision="bfloat16")
AGREES = "compared with eager autograd: loss, gradients and buffers of 2 small steps agree"


class Dropping(nn.Module):
    """Draws random numbers, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.first(rows)), 0.5, self.training)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"rows": torch.randn(samples, 4), "target": torch.randn(samples, 4)}


def compared(job: Job = JOB, **fields: object) -> str:
    job = job.model_copy(update={"loss": "mse"})
    return compare_with_eager(Dropping, job, step_once(Dropping, job).graph, **fields)


@pytest.mark.parametrize("name", ["gpt_tiny", "resnet_tiny"])
def test_models_of_the_zoo_agree(name: str) -> None:
    graph = step_once(ZOO[name], JOB).graph
    assert compare_with_eager(import_factory(ZOO[name]), JOB, graph) == AGREES


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    before = random.getstate(), torch.get_rng_state()
    assert compared() == AGREES
    assert random.getstate() == before[0]
    assert torch.get_rng_state().equal(before[1])


def halved(exported: ExportedStep) -> Run:
    def run(batch: Mapping[str, Tensor], seed: int) -> Tensor:
        torch.manual_seed(seed)
        loss = exported.module(**batch)
        loss.backward()
        weight = exported.module.get_parameter("model.first.weight")
        weight.grad *= 1.0 + 1e-4
        return loss.detach()

    return run


def failing(exported: ExportedStep) -> Run:
    raise_it = "modified by an inplace operation"

    def run(batch: Mapping[str, Tensor], seed: int) -> Tensor:
        raise RuntimeError(raise_it)

    return run


def endless(outputs: Tensor, target: Tensor) -> Tensor:
    """An infinite loss whose gradients are finite."""
    return nn.functional.mse_loss(outputs, target) + torch.inf


def test_gradients_are_compared_where_the_loss_is_infinite() -> None:
    assert compared(own_loss=endless) == AGREES
    with pytest.raises(PipeplanError, match=r"gradient of first\.weight"):
        compared(own_loss=endless, make_run=halved)


@pytest.mark.parametrize(
    ("make_run", "words"),
    [
        (
            halved,
            r"Dropping: the step .* in step 1: gradient of first.weight has norm .*--no-check",
        ),
        (failing, "Dropping: the exported step fails .*modified by an inplace operation"),
    ],
)
def test_a_step_that_differs_is_refused_by_name(make_run: object, words: str) -> None:
    with pytest.raises(PipeplanError, match=words):
        compared(make_run=make_run)


def test_a_model_that_is_too_large_is_not_compared() -> None:
    graph = step_once(ZOO["gpt2_small"], Job()).graph
    line = compare_with_eager(import_factory(ZOO["gpt2_small"]), Job(), graph)
    assert line == "not compared with eager autograd: it needs 3.079 GiB, more than 1 GiB"
