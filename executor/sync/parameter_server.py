"""Parameter server (Li et al. 2014): the weights and the optimizer live on some of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from executor.coordinator.client import AGroup
from executor.master_weights import MakeOptimizer
from executor.optimisation import Outcome
from executor.pipelines.neighbours import Neighbours
from executor.pipelines.tensor_calls import CallError, Header
from executor.sync.parameter_shards import ServedOptimizer, Shard, shards_of
from executor.sync.protocol import Optimise

MOVES = 3
"""Times that a step looks for new servers when one is gone."""


class ServedWeights:
    """Pushes gradients to servers and fetches weights from them.

    The first pipelines that are there serve, each a part of the parameters. If one is gone, the
    next takes its part over with the weights it has, and an optimizer without state.

    Args:
        neighbours: at this rank's place.
        make_optimizer: of the parameters on a server.
        servers: how many pipelines serve.
    """

    def __init__(
        self, neighbours: Neighbours, make_optimizer: MakeOptimizer, servers: int = 1
    ) -> None:
        self.neighbours = neighbours
        self.masters = neighbours.optimisation.weights.masters
        self.optimizer = ServedOptimizer(neighbours.optimisation.optimizer)
        self._make_optimizer = make_optimizer
        self._parts = shards_of(self.masters, servers)
        self._shards: dict[tuple[int, int], Shard] = {}
        self._lock = Lock()
        neighbours.optimisation.weights.optimizer = self.optimizer  # type: ignore[assignment]
        neighbours.server.handle("push", self._push)
        neighbours.server.handle("pull", self._pull)

    def hosts(self) -> Iterator[tuple[int, int, list[str]]]:
        """Pipeline, life and part of each server."""
        there = sorted(self.neighbours.there.items())
        for index, part in enumerate(self._parts):
            if part:
                yield *there[index % len(there)], part

    def rates(self, factor: float = 1.0) -> list[float]:
        """Learning rates of the parameter groups, times a factor."""
        return [factor * rate for rate in self.optimizer.rates]

    def gradients(self, part: Sequence[str]) -> list[Tensor]:
        """Of a part, with zeros where there are none."""
        found = [self.masters[name] for name in part]
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in found]

    @torch.no_grad()
    def set_weights(self, part: Sequence[str], weights: Sequence[Tensor]) -> None:
        """Take weights from a server."""
        with self._lock:
            for name, tensor in zip(part, weights, strict=True):
                self.masters[name].copy_(tensor)

    def _shard(self, header: Header) -> Shard:
        """This rank's shard; made of its own weights the first time it is asked for."""
        part = int(header["part"])
        with self._lock:
            key = part, int(header["life"])
            if key not in self._shards:
                mine = {name: self.masters[name] for name in self._parts[part]}
                self._shards[key] = Shard(mine, self._make_optimizer)
            return self._shards[key]

    def _push(self, header: Header, gradients: list[Tensor]) -> tuple[Header, list[Tensor]]:
        shard = self._shard(header)
        if "group" in header:
            shard.collect(header, gradients, self.neighbours.timeout_s)
        else:
            shard.apply(header, gradients)
        if not header.get("pull", True):
            return {"version": shard.version}, []
        return self._weights(shard)

    def _pull(self, header: Header, _: list[Tensor]) -> tuple[Header, list[Tensor]]:
        return self._weights(self._shard(header))

    def _weights(self, shard: Shard) -> tuple[Header, list[Tensor]]:
        version, weights = shard.weights()
        return {"version": version}, weights


class ParameterServer:
    """Every step pushes gradients and fetches the weights they led to.

    ``sync``: servers step on the mean over all who take part, and everybody goes on with the same
    weights. ``async``: they step on each gradient as it comes, at the learning rate over the number
    of pipelines, so that as many gradients move the weights as far. Momentum and Adam's moments are
    the servers', one set for all.

    Args:
        neighbours: at this rank's place.
        make_optimizer: of the parameters on a server.
        mode: ``sync`` or ``async``.
        servers: how many pipelines serve.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        make_optimizer: MakeOptimizer,
        mode: str = "sync",
        servers: int = 1,
    ) -> None:
        self._served = ServedWeights(neighbours, make_optimizer, servers)
        self._neighbours = neighbours
        self._mode = mode
        self._calls = neighbours.caller()
        self.reduced = True

    def begin(self, step: int) -> None:
        """Nothing is under way."""

    def update(self, step: int, optimise: Optimise) -> Outcome:
        """Push and fetch, in place of the local optimizer's step."""
        group = self._neighbours.ask(step) if self._mode == "sync" else None
        self._served.optimizer.exchange = partial(self._exchange, group)
        self.reduced = True
        outcome = optimise()
        if outcome.skipped:
            # Others of a group wait for this rank.
            self._exchange(group)
        self._neighbours.weights.put_back()
        return outcome

    def settle(self) -> None:
        """Nothing is under way."""

    def reload(self) -> None:
        """The servers' weights are fetched after the first step."""

    def _exchange(self, group: AGroup | None) -> None:
        for index, (pipeline, life, part) in enumerate(self._served.hosts()):
            header: Header = {"part": index, "life": life}
            if group is not None and group.number is not None:
                header |= {"group": group.number, "count": len(group.members)}
                header["rates"] = self._served.rates()
            else:
                header["rates"] = self._served.rates(1 / len(self._neighbours.there))
            try:
                gradients = self._served.gradients(part)
                _, weights = self._calls.call(pipeline, life, "push", header, gradients)
                self._served.set_weights(part, weights)
            except CallError:
                # The coordinator will name another server; this gradient is lost.
                self.reduced = False
