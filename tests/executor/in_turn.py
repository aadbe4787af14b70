"""Stages run one after the other in one process, against the whole model in plain torch."""

from collections.abc import Callable, Mapping, Sequence

import torch
from executor_plans import DEVICES, pipeline_of, scheduled
from torch import Tensor, nn

from executor.cut import StageModule, cut
from executor.model import export_planned_model
from executor.stage import StageRunner
from planner.artifacts.job import Job
from planner.tracing.factory import TrainingStep
from planner.tracing.trace import trace

Stages = Sequence[Sequence[str]]
CPU = torch.device("cpu")


def take_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name; the model is left without."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def run_whole(model: nn.Module, batch: Mapping[str, Tensor], loss: str) -> tuple[Tensor, dict]:
    """Loss and gradients of plain torch."""
    model.zero_grad(set_to_none=True)
    value = TrainingStep(model, loss)(**{name: entry.clone() for name, entry in batch.items()})
    value.backward()
    return value.detach(), take_gradients(model)


def run_stages(
    model: nn.Module, stages: Sequence[StageModule], batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict]:
    """Loss and gradients of one stage after the other."""
    model.zero_grad(set_to_none=True)
    runners = [StageRunner(stage, microbatches=1) for stage in stages]
    values: tuple[Tensor, ...] = ()
    for runner in runners:
        values = runner.forward(0, values, {name: entry.clone() for name, entry in batch.items()})
    gradients: tuple[Tensor, ...] = ()
    for runner in reversed(runners):
        gradients = runner.backward(0, gradients)
        runner.require_empty()
    assert gradients == ()
    return values[0], take_gradients(model)


def assert_same(found: tuple[Tensor, dict], expected: tuple[Tensor, dict]) -> None:
    """Bit by bit, and None where the other is None."""
    assert found[0].equal(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] is None) == (gradient is None), name
        if gradient is not None:
            assert gradient.count_nonzero() > 0, name
            assert found[1][name].equal(gradient), name


def cut_everywhere(
    factory: Callable[[], nn.Module],
) -> tuple[nn.Module, Callable[[Stages], list[StageModule]], list[str]]:
    """A model, a function that cuts it into stages, and its layers."""
    job = Job(samples_per_microbatch=5, loss="mse")
    graph = trace(factory, job)
    layers = list(graph.layers)
    torch.manual_seed(3)
    model = factory().train()

    def cut_model(stages: Stages) -> list[StageModule]:
        rows = [(part, DEVICES[:1]) for part in stages]
        plan = scheduled(pipeline_of(graph, None, rows, microbatches=1, loss="mse"))
        exported = export_planned_model(plan, model, CPU)
        return cut(*exported, plan, range(len(stages)))

    return model, cut_model, layers
