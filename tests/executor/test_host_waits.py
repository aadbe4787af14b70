"""Between its first and last operation no step waits for the device, nor copies anything from it.

Counted on a CPU, where the calls are the same: reading a number, and copies that are not left to
the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from executor_plans import cut_pipeline, shuffled
from in_turn import MEAN_SQUARES
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from executor.distributed.process_group import process_group
from executor.launch.config import TrainingConfig
from executor.launch.prepare import prepare
from executor.launch.run import PlanRank, optimizer_of
from executor.stage.random_numbers import draw, microbatch_seed
from executor.training.loop import Loop
from executor.training.rank_optimisation import optimisation_of
from executor.training.trainer import Trainer
from executor.training.workers import DeviceBatches
from models import ZOO
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.export import export_step
from planner.tracing.sharing import is_random
from planner.tracing.torch_private import TorchDispatchMode
from planner.tracing.trace import trace

CPU = torch.device("cpu")
READS = [Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__float__, Tensor.__bool__]
READS += [Tensor.__int__, Tensor.__index__, Tensor.nonzero, torch.nonzero, Tensor.equal]


class Operators(TorchDispatchMode):
    """Operators that hand a device's numbers to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = str(function)
        if any(word in name for word in ("_local_scalar_dense", "nonzero", "is_pinned")):
            self.found.append(name)
        if "_to_copy" in name and (kwargs or {}).get("device") is not None:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Calls that would wait if the tensor were a GPU's, though on a CPU they do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        is_move = function is Tensor.to and any(
            isinstance(value, torch.device | str) for value in (*args[1:], *kwargs.values())
        )
        if function in READS or (is_move and not kwargs.get("non_blocking")):
            self.found.append(function.__name__)
        return function(*args, **kwargs)


@contextmanager
def waits() -> Iterator[list[str]]:
    found: list[str] = []
    with Calls() as calls, Operators() as operators:
        yield found
    found += [*calls.found, *operators.found]


def one_rank(name: str, arguments: Mapping[str, object]) -> Plan:
    """Three stages on one rank, some microbatches with split backwards."""
    job = Job(samples_per_microbatch=2, model_arguments=arguments)
    fields = {"microbatches": 4, "model_arguments": arguments}
    pipeline = cut_pipeline(trace(ZOO[name], job), ZOO[name], [2, 3], ["d0"] * 3, **fields)
    return shuffled(pipeline, seed=1, split=0.5)


@contextmanager
def trained(plan: Plan) -> Iterator[Trainer]:
    # Limits of batches are checked on the host, where a batch lies before the device has it.
    prepared = replace(prepare(plan, place=PlanRank(0, 1)), lookups=())
    batch = prepared.model.example_batch(2)
    config = TrainingConfig.parse({"steps": 3}, "test")
    with process_group(CPU):
        optimisation = optimisation_of(
            prepared, optimizer_of(prepared.plan, config, None), clip_norm=0.5
        )
        yield Trainer.of_model(prepared, lambda step, m: batch, optimisation=optimisation)


@pytest.mark.parametrize(
    ("name", "arguments"), [("bert_tiny", {"dropout": 0.2}), ("resnet_tiny", {})]
)
def test_no_step_waits_for_its_device(name: str, arguments: Mapping[str, object]) -> None:
    with trained(one_rank(name, arguments)) as trainer:
        trainer.step(1)
        with waits() as found:
            gathering = trainer.iterate(9)  # In the first steps, batches are compared on the host.
        assert found == []
        metrics = gathering.metrics()
        assert metrics.loss > 0
        assert metrics.gradient_norm is not None


def test_reading_a_number_and_blocking_copies_are_counted() -> None:
    number = torch.ones(1)
    with waits() as found:
        number.item()
        bool(number)
        number.to(CPU)
        number.to(CPU, non_blocking=True)
        number.double()
    assert set(found) >= {"item", "__bool__", "to"}
    assert found.count("to") == 1
    assert any("_local_scalar_dense" in name for name in found)


def test_a_norm_that_is_not_finite_is_told_with_the_metrics_of_its_step() -> None:
    with trained(one_rank("gpt_tiny", {})) as trainer:
        next(iter(trainer.parameters.values())).data.fill_(torch.nan)
        gathering = trainer.iterate(1)
        with pytest.raises(PipeplanError, match="the gradient's norm is nan: training diverges"):
            gathering.metrics()


