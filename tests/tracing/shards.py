"""Runs a localised step on all ranks of a group in one process, by the executor's own collectives.

Each rank is a thread with the graph, its shares of the parameters and a generator of its own. One
runs at a time, until it waits for the others at a collective.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor.distributed.member_group import TensorParallelGroup
from planner.tracing.export import ExportedStep
from planner.tracing.sharding.local import LocalStep, join, share
from planner.tracing.sharding.split import Split
from planner.tracing.sharing import attribute_of


class Meetings:
    """What the ranks of a group bring to each of their collectives, in order."""

    def __init__(self, degree: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(degree, timeout=60)
        self.brought: defaultdict[int, dict[int, Any]] = defaultdict(dict)


class Member:
    """A rank of a group, as the executor's groups talk to one."""

    shapes_only = False

    def __init__(self, meetings: Meetings, degree: int, index: int) -> None:
        self.meetings, self.degree, self.index = meetings, degree, index
        self.count = 0

    def all_of(self, value: Any) -> list[Any]:
        """What all ranks bring to this collective."""
        brought = self.meetings.brought[self.count]
        brought[self.index], self.count = value, self.count + 1
        generator = torch.get_rng_state()
        self.meetings.turn.release()
        try:
            self.meetings.barrier.wait()
        finally:
            self.meetings.turn.acquire()
        torch.set_rng_state(generator)
        return [brought[rank] for rank in range(self.degree)]

    def sum(self, value: Tensor) -> None:
        value.copy_(self.gather(value).sum(0))

    def highest(self, value: Tensor) -> None:
        value.copy_(self.gather(value).amax(0))

    def gather(self, value: Tensor) -> Tensor:
        return torch.stack(self.all_of(value.detach().clone()))

    def reduce_scatter(self, values: Tensor) -> Tensor:
        return self.gather(values).sum(0)[self.index]

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return torch.cat([parts[self.index] for parts in self.all_of(rows.split([*sent]))])


class Rank(fx.Interpreter):
    """Runs the graph with a rank's parameters; ``calls`` are its collectives."""

    def __init__(self, module: fx.GraphModule, values: dict[str, Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values = values
        self.calls: list[str] = []

    def fetch_attr(self, target: str) -> Any:
        return self.values.get(target, super().fetch_attr(target))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append(target)
        return super().call_method(target, args, kwargs)


def on_threads(run: Callable[[Member], Any], degree: int) -> list[Any]:
    """Results of all ranks, each of which starts from the generator as it is."""
    meetings, generator = Meetings(degree), torch.get_rng_state()

    def alone(rank: int) -> Any:
        with meetings.turn:
            torch.set_rng_state(generator)
            try:
                return run(Member(meetings, degree, rank))
            except BaseException:
                meetings.barrier.abort()  # The others wait for it.
                raise

    with ThreadPoolExecutor(degree) as pool:
        futures = [pool.submit(alone, rank) for rank in range(degree)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def run_on_shards(
    exported: ExportedStep, split: Split, degree: int, batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Run a step and its backward on a group.

    Returns:
        The loss; the gradients, shares joined, by parameter; and the names of the collectives.

    Raises:
        AssertionError: if ranks disagree about a loss or a gradient that all have.
    """
    module = fx.GraphModule(exported.module, LocalStep(exported, split).graph)

    def run(member: Member) -> tuple[Tensor, dict[str, Tensor], list[str]]:
        leaves: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}
        for target, name in exported.names.items():
            whole = attribute_of(exported.module, target)
            if isinstance(whole, nn.Parameter):
                if name not in leaves:
                    own = whole.detach()
                    if (row := split.parameters.get(name)) is not None:
                        own = share(own, row.dimension, row.parts, degree, member.index)
                    leaves[name] = own.clone().requires_grad_(whole.requires_grad)
                values[target] = leaves[name]
        rank, entries = Rank(module, values), [value.clone() for value in batch.values()]
        (loss,) = rank.run(TensorParallelGroup(member), *entries)
        loss.backward()
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return loss.detach(), found, rank.calls

    losses, found, calls = zip(*on_threads(run, degree), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    gradients = {name: _joined([own[name] for own in found], split, name) for name in found[0]}
    return losses[0], gradients, calls[0]


def _joined(gradients: Sequence[Tensor], split: Split, name: str) -> Tensor:
    if (row := split.parameters.get(name)) is not None:
        return join(gradients, row.dimension, row.parts)
    if name in split.summed:
        return torch.stack([*gradients]).sum(0)
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-12)
    return gradients[0]
