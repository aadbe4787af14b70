"""Parameter server (Li et al. 2014): the weights and the optimizer live on some of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor

from executor.coordinator.client import GroupAssignment
from executor.elastic.neighbours import Calls, Neighbours
from executor.elastic.tensor_calls import CallError, Header
from executor.sync.parameter_shards import (
    GradientShard,
    ServedOptimizer,
    Shard,
    shards_of,
)
from executor.sync.protocol import DecentralizedStrategy, Optimise
from executor.training.master_weights import MakeOptimizer
from executor.training.optimisation import StepOutcome

MOVES = 3
"""Servers that are tried for one call, when one after the other is gone."""
_PATIENCE = 0.75
ShardOf = Callable[[int, Mapping[str, Tensor]], Shard]
"""Makes the shard of a part from its parameters, which it copies."""


class ServedWeights:
    """Pushes to servers and fetches weights from them.

    The pipelines that have been there for longest serve, each a part of the parameters. If one is
    gone, the next takes its part over with the weights it has, and a shard without state.

    Args:
        neighbours: at this rank's place.
        make_shard: makes what a server keeps of a part.
        servers: how many pipelines serve.
    """

    def __init__(self, neighbours: Neighbours, make_shard: ShardOf, servers: int = 1) -> None:
        self.neighbours = neighbours
        self.masters = neighbours.optimisation.weights.masters
        self._make_shard = make_shard
        self._parts = shards_of(self.masters, servers)
        self.groups: dict[int, int] = {}
        """By part, the last group whose gradients are in this rank's own weights."""
        self._kept: Mapping[str, Tensor] = {}
        self._shards: dict[int, tuple[list[str], Shard]] = {}
        """Shards by part, with the pipelines that were there for longer when serving began."""
        self._lock = Lock()
        part_bytes = [sum(self.masters[n].nbytes for n in part) for part in self._parts]
        neighbours.server.handle("push", self._push, max(part_bytes))
        neighbours.server.handle("pull", self._pull)

    def parts(self) -> Iterator[tuple[int, list[str]]]:
        """Numbers and names of parameters of the parts, those without any left out."""
        return ((index, part) for index, part in enumerate(self._parts) if part)

    def call(
        self, calls: Calls, index: int, name: str, header: Header, tensors: Sequence[Tensor] = ()
    ) -> tuple[Header, list[Tensor]]:
        """Call the server of a part; if it is gone, the next one, once the coordinator says who.

        Servers are the pipelines that have been there for longest, so that one that comes back
        moves nothing.

        Args:
            calls: of this thread.
            index: of the part.
            name: of the call.
            header: of the call; ``group`` is a group's number with its members.
            tensors: of the call.

        Raises:
            CallError: if there is none in time; what was pushed is lost.
        """
        until_s = time.monotonic() + self.neighbours.timeout_s
        # As of now, and not as the last share told: all should call the same servers.
        there = calls.there()
        # All of a group's members asked for it: none is left out before it is given up.
        group = _group(header, header.get("members", {}))
        failed = CallError("nobody takes part any more")
        for _ in range(MOVES):
            if not there:
                break
            server = index % len(there)
            pipeline, incarnation = list(there.items())[server]
            elders = [f"{number}.{its}" for number, its in list(there.items())[:server]]
            added = {"part": index, "incarnation": incarnation, "elders": elders, **group}
            # What the servers before have taken is not waited for again.
            added["patience_s"] = _PATIENCE * max(0.0, until_s - time.monotonic())
            try:
                return calls.call(pipeline, incarnation, name, {**header, **added}, tensors)
            except CallError as error:
                failed = error
            there = calls.there_without(pipeline, incarnation)
            group = _group(header, there)
        raise failed

    @torch.no_grad()
    def set_weights(self, index: int, weights: Sequence[Tensor], group: int | None = None) -> None:
        """Take a part's weights from its server.

        Args:
            index: of the part.
            weights: of its parameters, in order.
            group: whose gradients led to them, if that is known.
        """
        with self._lock:
            for name, tensor in zip(self._parts[index], weights, strict=True):
                self.masters[name].copy_(tensor)
            if group is not None:
                self.groups[index] = group

    def serve_from(self, kept: Mapping[str, Tensor]) -> None:
        """Make new shards of these, and not of this rank's own weights, until the next call.

        A shard that is being made is finished first: afterwards the own weights may change.

        Args:
            kept: weights by name, that nobody changes; of any others the own ones are taken.
        """
        with self._lock:
            self._kept = kept

    def _shard(self, header: Header) -> Shard:
        """This rank's shard; made the first time it is asked for."""
        part, elders = int(header["part"]), header["elders"]
        with self._lock:
            since, shard = self._shards.get(part, (None, None))
            if shard is None or since != elders:
                # What it served at an earlier time is older than its own weights.
                mine = {n: self._kept.get(n, self.masters[n]) for n in self._parts[part]}
                shard = self._make_shard(part, mine)
                self._shards[part] = elders, shard
            return shard

    def _push(self, header: Header, pushed: list[Tensor]) -> tuple[Header, list[Tensor]]:
        # Those who wait for the answer must not give up before.
        most_s = _PATIENCE * self.neighbours.timeout_s
        patience_s = min(most_s, max(0.0, float(header.get("patience_s", most_s))))
        return self._shard(header).push(header, pushed, patience_s)

    def _pull(self, header: Header, _: list[Tensor]) -> tuple[Header, list[Tensor]]:
        return self._shard(header).pull(header)