class Noted:
    """A gathering that notes when it is asked for and when it is waited for."""

    def __init__(self, step: int, notes: list[str]) -> None:
        self.step, self.notes, self.record = step, notes, None
        self.start = lambda stop: notes.append(f"start {step}")

    def metrics(self) -> Any:
        self.notes.append(f"metrics {self.step}")
        raise NotImplementedError


class Steps:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def iterate(self, step: int) -> Any:
        self.notes.append(f"iterate {step}")
        return Noted(step, self.notes)


def test_metrics_of_a_late_device_are_asked_for_once_it_has_the_next_step_to_do() -> None:
    steps = Steps()
    loop = Loop(None, late=1)
    with pytest.raises(NotImplementedError):
        loop.run(steps, range(1, 4))
    assert steps.notes == ["iterate 1", "iterate 2", "start 1", "metrics 1"]
    with pytest.raises(NotImplementedError):
        loop.catch_up()
    assert steps.notes[-1] == "metrics 2"


def test_microbatches_for_a_gpu_are_loaded_before_the_step_and_each_once() -> None:
    loaded: list[tuple[int, int]] = []

    def batch_of(step: int, microbatch: int) -> Mapping[str, Tensor]:
        loaded.append((step, microbatch))
        return {"a": torch.tensor([step, microbatch]), "b": torch.zeros(1)}

    batches = DeviceBatches(batch_of, ["a"], [2, 0], CPU, ahead=True)
    batches.begin(5)
    assert loaded == [(5, 2), (5, 0)]
    with waits() as found:
        assert torch.equal(batches.take(0)["a"], torch.tensor([5, 0]))
        assert torch.equal(batches.take(2)["a"], torch.tensor([5, 2]))
    assert [name for name in found if name != "equal"] == []
    assert loaded == [(5, 2), (5, 0)]


def test_the_time_for_batches_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only loading moves: 2 s for each microbatch."""
    now_s = [100.0]

    def batch_of(step: int, microbatch: int) -> Mapping[str, Tensor]:
        now_s[0] += 2.0
        return {"a": torch.zeros(1)}

    monkeypatch.setattr("executor.training.workers.time.perf_counter", lambda: now_s[0])
    on_cpu = DeviceBatches(batch_of, ["a"], [0, 1], CPU)
    ahead = DeviceBatches(batch_of, ["a"], [0, 1], CPU, ahead=True)
    for step in (1, 2):
        for batches in (on_cpu, ahead):
            batches.begin(step)
            batches.take(0)
            batches.take(1)
            assert batches.waited_s == 4.0


def test_a_cpu_loads_microbatches_as_it_needs_them() -> None:
    loaded: list[int] = []

    def batch_of(step: int, microbatch: int) -> Mapping[str, Tensor]:
        loaded.append(microbatch)
        return {"a": torch.zeros(1)}

    batches = DeviceBatches(batch_of, ["a"], [0, 1], CPU)
    batches.begin(1)
    assert loaded == []
    batches.take(1)
    assert loaded == [1]


class Drawing(nn.Module):
    """Draws in several ways, of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.rows(x), 0.3)
        noise = torch.rand(x.shape[0], 17) + torch.randn_like(x).sum()
        x = x * torch.bernoulli(torch.full((6,), 0.5)) + noise.mean()
        return nn.functional.dropout(x.transpose(0, 1), 0.1).transpose(0, 1)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 6), "target": torch.randn(samples, 6)}


def test_operations_alone_draw_as_many_numbers_as_the_model() -> None:
    model = Drawing()
    batch = model.example_batch(5)
    exported = export_step(model, batch, MEAN_SQUARES)
    nodes = [node for node in exported.graph.nodes if is_random(node)]
    assert len(nodes) >= 4
    torch.manual_seed(microbatch_seed(1, 2, 3))
    exported.module(**batch)
    after = torch.get_rng_state()
    torch.manual_seed(microbatch_seed(1, 2, 3))
    draw(nodes, CPU)
    assert torch.equal(torch.get_rng_state(), after)
