"""What strategies between pipelines do with weights and the optimizer's state, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.coordinator.client import GroupAssignment
from executor.elastic.tensor_calls import TensorClient, TensorServer
from executor.elastic.weights import Weights
from executor.sync.averaging import AdPsgd, GroupAverage, OverlappedAverage, local_optimizer
from executor.sync.eager_parameter_server import EagerParameterServer
from executor.sync.parameter_server import ParameterServer
from executor.sync.protocol import DecentralizedStrategy
from executor.training.optimisation import Optimisation, StepOutcome
from planner.sync.strategies import EagerParameterServerOptions, ParameterServerOptions


def adamw(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters.values(), lr=0.1)


def momentum(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)


KEY = b"a key"


class Calls:
    """Calls to the ranks of this process."""

    def __init__(self, everybody: list[Neighbour]) -> None:
        self.everybody = everybody

    def there(self) -> dict[int, int]:
        return {neighbour.pipeline: 1 for neighbour in self.everybody}

    def call(self, pipeline: int, incarnation: int, *arguments: Any) -> Any:
        client = TensorClient(self.everybody[pipeline].server.address, KEY, 5.0)
        try:
            return client.call(*arguments)
        finally:
            client.close()


class Neighbour:
    """One of several ranks of this process, as a strategy sees them."""

    def __init__(self, pipeline: int, everybody: list[Neighbour], make: Any) -> None:
        torch.manual_seed(pipeline)
        self.pipeline = pipeline
        self.everybody = everybody
        self.parameters = {
            "w": nn.Parameter(torch.randn(3, 2)),
            "b": nn.Parameter(torch.randn(2)),
        }
        self.optimisation = Optimisation(self.parameters, frozenset(), make)
        self.weights = Weights(self.optimisation, {})
        self.server = TensorServer("127.0.0.1", KEY, most_callers=8)
        self.there = {0: 1, 1: 1}
        self.timeout_s = 5.0
        self.groups = self
        self.asked: list[tuple[int, bool]] = []
        self.meetings: list[tuple[int, ...]] = []
        self.met = self.meetings.append
        self.is_cut_off = False
        everybody.append(self)

    def ask(self, step: int, reduced: bool = True) -> GroupAssignment:
        self.asked.append((step, reduced))
        return GroupAssignment(step, ((0, 1), (1, 1)), 0)

    def mean(self, group: GroupAssignment, tensors: list[Tensor]) -> bool:
        """With a neighbour whose weights do not change."""
        if self.is_cut_off:
            return False
        other = next(n for n in self.everybody if n is not self)
        for mine, theirs in zip(tensors, other.weights.flat, strict=True):
            mine.copy_((mine + theirs) / 2)
        return True

    def caller(self) -> Calls:
        return Calls(self.everybody)

    def end_with_losses(self, waits: object) -> None:
        """Nobody is lost here."""

    def local_step(self) -> StepOutcome:
        for index, parameter in enumerate(self.parameters.values()):
            parameter.grad = torch.full_like(parameter, float(index + 1 + self.pipeline))
        return self.optimisation.step(1)

    def values(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters.values()])


def served(make: Any) -> Any:
    """What makes the optimizer of a rank whose parameters servers train."""
    return local_optimizer(ParameterServerOptions(), make)


@contextmanager
def two(make: Any) -> Iterator[tuple[Neighbour, Neighbour]]:
    everybody: list[Neighbour] = []
    pair = Neighbour(0, everybody, make), Neighbour(1, everybody, make)
    yield pair
    for neighbour in pair:
        neighbour.server.close()


def stepped_alone(neighbour: Neighbour) -> tuple[Tensor, dict[str, Any]]:
    """Weights and optimizer state after the same step without anybody else."""
    weights, state = (
        neighbour.values(),
        copy.deepcopy(neighbour.optimisation.optimizer.state_dict()),
    )
    neighbour.local_step()
    after = neighbour.values(), copy.deepcopy(neighbour.optimisation.optimizer.state_dict())
    with torch.no_grad():
        neighbour.weights.flat[0].copy_(weights)
    neighbour.optimisation.optimizer.load_state_dict(state)
    return after


def run(strategy: DecentralizedStrategy, neighbour: Neighbour, step: int = 1) -> None:
    strategy.begin(step)
    strategy.update(step, neighbour.local_step)
    strategy.settle()


@pytest.mark.parametrize("make", [adamw, momentum])
def test_an_average_is_of_weights_and_leaves_the_optimizer_its_state(make: Any) -> None:
    with two(make) as (mine, other):
        weights, state = stepped_alone(mine)
        run(GroupAverage(mine), mine)  # type: ignore[arg-type]
        torch.testing.assert_close(mine.values(), (weights + other.values()) / 2)
        found = mine.optimisation.optimizer.state_dict()["state"]
        torch.testing.assert_close(found, state["state"])


@pytest.mark.parametrize("make", [adamw, momentum])
def test_an_average_behind_the_computation_adds_what_it_changed_a_step_later(make: Any) -> None:
    with two(make) as (mine, other):
        strategy = OverlappedAverage(mine)  # type: ignore[arg-type]
        strategy.update(1, mine.local_step)
        given = mine.values()
        change = (given + other.values()) / 2 - given
        alone, state = stepped_alone(mine)
        strategy.update(2, mine.local_step)
        torch.testing.assert_close(mine.values(), alone + change)
        found = mine.optimisation.optimizer.state_dict()["state"]
        torch.testing.assert_close(found, state["state"])
        strategy.settle()
        torch.testing.assert_close(mine.values(), (alone + change + other.values()) / 2)
        assert mine.asked == [(1, True), (2, True)]


def test_an_average_behind_the_computation_that_failed_changes_nothing_and_is_told() -> None:
    with two(adamw) as (mine, _):
        strategy = OverlappedAverage(mine)  # type: ignore[arg-type]
        mine.is_cut_off = True
        strategy.update(1, mine.local_step)
        alone, _ = stepped_alone(mine)
        strategy.update(2, mine.local_step)
        torch.testing.assert_close(mine.values(), alone)
        strategy.settle()
        assert mine.asked == [(1, True), (2, False)]


@pytest.mark.parametrize("make", [adamw, momentum])
def test_ad_psgd_keeps_the_mean_of_the_weights_and_every_state(make: Any) -> None:
    with two(make) as (asks, answers):
        strategies = [AdPsgd(asks), AdPsgd(answers)]  # type: ignore[arg-type]
        mean = (asks.values() + answers.values()) / 2
        alone, state = stepped_alone(asks)
        update = alone - asks.values()
        run(strategies[0], asks)
        strategies[1].settle()
        assert asks.meetings == [(0, 1)]
        torch.testing.assert_close((asks.values() + answers.values()) / 2, mean + update / 2)
        found = asks.optimisation.optimizer.state_dict()["state"]
        torch.testing.assert_close(found, state["state"])
        assert not answers.optimisation.optimizer.state_dict()["state"]


def halved(make: Any) -> Any:
    """With half the learning rate: what one of two pipelines' gradients moves."""

    def made(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            group["lr"] /= 2
        return optimizer

    return made


@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_server_holds_the_one_state_of_all_workers(make: Any) -> None:
    """Two pushes one after the other are two steps of one optimizer."""
    with two(served(make)) as (host, worker):
        expected = Neighbour(0, [], halved(make))
        for neighbour in (host, worker):
            run(ParameterServer(neighbour, make, "async"), neighbour)  # type: ignore[arg-type]
        for pipeline in (0, 1):
            expected.pipeline = pipeline
            expected.local_step()
        torch.testing.assert_close(worker.values(), expected.values())


def test_a_group_is_who_asked_for_it_and_not_who_was_there_before() -> None:
    """The first took its share before the second came back: neither steps on its own alone."""
    with two(served(momentum)) as (host, worker):
        host.there = {0: 1}
        strategies = [ParameterServer(n, momentum) for n in (host, worker)]  # type: ignore[arg-type]
        before = host.values()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, strategies, (host, worker)))
        mean = torch.cat([torch.full((6,), 1.5), torch.full((2,), 2.5)])
        for neighbour in (host, worker):
            torch.testing.assert_close(neighbour.values(), before - 0.1 * mean)
        assert [strategy.reduced for strategy in strategies] == [True, True]


