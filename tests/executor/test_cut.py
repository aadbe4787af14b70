"""Cutting a model into stages changes nothing: run one after the other, they are the model."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import pytest
import torch
from executor_plans import DEVICES, TINY, pipeline_of, scheduled, traced
from torch import Tensor, nn

from executor.cut import StageModule, cut
from executor.model import export_planned_model
from executor.stage import StageRunner
from models import ZOO
from planner.artifacts.job import Job
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.tracing.export import ExportedStep
from planner.tracing.factory import TrainingStep, example_batch, import_factory
from planner.tracing.layers import LayerAssignment
from planner.tracing.trace import trace

Stages = Sequence[Sequence[str]]
Exported = tuple[nn.Module, ExportedStep, LayerAssignment]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads add up in no fixed order; here results are compared bit by bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan_of(name: str, stages: Stages) -> Plan:
    """One microbatch through stages on one device."""
    rows = [(layers, DEVICES[:1]) for layers in stages]
    return scheduled(pipeline_of(traced(name), ZOO[name], rows, microbatches=1))


@cache
def exported_model(name: str) -> Exported:
    torch.manual_seed(1)
    model = import_factory(ZOO[name])().train()
    return model, *export_planned_model(plan_of(name, [list(traced(name).layers)]), model, CPU)


def cut_into(name: str, stages: Stages) -> list[StageModule]:
    _, exported, layers = exported_model(name)
    return cut(exported, layers, plan_of(name, stages), range(len(stages)))


def every_cut(name: str) -> list[Stages]:
    """At each layer boundary alone, and at all of them."""
    layers = list(traced(name).layers)
    halves = [[layers[:place], layers[place:]] for place in range(1, len(layers))]
    return [*halves, [[layer] for layer in layers]]


def take_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name; the model is left without."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def run_whole(model: nn.Module, batch: Mapping[str, Tensor], loss: str) -> tuple[Tensor, dict]:
    model.zero_grad(set_to_none=True)
    value = TrainingStep(model, loss)(**{name: entry.clone() for name, entry in batch.items()})
    value.backward()
    return value.detach(), take_gradients(model)


def run_stages(
    model: nn.Module, stages: Sequence[StageModule], batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict]:
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
    assert found[0].equal(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient is not None
        assert gradient.count_nonzero() > 0, name
        assert found[1][name].equal(gradient), name


@pytest.mark.parametrize("name", TINY)
def test_stages_in_turn_give_exactly_the_loss_and_gradients_of_the_model(name: str) -> None:
    model, _, _ = exported_model(name)
    torch.manual_seed(2)
    batch = example_batch(model, Job(samples_per_microbatch=2))
    expected = run_whole(model, batch, "cross_entropy")
    for stages in every_cut(name):
        assert_same(run_stages(model, cut_into(name, stages), batch), expected)


@pytest.mark.parametrize("name", TINY)
def test_what_crosses_is_what_the_planner_counted(name: str) -> None:
    graph = traced(name)
    for stages in every_cut(name):
        modules = cut_into(name, stages)
        assert modules[0].receives == ()
        assert modules[-1].sends == ()
        for index in range(len(stages) - 1):
            assert modules[index].sends == modules[index + 1].receives
            done = [layer for stage in stages[: index + 1] for layer in stage]
            assert [
                (t.name, t.shape, str(t.dtype), t.requires_grad) for t in modules[index].sends
            ] == [
                (t.name, t.shape, f"torch.{t.dtype}", t.requires_grad) for t in graph.crossing(done)
            ]


def test_position_tables_are_computed_where_they_are_used() -> None:
    width = 64
    for stage in cut_into("llama_tiny", every_cut("llama_tiny")[-1])[:-2]:
        # The residual stream alone: no cosines and sines, whose last dimension is a half head.
        assert [tensor.shape for tensor in stage.sends] == [(2, 64, width)]


def test_skips_are_handed_on_by_the_stages_between() -> None:
    stages = cut_into("unet_tiny", every_cut("unet_tiny")[-1])
    assert [len(stage.sends) for stage in stages] == [
        2,  # down.0: its skip and the halved image
        3,  # down.1: both skips and the halved image
        3,  # bottom
        2,  # up.0 has used the inner skip
        1,  # up.1 has used the outer one
        1,  # head
        0,  # loss
    ]


@pytest.mark.parametrize("name", TINY)
def test_stages_hold_the_models_parameters_under_its_own_names(name: str) -> None:
    model, _, _ = exported_model(name)
    expected = dict(model.named_parameters())
    state = model.state_dict()
    for stages in every_cut(name):
        held: dict[str, nn.Parameter] = {}
        for stage in cut_into(name, stages):
            assert dict(stage.module.named_parameters()).keys() == stage.parameters.keys()
            assert stage.module.state_dict().keys() <= state.keys()
            for parameter_name, parameter in stage.parameters.items():
                assert parameter is expected[parameter_name]
            held.update(stage.parameters)
        assert held.keys() == expected.keys()


def test_a_tied_parameter_is_in_both_stages_under_one_name() -> None:
    stages = cut_into("gpt_tiny", every_cut("gpt_tiny")[-1])
    holders = [stage.index for stage in stages if "wte.weight" in stage.parameters]
    assert holders == [0, len(stages) - 2]
    assert stages[0].parameters["wte.weight"] is stages[-2].parameters["wte.weight"]


def test_an_output_is_not_held_until_the_backward() -> None:
    model, _, _ = exported_model("gpt_tiny")
    layers = list(traced("gpt_tiny").layers)
    first, _ = cut_into("gpt_tiny", [layers[:5], layers[5:]])
    seen: list[weakref.ref[Tensor]] = []
    first.module.register_forward_hook(lambda module, given, out: seen.append(weakref.ref(out[0])))
    runner = StageRunner(first, microbatches=1)
    sent = runner.forward(0, (), example_batch(model, Job(samples_per_microbatch=2)))
    assert [reference() for reference in seen] == [None]
    runner.backward(0, [torch.ones_like(tensor) for tensor in sent])
    assert first.parameters["wte.weight"].grad is not None
    model.zero_grad(set_to_none=True)


# --- operations that write into their arguments ------------------------------------------------


class Writing(nn.Module):
    """A sigmoid keeps its result for the backward; ``write`` then writes into it."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
        self.second = Second(write)
        self.third = nn.Bilinear(4, 4, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features) * 1.0
        return self.third(self.second(hidden), hidden)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"features": torch.randn(samples, 4), "target": torch.randn(samples, 3)}


