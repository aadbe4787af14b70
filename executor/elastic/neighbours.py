"""The ranks at the same place of other pipelines, as a decentralized strategy uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from executor.coordinator.client import Client, GroupAssignment
from executor.coordinator.store import address_of, incarnations_there
from executor.elastic.process_groups import DynamicGroups
from executor.elastic.tensor_calls import (
    CallError,
    Header,
    OpenCalls,
    RefusedError,
    TensorClient,
    TensorServer,
)
from executor.elastic.weights import Weights
from executor.training.optimisation import Optimisation

_LAST = 2**31
"""A generation of process groups that no group before the last has."""


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
        there: incarnations of the pipelines that take part, by number, in the order they came in.
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
        client.at_each_beat(self._end_calls_to_lost)

    def _end_calls_to_lost(self, store: Store) -> None:
        if self.open_calls:
            self.open_calls.end_all_but(incarnations_there(store))

    @property
    def pipeline(self) -> int:
        """This rank's."""
        return self.client.pipeline

    def update(self, there: Mapping[int, int]) -> None:
        """Note which pipelines take part now."""
        self.there = there

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
        self._store = neighbours.client.meeting.connect()
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
        if key not in self._clients:
            address = address_of(pipeline, self._neighbours.client.place, incarnation)
            found = self._address(address)
            near = self._neighbours
            self._clients[key] = TensorClient(
                found, near.client.key, near.timeout_s, partial(near.open_calls.to, *key)
            )
        try:
            return self._clients[key].call(name, header, tensors)
        except RefusedError:
            raise
        except CallError:
            self._clients.pop(key).close()
            raise

    def there(self) -> dict[int, int]:
        """Return the incarnations of the pipelines that take part now, in the order they came."""
        return incarnations_there(self._store)

    def _address(self, key: str) -> str:
        """Return the address at which a neighbour that has just come serves tensors."""
        try:
            self._store.wait([key], timedelta(seconds=self._neighbours.timeout_s))
            return str(self._store.get(key).decode())
        except (RuntimeError, ConnectionError):
            raise CallError(f"nothing at {key}") from None