def test_a_stale_gradient_has_a_lower_rate() -> None:
    """The late gradient is of weights that four pushes have changed: two steps of both."""
    options = EagerParameterServerOptions()
    with two(served(momentum)) as (host, worker):

        def plain(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters.values(), lr=0.1)

        quick, late = (
            EagerParameterServer(neighbour, plain, options)  # type: ignore[arg-type]
            for neighbour in (host, worker)
        )
        before = host.values()
        for step in range(1, 5):
            run(quick, host, step)
        own = torch.cat([torch.full((6,), 1.0), torch.full((2,), 2.0)])
        moved = before - 4 * 0.05 * own
        torch.testing.assert_close(host.values(), moved)
        late.begin(1)
        assert late._pulling is not None
        late._pulling.result()
        late.update(1, worker.local_step)
        late.settle()
        gradients = torch.cat([torch.full((6,), 2.0), torch.full((2,), 3.0)])
        torch.testing.assert_close(worker.values(), moved - 0.05 / 3 * gradients)


def test_staleness_is_what_a_worker_knows_of_updates_since_it_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two workers, of whom the second takes two and a half times as long: worked out by hand."""
    noted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        EagerParameterServerOptions, "factor", lambda _, *given: noted.append(given) or 1.0
    )
    with two(served(momentum)) as pair:
        strategies = [
            EagerParameterServer(neighbour, momentum, EagerParameterServerOptions())  # type: ignore[arg-type]
            for neighbour in pair
        ]

        def begin(worker: int) -> None:
            strategies[worker].begin(1)
            pulling = strategies[worker]._pulling
            assert pulling is not None
            pulling.result()

        for worker in (0, 1):
            begin(worker)
        # The second worker takes two and a half times as long as the first.
        for worker in (0, 0, 1, 0, 0, 0, 1):
            strategies[worker].update(1, pair[worker].local_step)
            pushing = strategies[worker]._pushing
            assert pushing is not None
            pushing.result()
            begin(worker)
    assert noted == [(newer, 2) for newer in (0, 1, 0, 1, 2, 1, 3)]
