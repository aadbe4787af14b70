"""Split backwards, recomputation, dropout and statistics: the numbers are those of plain torch."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pytest
import torch
from executor_plans import DEVICES, TINY, pipeline_of, scheduled
from in_turn import Rows, run_whole
from torch import Tensor, nn
from traces import trace_once

from executor.launch.model import PlannedModel
from executor.split.model_split import cut
from executor.split.stage_module import StageModule
from executor.stage.random_numbers import microbatch_seed
from executor.stage.runner import StageRunner
from models import ZOO
from planner.job import Job
from planner.tracing.factory import example_batch, import_factory

pytestmark = pytest.mark.usefixtures("shared_exports")
DOUBLE = 1e-12


def stages_of(
    model: nn.Module, factory: Callable[[], nn.Module], rows: Sequence[tuple], job: Job
) -> list[StageModule]:
    graph = trace_once(factory, job)
    names = list(graph.layers)
    placed = [
        (names[a:b], DEVICES[:1], [n for n in names[a:b] if n in again]) for a, b, again in rows
    ]
    fields = {"microbatches": 1, "loss": job.loss, "precision": job.precision}
    plan = scheduled(pipeline_of(graph, None, placed, **fields))
    return cut(*PlannedModel(plan, model).export(), plan, range(len(rows)))


def run(
    model: nn.Module,
    stages: Sequence[StageModule],
    batches: Sequence[Mapping[str, Tensor]],
    order: Sequence[int],
    split: Sequence[int],
) -> tuple[float, dict[str, Tensor | None]]:
    """All microbatches through all stages in one process; the weight gradients come last."""
    model.zero_grad(set_to_none=True)
    runners = [StageRunner(s, microbatches=len(batches), split=split) for s in stages]
    loss = 0.0
    for microbatch in order:
        values: tuple[Tensor, ...] = ()
        for runner in runners:
            sent = runner.forward(microbatch, values, batches[microbatch], seed(microbatch))
            values = tuple(tensor.contiguous() for tensor in sent)  # As messages are.
        loss += values[0].item() / len(batches)
    for microbatch in reversed(order):
        gradients: tuple[Tensor, ...] = ()
        for runner in reversed(runners):
            gradients = runner.backward(microbatch, gradients)
    for microbatch, runner in product(split, runners):
        runner.weight_gradients(microbatch)
    for runner in runners:
        runner.require_empty()
        if runner.statistics is not None:
            runner.statistics.apply(runner.statistics.observed())
    return loss, {name: p.grad for name, p in model.named_parameters()}


def seed(microbatch: int) -> int:
    return microbatch_seed(5, 1, microbatch)


def alone(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], loss: str
) -> tuple[float, dict[str, Tensor | None]]:
    """The same in plain torch, microbatch after microbatch."""
    total, sums = 0.0, {}
    for microbatch, batch in enumerate(batches):
        torch.manual_seed(seed(microbatch))
        value, gradients = run_whole(model, batch, loss)
        total += value.item() / len(batches)
        for name, gradient in gradients.items():
            if gradient is not None:
                sums[name] = sums.get(name, 0) + gradient / len(batches)
    return total, {name: sums.get(name) for name, _ in model.named_parameters()}


def assert_equal_runs(factory: Callable[[], nn.Module], loss: str = "mse") -> None:
    """Layers recomputed, two or all of three microbatches split, forwards out of order."""
    job = Job(samples_per_microbatch=5, loss=loss, precision="float64")
    torch.manual_seed(3)
    model = factory().double().train()
    batches = [example_batch(model, job) for _ in range(3)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = alone(model, batches, loss)
    largest = 1e-3 * max(float(g.norm()) for g in expected[1].values() if g is not None)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(state)
    names = list(trace_once(factory, job).layers)
    middle = (len(names) + 1) // 2
    some, every = [0, 2], [0, 1, 2]
    for again, split in (([], every), (names[::2], some), (names, every)):
        model.load_state_dict(state)
        rows = [(0, middle, again), (middle, len(names), again)]
        found = run(model, stages_of(model, factory, rows, job), batches, [2, 0, 1], split)
        assert found[0] == pytest.approx(expected[0], rel=DOUBLE)
        for name, gradient in expected[1].items():
            if gradient is None:
                assert found[1][name] is None, name
            else:
                assert error(found[1][name], gradient, least=largest) < DOUBLE, (name, again)
        for name, buffer in model.named_buffers():
            assert error(buffer.double(), buffers[name].double()) < DOUBLE, name


def error(found: Tensor | None, expected: Tensor, least: float = 0.0) -> float:
    """Relative; of tensors smaller than ``least`` (a bias before a normalisation) to that."""
    assert found is not None
    return float((found - expected).norm()) / max(float(expected.norm()), least, 1e-300)


@pytest.mark.extensive
@pytest.mark.parametrize("name", TINY)
def test_the_zoo_recomputes_and_splits_its_backwards(name: str) -> None:
    assert_equal_runs(import_factory(ZOO[name]), "cross_entropy")


class Own(nn.Module):
    """Weights used in ways of their own: in place, through a view, twice, and computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(4))
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows * self.scale + rows.sin() * self.scale
        hidden = hidden + 1.0
        hidden.add_(self.shift)
        return torch.tanh(hidden @ self.matrix.T.exp() + hidden @ self.matrix) * self.scale.view(
            1, 4
        )


