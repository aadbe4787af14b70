"""What forward may do and return, what the loss reaches, and how another model is told apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.launch.model import structure_differences
from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.export import export_step
from planner.tracing.layers import assign_layers
from planner.tracing.trace import trace

JOB = Job(samples_per_microbatch=5, loss="mse")


class Chain(nn.Module):
    """Four linear layers; ``between`` comes before each but the first."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.between = between

    def forward(self, rows: Tensor) -> Any:
        rows = self.h[0](rows)
        for layer in self.h[1:]:
            rows = layer(self.between(rows))
        return rows

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"rows": torch.randn(samples, 4), "target": torch.randn(samples, 4)}


MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "linspace": lambda rows: rows * torch.linspace(0, 1, 4),
    "arange": lambda rows: rows + torch.arange(rows.shape[1]),
    "rand": lambda rows: rows * torch.rand(4),
    "tensor": lambda rows: rows * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "full": lambda rows: torch.cat([rows, torch.full((5, 1), 2.0)], 1)[:, 1:],
}


@pytest.mark.extensive
@pytest.mark.parametrize("make", MAKES)
def test_forward_may_make_tensors_without_saying_where(make: str) -> None:
    graph = trace(Chain, JOB, between=MAKES[make])
    assert list(graph) == ["h.0", "h.1", "h.2", "h.3", "loss"]
    assert graph.record.flop_coverage == 1
    assert differences(graph, lambda: Chain(MAKES[make])) == []


class Returns(Chain):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, rows: Tensor) -> Any:
        return self.wrap(super().forward(rows))


@pytest.mark.parametrize(
    ("wrap", "loss", "message"),
    [
        (
            lambda rows: (rows, rows),
            "mse",
            "Returns.forward returned a tuple of 2, expected one tensor for loss = 'mse'; return "
            'the prediction alone from forward, or its loss and set loss = "output"',
        ),
        (
            lambda rows: {"loss": rows.mean()},
            "output",
            "Returns.forward returned a dict of 1, expected one tensor for loss = 'output'; return "
            "its loss alone, a tensor with a single number, from forward",
        ),
        (
            lambda rows: None,
            "cross_entropy",
            "Returns.forward returned a NoneType, expected one tensor for loss = 'cross_entropy'; "
            'return the prediction alone from forward, or its loss and set loss = "output"',
        ),
    ],
)
def test_a_model_that_returns_no_tensor_is_told_what_came_back(
    wrap: Callable, loss: str, message: str
) -> None:
    job = JOB.model_copy(update={"loss": loss})
    with pytest.raises(PipeplanError) as raised:
        trace(lambda: Returns(wrap), job)
    assert str(raised.value) == message


# --- gradients ----------------------------------------------------------------------------------


class Detaches(Chain):
    """The loss sees ``h.1`` detached and by its largest element, and ``h.2`` not at all."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.h[0](rows)
        seen = self.h[1](hidden)
        self.h[2](hidden)
        return self.h[3](hidden) + seen.detach() + seen.argmax(-1, keepdim=True)


def test_what_the_loss_does_not_reach_takes_no_gradient() -> None:
    graph = trace(Detaches, JOB)
    model = Detaches()
    batch = model.example_batch(5)
    nn.functional.mse_loss(model(batch["rows"]), batch["target"]).backward()
    taking = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {p.name for p in graph.record.parameters if p.trainable} == taking
    assert {t.producer for t in graph.record.boundaries if t.requires_grad} == {"h.0", "h.3"}


def test_memory_that_gets_a_gradient_by_a_write_takes_one() -> None:
    class Slots(Chain):
        def forward(self, rows: Tensor) -> Tensor:
            slots = rows.new_zeros(rows.shape)
            slots[:, :2] = self.h[0](rows)[:, :2]
            return self.h[3](self.h[2](self.h[1](rows)) + slots)

    boundaries = {t.name: t.requires_grad for t in trace(Slots, JOB).record.boundaries}
    assert boundaries["new_zeros"]


def frozen(layer: int) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        model = Chain()
        model.h[layer].requires_grad_(False)
        return model

    return factory


def differences(graph: Any, factory: Callable[[], nn.Module]) -> list[str]:
    """From a traced graph to the model on the CPU, as the executor compares them."""
    model = factory()
    exported = export_step(model, model.example_batch(5), JOB)
    return structure_differences(graph.record, exported, assign_layers(exported))


def test_a_model_that_is_frozen_otherwise_is_told_apart() -> None:
    assert differences(trace(frozen(0), JOB), frozen(0)) == []
    assert differences(trace(frozen(0), JOB), Chain) == [
        "parameter 'h.0.bias' takes a gradient, the plan says it takes none",
        "parameter 'h.0.weight' takes a gradient, the plan says it takes none",
        "boundary tensor 'linear' of layer 'h.0' takes a gradient, the plan says it takes none",
    ]
    none = "takes no gradient (it is frozen or detached), the plan says it takes one"
    assert differences(trace(Chain, JOB), frozen(1)) == [
        f"parameter 'h.1.bias' {none}",
        f"parameter 'h.1.weight' {none}",
    ]


def test_a_boundary_that_is_detached_otherwise_is_told_apart() -> None:
    graph = trace(frozen(0), JOB)
    boundaries = tuple(
        tensor.model_copy(update={"requires_grad": True}) for tensor in graph.record.boundaries
    )
    graph.record = graph.record.model_copy(update={"boundaries": boundaries})
    assert differences(graph, frozen(0)) == [
        "boundary tensor 'linear' of layer 'h.0' takes no gradient (it is frozen or detached), "
        "the plan says it takes one"
    ]
