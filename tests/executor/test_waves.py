"""Wave-synchronous pipelines as threads, with real servers and the real scheduler of waves.

Pipeline p's gradient is the p-th unit vector, and its learning rate 1: of n pipelines' weights, -n
times the p-th element counts the waves of pipeline p that they include.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.coordinator.client import GroupAssignment
from executor.elastic.tensor_calls import TensorClient, TensorServer
from executor.elastic.weights import Weights
from executor.sync.waves import WaveShard, WaveSynchronous
from executor.training.master_weights import MakeOptimizer
from executor.training.optimisation import Optimisation, StepOutcome
from planner.errors import PipeplanError
from planner.sync.groups import scheduler_of
from planner.sync.groups.events import GroupRequest
from planner.sync.strategies import WaveSynchronousOptions

KEY = b"a key"


class Meeting:
    """Answers requests as the coordinator does."""

    def __init__(self, pipelines: int, distance: int) -> None:
        options = WaveSynchronousOptions(distance=distance)
        self.scheduler = scheduler_of(options, pipelines, 1)
        self.free: set[tuple[int, int]] = set()
        self.changed = threading.Condition()

    def ask(self, pipeline: int, step: int) -> None:
        with self.changed:
            for group in self.scheduler.handle(GroupRequest(pipeline, 0, step), 0.0):
                self.free.add((group.members[0], group.iterations[0]))
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: (pipeline, step) in self.free, 30)


class Calls:
    """Calls to the pipelines of this process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def there(self) -> dict[int, int]:
        return self.pipeline.there

    def call(self, pipeline: int, incarnation: int, *arguments: Any) -> Any:
        client = TensorClient(self.pipeline.others[pipeline].server.address, KEY, 30.0)
        try:
            return client.call(*arguments)
        finally:
            client.close()


class Pipeline:
    """A pipeline of one rank, as a strategy sees its neighbours."""

    def __init__(
        self, number: int, others: list[Pipeline], meeting: Meeting, make: MakeOptimizer
    ) -> None:
        self.pipeline = number
        self.others = others
        self.meeting = meeting
        torch.manual_seed(0)
        self.parameters = {name: nn.Parameter(torch.zeros(4)) for name in ("a", "b")}
        self.optimisation = Optimisation(self.parameters, frozenset(), make)
        self.weights = Weights(self.optimisation, {})
        self.server = TensorServer("127.0.0.1", KEY, most_callers=16)
        self.timeout_s = 30.0
        others.append(self)

    @property
    def there(self) -> dict[int, int]:
        return {other.pipeline: 1 for other in self.others}

    def ask(self, step: int, reduced: bool = True) -> GroupAssignment:
        assert reduced
        self.meeting.ask(self.pipeline, step)
        return GroupAssignment(0, ((self.pipeline, 1),), 0)

    def caller(self) -> Calls:
        return Calls(self)

    def step_on(self, gradients: Mapping[str, Tensor]) -> StepOutcome:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone()
        return self.optimisation.step(1)


def run(
    pipelines: int,
    distance: int,
    servers: int,
    waves: int,
    make: MakeOptimizer,
    gradients: Callable[[Pipeline, int], Mapping[str, Tensor]],
    seed: int = 0,
) -> list[Pipeline]:
    """Train on threads of different speeds, and return the pipelines in their last states."""
    meeting = Meeting(pipelines, distance)
    everybody: list[Pipeline] = []
    for number in range(pipelines):
        Pipeline(number, everybody, meeting, make)
    strategies = [WaveSynchronous(p, distance, servers) for p in everybody]  # type: ignore[arg-type]

    def train(number: int) -> None:
        pipeline, strategy = everybody[number], strategies[number]
        pace = random.Random(100 * seed + number)
        for step in range(1, waves + 1):
            strategy.begin(step)
            found = gradients(pipeline, step)
            time.sleep(pace.uniform(0, 2e-3) * (1 + 3 * number))
            strategy.update(step, lambda found=found: pipeline.step_on(found))

    with ThreadPoolExecutor(pipelines) as pool:
        for done in [pool.submit(train, number) for number in range(pipelines)]:
            done.result(60)
    # The first time each has pushed its last wave, which others may still have lacked.
    for strategy in (*strategies, *strategies):
        strategy.settle()
    for pipeline in everybody:
        pipeline.server.close()
    return everybody