class Twice(nn.Module):
    """Adds one parameter twice: the gradients of both sums are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(5, 4))

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.shift + self.shift


class Summed(Twice):
    """The gradient of the parameter is one row seen five times."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows * (rows + self.shift).sum(0)


class Changed(nn.Module):
    """What is computed from a parameter is written into later on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, rows: Tensor) -> Tensor:
        scale = self.scale * 2
        before = rows + scale
        return before + rows * scale.add_(rows.mean(0))


class Transposed(nn.Linear):
    """Its result lies in memory column by column; so does the mask that dropout draws for it."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return (self.weight @ rows.T).T + self.bias


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(4))

    def forward(self) -> Tensor:
        return self.values.exp()


class SharedBias(Rows):
    """A bias is computed once, and used where it is made, in place and in later stages."""

    def __init__(self) -> None:
        super().__init__(Bias(), *[nn.Linear(4, 4) for _ in range(4)])

    def forward(self, rows: Tensor) -> Tensor:
        bias, *layers = self.h
        shift = bias()
        for layer in layers:
            rows = (layer(rows) * shift).add_(shift)
        return rows


def twice() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return Rows(norm, nn.Linear(4, 4), norm, *[nn.Linear(4, 4) for _ in range(5)])


OWN: dict[str, Callable[[], nn.Module]] = {
    "dropout at the ends": lambda: Rows(nn.Dropout(0.2), nn.Linear(4, 4), nn.Dropout(0.2)),
    "one normalisation twice": twice,
    "weights of its own": lambda: Rows(nn.Linear(4, 4), Own(), Own(), nn.Linear(4, 4)),
    "dropout of what is transposed": lambda: Rows(
        nn.Linear(4, 4), nn.Linear(4, 4), Transposed(), nn.Dropout(0.4), nn.Linear(4, 4)
    ),
    "one parameter added twice": lambda: Rows(nn.Linear(4, 4), Twice(), nn.Linear(4, 4)),
    "a gradient seen many times": lambda: Rows(nn.Linear(4, 4), Summed(), nn.Linear(4, 4)),
    "a computed weight written into": lambda: Rows(nn.Linear(4, 4), Changed(), nn.Linear(4, 4)),
    "a computed weight of many stages": SharedBias,
}
"""What tests/fidelity does not train: tied, frozen and recurrent layers are there."""


@pytest.mark.extensive
@pytest.mark.parametrize("kind", OWN)
def test_models_of_all_kinds_recompute_and_split_their_backwards(kind: str) -> None:
    assert_equal_runs(OWN[kind])


def test_the_first_half_leaves_the_weight_gradients_to_the_second() -> None:
    job = Job(samples_per_microbatch=5, loss="mse", precision="float64")

    def factory() -> nn.Module:
        return Rows(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    model = factory().double()
    (stage,) = stages_of(model, factory, [(0, 4, [])], job)
    runner = StageRunner(stage, microbatches=1, split=[0])
    runner.forward(0, (), example_batch(model, job))
    runner.backward(0, ())
    assert all(parameter.grad is None for parameter in model.parameters())
    runner.weight_gradients(0)
    assert all(parameter.grad is not None for parameter in model.parameters())


class WritesForOthers(nn.Module):
    """The second layer writes into what the first made, and the third reads it by both names."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Bilinear(4, 4, 4)])

    def forward(self, rows: Tensor) -> Tensor:
        first = self.h[0](rows) * 1.0
        second = self.h[1](first)
        return self.h[2](first, second)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"rows": torch.randn(samples, 4), "target": torch.randn(samples, 4)}


def test_a_recomputed_layer_may_write_into_what_later_layers_read() -> None:
    assert_equal_runs(WritesForOthers)
