"""The ranks at the same place of other pipelines, as a decentralized strategy uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from executor.coordinator.client import Client, GroupAssignment
from executor.elastic.process_groups import DynamicGroups
from executor.elastic.tensor_calls import (
    CallError,
    Header,
    OpenCalls,
    TensorClient,
    TensorServer,
)
from executor.elastic.weights import Weights
from executor.training.optimisation import Optimisation

_LAST = 2**31
"""A generation of process groups that no group before the last has."""
_LOOK_S = 0.02


class Waits(Protocol):
    """Threads of this rank that wait for pipelines."""

    def end_all_but(self, there: Mapping[int, int]) -> None:
        """End the waits for pipelines that are not there any more.

        Args:
            there: incarnations of those that are, by number.
        """


class Neighbours:
    """The ranks at the same place of the other pipelines.

    Args:
        client: of the coordinator.
        groups: process groups with them.
        server: of calls from them.
        optimisation: of this rank.
        weights: of this rank.
        timeout_s: of calls.
        met: called with the members of each group.

    Attributes:
        there: incarnations of the pipelines that took part as this rank's last work unit was told,
            by number, in the order they came in.
        open_calls: to neighbours, that fail as soon as the coordinator gives up whom they are to.
    """

    def __init__(
        self,
        client: Client,
        groups: DynamicGroups,
        server: TensorServer,
        optimisation: Optimisation,
        weights: Weights,
        timeout_s: float,
        met: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.client = client
        self.groups = groups
        self.server = server
        self.optimisation = optimisation
        self.weights = weights
        self.timeout_s = timeout_s
        self.met = met
        self.there: Mapping[int, int] = {}
        self.open_calls = OpenCalls()
        self.end_with_losses(self.open_calls)

    def end_with_losses(self, waits: Waits) -> None:
        """Have waits ended as soon as the coordinator gives up whom they are for."""
        self.client.at_change(waits.end_all_but)

    @property
    def pipeline(self) -> int:
        """This rank's."""
        return self.client.pipeline

    def ask(self, step: int, reduced: bool = True) -> GroupAssignment:
        """Ask the coordinator whom to average with.

        Args:
            step: that this rank has done.
            reduced: whether the average before succeeded, if it overlapped the computation.
        """
        group = self.client.ask(step, reduced)
        self.met(tuple(number for number, _ in group.members))
        return group

    def caller(self) -> Calls:
        """Calls to neighbours; each thread needs one of its own."""
        return Calls(self)

    def mean_of_all(self) -> bool:
        """Average the weights over all pipelines that are there, once the work is over."""
        members = tuple(sorted(self.there.items()))
        done = self.groups.mean(GroupAssignment(None, members, _LAST), self.weights.flat)
        self.weights.put_back()
        return done


class Calls:
    """Connections of one thread to neighbours, made when they are needed."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._clients: dict[tuple[int, int], TensorClient] = {}

    def call(
        self,
        pipeline: int,
        incarnation: int,
        name: str,
        header: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
    ) -> tuple[Header, list[Tensor]]:
        """Call the rank at this place of another pipeline.

        Raises:
            CallError: if it is gone.
            RefusedError: if it refuses.
        """
        key = pipeline, incarnation
        client = self._clients[key] if key in self._clients else self._connected(*key)
        self._clients[key] = client
        try:
            return client.call(name, header, tensors)
        except CallError:
            self._clients.pop(key).close()
            raise

    def _connected(self, pipeline: int, incarnation: int) -> TensorClient:
        near = self._neighbours
        address = near.client.addresses.get((pipeline, incarnation))
        if address is None:
            raise CallError(f"pipeline {pipeline} takes no part")
        during = partial(near.open_calls.to, pipeline, incarnation)
        return TensorClient(address, near.client.key, near.timeout_s, during)

    def there(self) -> dict[int, int]:
        """Return the incarnations of the pipelines that take part now, in the order they came."""
        return dict(self._neighbours.client.there)

    def there_without(self, pipeline: int, incarnation: int) -> dict[int, int]:
        """Wait until a pipeline is given up, and return who is left; none if it takes too long."""
        until_s = time.monotonic() + self._neighbours.timeout_s
        while (there := self.there()).get(pipeline) == incarnation:
            if time.monotonic() > until_s:
                return {}
            time.sleep(_LOOK_S)
        return there