class Second(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.write(hidden))


def cut_everywhere(
    factory: Callable[[], nn.Module],
) -> tuple[nn.Module, Callable[[Stages], list[StageModule]], list[str]]:
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


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "into what it received": lambda x: x.mul_(2.0),
    "into a view of what it received": lambda x: x.view(-1).clamp_(0.1, 0.5).view(x.shape),
    "into what may be what it received": lambda x: torch.dropout(x, 0.0, True).mul_(2.0),
    "into a part of what it received": lambda x: x[:, 1:].zero_() + x[:, :3],
    "into new memory": lambda x: (x + 1.0).mul_(2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_stage_may_write_into_what_it_received(write: str) -> None:
    def factory() -> nn.Module:
        model = Writing(WRITES[write])
        if "part" in write:
            model.second.linear = nn.Linear(3, 4)
        return model

    model, cut_model, layers = cut_everywhere(factory)
    batch = model.example_batch(5)
    expected = run_whole(model, batch, "mse")
    for place in range(1, len(layers)):
        stages = cut_model([layers[:place], layers[place:]])
        assert_same(run_stages(model, stages, batch), expected)
    stages = cut_model([[layer] for layer in layers])
    assert_same(run_stages(model, stages, batch), expected)
    copied = any(stage.written for stage in stages)
    assert copied == (write != "into new memory")


class TwoNamesForOneMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = Second(lambda x: x.mul_(2.0))
        self.third = nn.Bilinear(4, 4, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        flat = hidden.view(-1)
        return self.third(self.second(hidden), flat.view(hidden.shape))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"features": torch.randn(samples, 4), "target": torch.randn(samples, 3)}


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Second(lambda x: x.view(-1).mul_(2.0).view(x.shape))
        self.second = nn.Bilinear(4, 4, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(self.first(features), features)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"features": torch.randn(samples, 4), "target": torch.randn(samples, 3)}


@pytest.mark.parametrize("factory", [TwoNamesForOneMemory, WritesIntoItsInput])
def test_a_write_that_another_stage_would_miss_is_refused(factory: type[nn.Module]) -> None:
    model, cut_model, layers = cut_everywhere(factory)
    with pytest.raises(PipeplanError, match="writes in place into"):
        cut_model([layers[:1], layers[1:]])
    # In one stage it is as good as any model.
    batch = model.example_batch(5)
    expected = run_whole(model, batch, "mse")
    assert_same(run_stages(model, cut_model([layers]), batch), expected)
