"""Stages run one after the other in one process, against the whole model in plain torch."""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from executor_plans import DEVICES, pipeline_of, scheduled
from torch import Tensor, nn
from traces import trace_once

from executor.launch.model import PlannedModel
from executor.split.model_split import cut
from executor.split.stage_module import StageModule
from executor.stage.runner import StageRunner
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.tracing.factory import TrainingStep

Stages = Sequence[Sequence[str]]
MEAN_SQUARES = Job(samples_per_microbatch=5, loss="mse")


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
    model: nn.Module,
    stages: Sequence[StageModule],
    batch: Mapping[str, Tensor],
    split: Sequence[int] = (),
    seed: int = 0,
) -> tuple[Tensor, dict]:
    """Loss and gradients of one stage after the other; backwards in halves for ``split=[0]``."""
    model.zero_grad(set_to_none=True)
    runners = [StageRunner(stage, microbatches=1, split=split) for stage in stages]
    values: tuple[Tensor, ...] = ()
    for runner in runners:
        entries = {name: entry.clone() for name, entry in batch.items()}
        values = runner.forward(0, values, entries, seed)
    gradients: tuple[Tensor, ...] = ()
    for runner in reversed(runners):
        gradients = runner.backward(0, gradients)
    for runner in runners if split else ():
        runner.weight_gradients(0)
    for runner in runners:
        runner.require_empty()
        if runner.statistics is not None:
            runner.statistics.apply(runner.statistics.observed())
    assert gradients == ()
    return values[0], take_gradients(model)


def used_by_many(graph: LayerGraph) -> frozenset[str]:
    """Parameters of three layers and more: the order in which their gradients add up matters."""
    used = Counter(name for layer in graph.record.layers for name in layer.parameters)
    return frozenset(name for name, count in used.items() if count > 2)


def assert_same(
    found: tuple[Tensor, dict],
    expected: tuple[Tensor, dict],
    rounded: Container[str] = (),
) -> None:
    """Bit by bit, and None where the other is None; up to rounding for those named."""
    assert found[0].equal(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] is None) == (gradient is None), name
        if gradient is not None:
            assert gradient.count_nonzero() > 0, name
            if name in rounded:
                torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7)
            else:
                assert found[1][name].equal(gradient), name


def cut_everywhere(
    factory: Callable[[], nn.Module],
    job: Job = MEAN_SQUARES,
) -> tuple[nn.Module, Callable[[Stages], list[StageModule]], list[str]]:
    """A model, a function that cuts it into stages, and its layers."""
    graph = trace_once(factory, job)
    layers = list(graph.layers)
    torch.manual_seed(3)
    model = factory().train()

    def plan_of(stages: Stages) -> Plan:
        rows = [(part, DEVICES[:1]) for part in stages]
        fields = {"loss": job.loss, "recompute_attention": job.recompute_attention}
        return scheduled(pipeline_of(graph, None, rows, microbatches=1, **fields))

    exported = PlannedModel(plan_of([layers]), model).export()

    def cut_model(stages: Stages) -> list[StageModule]:
        return cut(*exported, plan_of(stages), range(len(stages)))

    return model, cut_model, layers


class Rows(nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.h = nn.ModuleList(layers)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of four numbers, through every layer."""
        for layer in self.h:
            rows = layer(rows)
        return rows

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random rows and targets."""
        return {"rows": torch.randn(samples, 4), "target": torch.randn(samples, 4)}