def sgd(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters.values(), lr=1.0)


def counts(pipeline: Pipeline) -> Tensor:
    weights = torch.stack([p.detach() for p in pipeline.parameters.values()])
    return -len(pipeline.others) * weights[:, : len(pipeline.others)]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("distance", [0, 1, 4])
def test_nobody_computes_on_weights_that_lack_waves_beyond_the_distance(
    distance: int, servers: int
) -> None:
    """And nobody's weights lack a wave of its own, or have one that lies too far ahead."""
    pipelines, waves = 3, 12
    wrong: list[str] = []
    seen: set[int] = set()

    def count(pipeline: Pipeline, step: int) -> Mapping[str, Tensor]:
        before = step - 1
        for row in counts(pipeline).round().int().tolist():
            far = [before - distance <= c <= before + distance + 1 for c in row]
            if not all(far) or row[pipeline.pipeline] != before:
                wrong.append(f"pipeline {pipeline.pipeline} begins wave {step} on {row}")
            if distance == 0 and set(row) != {before}:
                wrong.append(f"pipeline {pipeline.pipeline} begins wave {step} on {row}")
            seen.update(before - c for c in row)
        unit = torch.zeros(4)
        unit[pipeline.pipeline] = 1
        return {"a": unit, "b": unit}

    found = run(pipelines, distance, servers, waves, sgd, count)
    assert not wrong
    # Those who are quicker did make use of the distance.
    assert max(seen) == distance
    for pipeline in found:
        assert torch.equal(counts(pipeline).round(), torch.full((2, pipelines), float(waves)))


def momentum(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("servers", [1, 2])
def test_with_distance_0_it_is_the_training_of_one_process(servers: int) -> None:
    pipelines, waves = 3, 12
    generator = torch.Generator().manual_seed(3)
    targets = torch.randn(pipelines, waves, 2, 4, generator=generator)

    def gradient(weights: Mapping[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
        """Of half the squared distance from targets, of which each wave has others."""
        return {name: weights[name].detach() - t for name, t in zip("ab", targets, strict=True)}

    found = run(
        pipelines,
        0,
        servers,
        waves,
        momentum,
        lambda pipeline, step: gradient(pipeline.parameters, targets[pipeline.pipeline, step - 1]),
    )
    alone = {name: nn.Parameter(torch.zeros(4)) for name in "ab"}
    optimizer = momentum(alone)
    for step in range(waves):
        for name, mean in gradient(alone, targets[:, step].mean(0)).items():
            alone[name].grad = mean
        optimizer.step()
    for pipeline in found:
        for name, parameter in pipeline.parameters.items():
            torch.testing.assert_close(parameter, alone[name], rtol=0, atol=1e-6)


def test_a_server_that_others_ask_while_it_steps_serves_the_weights_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Making what it serves takes until it steps, if it may step meanwhile."""
    asked, stepped = threading.Event(), threading.Event()

    class Slow(WaveShard):
        def __init__(self, parameters: Mapping[str, Tensor], distance: int) -> None:
            asked.set()
            stepped.wait(0.2)
            super().__init__(parameters, distance)

    def gradients(pipeline: Pipeline, step: int) -> Mapping[str, Tensor]:
        if pipeline.pipeline == 0 and step == 1:
            assert asked.wait(30)
        unit = torch.zeros(4)
        unit[pipeline.pipeline] = 1
        return {"a": unit, "b": unit}

    def signalling(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        optimizer.register_step_post_hook(lambda *_: asked.is_set() and stepped.set())
        return optimizer

    monkeypatch.setattr("executor.sync.waves.WaveShard", Slow)
    for pipeline in run(2, 0, 1, 3, signalling, gradients):
        assert torch.equal(counts(pipeline).round(), torch.full((2, 2), 3.0))


def test_changes_of_another_shape_are_refused() -> None:
    shard = WaveShard({"a": torch.zeros(4)}, 0)
    with pytest.raises(PipeplanError, match="start all pipelines with one plan"):
        shard.push({"wave": 1, "pipeline": 0}, [torch.zeros(3)], 1.0)