class ServedGradients(ServedWeights):
    """Servers that step on gradients; the pipelines' own optimizers only stand for theirs.

    Args:
        neighbours: at this rank's place.
        make_optimizer: of the parameters on a server.
        servers: how many pipelines serve.
    """

    def __init__(
        self, neighbours: Neighbours, make_optimizer: MakeOptimizer, servers: int = 1
    ) -> None:
        super().__init__(neighbours, self._gradient_shard, servers)
        optimizer: object = neighbours.optimisation.optimizer
        assert isinstance(optimizer, ServedOptimizer)
        self.optimizer = optimizer
        self._make_optimizer = make_optimizer
        self._serving: dict[int, GradientShard] = {}
        neighbours.end_with_losses(self)

    def end_all_but(self, there: Mapping[int, int]) -> None:
        """Wait no more for gradients of pipelines that are not there.

        Args:
            there: incarnations of those that are, by number.
        """
        for shard in list(self._serving.values()):
            shard.end_all_but(there)

    def _gradient_shard(self, index: int, mine: Mapping[str, Tensor]) -> GradientShard:
        """Serve these: a step that they have had from a server before is not taken again."""
        after = self.groups.get(index, -1)
        self._serving[index] = GradientShard(mine, self._make_optimizer, after)
        return self._serving[index]

    def rates(self, factor: float = 1.0) -> list[float]:
        """Learning rates of the parameter groups, times a factor."""
        return [factor * rate for rate in self.optimizer.rates]

    def gradients(self, part: Sequence[str]) -> list[Tensor]:
        """Return a part's gradients of the last step, zeros where there are none."""
        found = self.optimizer.gradients
        return [found[n] if n in found else torch.zeros_like(self.masters[n]) for n in part]


class ParameterServer(DecentralizedStrategy):
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
        self._served = ServedGradients(neighbours, make_optimizer, servers)
        self._neighbours = neighbours
        self._mode = mode
        self._calls = neighbours.caller()

    def update(self, step: int, optimise: Optimise) -> StepOutcome:
        """Push and fetch, in place of the local optimizer's step."""
        group = self._neighbours.ask(step) if self._mode == "sync" else None
        self.reduced = True
        outcome = optimise()
        # Also if the step was skipped, with zeros: others of a group wait for this rank.
        self._exchange(group)
        self._served.optimizer.forget()
        self._neighbours.weights.put_back()
        return outcome

    def _exchange(self, group: GroupAssignment | None) -> None:
        for index, part in self._served.parts():
            number = None if group is None else group.number
            header: Header = {"rates": self._served.rates()}
            if group is not None and number is not None:
                mine = {"pipeline": self._neighbours.pipeline, "members": dict(group.members)}
                header |= {"group": number, **mine}
            else:
                header["rates"] = self._served.rates(1 / len(self._neighbours.there))
            try:
                gradients = self._served.gradients(part)
                told, weights = self._served.call(self._calls, index, "push", header, gradients)
                self._served.set_weights(index, weights, number)
                self.reduced = self.reduced and not told.get("left_out", False)
            except CallError:
                self.reduced = False


def _group(header: Header, there: Mapping[int, int]) -> Header:
    """Return a group's members that take part, where a call is of a group."""
    if "members" not in header:
        return {}
    members = header["members"].items()
    return {"members": sorted([n, i] for n, i in members if there.get(n) == i)}
