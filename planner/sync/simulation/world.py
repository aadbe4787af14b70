"""The simulated world of synchronisation: times of a pipeline's iteration, and its links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from planner.errors import PipeplanError
from planner.sync.simulation.links import (
    NodeLinks,
    Routes,
    WorkerFlow,
    WorkerLinks,
    flow_over,
    ring,
    ring_ends,
)

MOST_WORKERS = 4096


@dataclass(frozen=True)
class LinkCost:
    """A message takes ``latency_s`` and its bytes over the bandwidth (Hockney 1994).

    Attributes:
        latency_s: seconds before the first byte arrives.
        bandwidth_gb_per_s: in decimal gigabytes per second.
    """

    latency_s: float
    bandwidth_gb_per_s: float

    def moving_s(self, bytes_: float) -> float:
        """Return the seconds of the bytes alone."""
        return bytes_ / (self.bandwidth_gb_per_s * 1e9)


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of a layer; times count from the start of the iteration.

    Attributes:
        bytes: of the parameters and of their gradients.
        complete_s: when the last backward has completed the gradients.
        needed_s: when the first forward uses the parameters.
    """

    bytes: int
    complete_s: float
    needed_s: float


@dataclass(frozen=True)
class PipelineRank:
    """One iteration of a pipeline rank; times count from the start of the iteration.

    Attributes:
        first_forward_s: start of its first forward.
        last_backward_s: end of its last backward.
        forward_s: duration of its first forward, during which parameters can still arrive.
        backward_s: duration of its last backward, during which gradients can already be sent.
        optimizer_s: duration of its optimizer step.
        parameter_bytes: bytes that it synchronises.
        network_card: its network card among those of the pipeline; ranks on one node share one.
        layers: its parameters in the order in which gradients are completed; empty: they are spread
            evenly over the first forward and the last backward.
    """

    first_forward_s: float
    last_backward_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    parameter_bytes: int
    network_card: int = 0
    layers: tuple[LayerParameters, ...] = ()

    def at_speed(self, factor: float) -> PipelineRank:
        """Return the rank with all its times multiplied by a factor."""
        times = [name for name in self.__dataclass_fields__ if name.endswith("_s")]
        layers = [
            replace(row, complete_s=row.complete_s * factor, needed_s=row.needed_s * factor)
            for row in self.layers
        ]
        scaled: dict[str, Any] = {name: factor * getattr(self, name) for name in times}
        return replace(self, **scaled, layers=tuple(layers))

    @property
    def occupied_s(self) -> float:
        """Time from the first forward to the end of the optimizer step."""
        return self.last_backward_s + self.optimizer_s - self.first_forward_s


@dataclass(frozen=True)
class World:
    """Pipelines that train replicas of one model, and the links between them.

    A pipeline is rigid: the operations of an iteration keep their distances, a slow iteration is
    stretched as a whole, and the next one begins as soon as every pipeline rank is free when it is
    needed.

    Attributes:
        workers: number of pipelines.
        pipelines_per_node: pipelines that share a node, and so a network card; pipelines are
            numbered node by node.
        ranks: pipeline ranks.
        within, between: links between pipelines of a node, and of different nodes.
        links: the links of the cluster, which concurrent transfers share max-min fairly; bandwidths
            are theirs, latencies those of ``within`` and ``between``. None: links with those
            bandwidths, see :class:`~planner.sync.simulation.links.NodeLinks`.
        collective_overhead_s: overhead of every collective, whatever its size.
        scheduler_round_trip_s: time from a request until the answer, if nothing else delays it.
        jitter_s: standard deviation of an iteration's time, whatever else slows it down.
        slots: consecutive forwards and backwards in an iteration.
        slowdown: factors of the pipelines' iteration times over those of ``ranks``; empty: 1.

    Raises:
        PipeplanError: naming every field that is out of range.
    """

    workers: int
    ranks: tuple[PipelineRank, ...]
    within: LinkCost
    between: LinkCost
    pipelines_per_node: int = 1
    collective_overhead_s: float = 0.0
    scheduler_round_trip_s: float = 2e-4
    jitter_s: float = 0.0
    slots: int = 2
    slowdown: tuple[float, ...] = ()
    links: WorkerLinks | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PipeplanError(problems)

    def _problems(self) -> Iterator[str]:
        if not 1 <= self.workers <= MOST_WORKERS:
            yield f"workers: {self.workers} is not a whole number from 1 to {MOST_WORKERS}"
        if self.pipelines_per_node < 1:
            yield f"pipelines_per_node: {self.pipelines_per_node} is not a number from 1"
        if not self.ranks or any(not p.occupied_s > 0 for p in self.ranks):
            yield "ranks: a pipeline needs a rank, and each takes some time per iteration"
        for name, link in (("within", self.within), ("between", self.between)):
            if not (link.latency_s >= 0 and link.bandwidth_gb_per_s > 0):
                yield f"{name}: {link} needs a latency from 0 and a bandwidth above 0"
        if self.slowdown and (len(self.slowdown) != self.workers or min(self.slowdown) <= 0):
            yield (
                f"slowdown: {len(self.slowdown)} factors for {self.workers} workers; give each "
                "one above 0, or none"
            )

    @cached_property
    def iteration_s(self) -> float:
        """Seconds between iterations of a pipeline that waits for nobody."""
        return max(rank.occupied_s for rank in self.ranks)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all pipeline ranks."""
        return sum(rank.parameter_bytes for rank in self.ranks)

    @cached_property
    def routes(self) -> Routes:
        """The links between workers."""
        return self.links or NodeLinks(
            self.workers,
            tuple(rank.network_card for rank in self.ranks),
            self.pipelines_per_node,
            self.within.bandwidth_gb_per_s,
            self.between.bandwidth_gb_per_s,
        )

    def link(self, members: tuple[int, ...]) -> LinkCost:
        """Return the slowest link that ascending members need."""
        return self.between if self.crosses(members) else self.within

    def crosses(self, members: tuple[int, ...]) -> bool:
        """Return whether ascending members are on several nodes."""
        return members[0] // self.pipelines_per_node != members[-1] // self.pipelines_per_node

    def at_links(self, within: LinkCost, between: LinkCost) -> World:
        """Return the world with measured links; those of the cluster keep their proportions."""
        factors = [
            new.bandwidth_gb_per_s / old.bandwidth_gb_per_s
            for new, old in ((within, self.within), (between, self.between))
        ]
        links = None if self.links is None else self.links.at_speed(*factors)
        return replace(self, within=within, between=between, links=links)

    def all_reduce(self, members: tuple[int, ...], bytes_: float, key: int = 0) -> WorkerFlow:
        """Return an all-reduce of a pipeline rank by a ring, as real runs do it.

        Members are in the order of the nodes, so that each card carries the bytes once each way.
        """
        return self._ring(members, key, 2 * (len(members) - 1), bytes_)

    def half(self, members: tuple[int, ...], bytes_: float, key: int = 0) -> WorkerFlow:
        """Return a reduce-scatter or an all-gather: one half of a ring."""
        return self._ring(members, key, len(members) - 1, bytes_)

    def telling_s(self, members: tuple[int, ...]) -> float:
        """Return how long it takes all to know each other's loss: a ring of small messages.

        Ranks in step gather it at the end of an iteration, after all other communication; those
        that have any on the way do so meanwhile.
        """
        return (len(members) - 1) * self.link(members).latency_s

    def group_all_reduce(
        self, members: tuple[int, ...], key: int
    ) -> tuple[tuple[WorkerFlow, tuple[int, ...]], ...]:
        """Return the all-reduce of a rank's parameters in parts that follow each other.

        Each part has the members that are done at its end. A ring's members are done one after the
        other (:func:`~planner.sync.simulation.links.ring_ends`), which matters where they then
        continue by themselves.
        """
        whole = self.all_reduce(members, self.ranks[key].parameter_bytes, key)
        if not whole.bytes:
            return ((whole, members),)
        hops, steps = ring(self.routes, members, key), 2 * (len(members) - 1)
        parts, before, fixed_s = [], 0.0, whole.fixed_s
        for end, places in ring_ends(hops, self.routes.capacity_gb_per_s, steps):
            share = end - before
            flow = replace(
                whole,
                bytes=whole.bytes * share,
                fixed_s=fixed_s,
                sent_bytes=whole.sent_bytes * share,
            )
            parts.append((flow, tuple(members[place] for place in places)))
            before, fixed_s = end, 0.0
        return tuple(parts)

    def exchange(self, pair: tuple[int, int], key: int) -> tuple[WorkerFlow, ...]:
        """Return a pair's exchange of weights: the first asks, the second answers."""
        return self._messages((pair, pair[::-1]), key, self.ranks[key].parameter_bytes)

    def server_messages(
        self, worker: int, servers: int, key: int, *, is_push: bool
    ) -> tuple[WorkerFlow, ...]:
        """Return messages of a worker to the servers, or back, over the world's links.

        The first workers are the servers; each has an even part of the parameters.

        Args:
            worker: the worker.
            servers: number of servers.
            key: the pipeline rank.
            is_push: whether the worker sends.
        """
        pairs = [(worker, n) if is_push else (n, worker) for n in range(servers)]
        return self._messages(pairs, key, self.ranks[key].parameter_bytes / servers)

    def _messages(
        self, pairs: Iterable[tuple[int, int]], key: int, bytes_: float
    ) -> tuple[WorkerFlow, ...]:
        """Return messages of a call, one after the other, from sender to receiver."""
        flows, overhead_s = [], self.collective_overhead_s
        for source, target in pairs:
            fixed_s = overhead_s + self.link((min(source, target), max(source, target))).latency_s
            flows.append(flow_over((self.routes.route(key, source, target),), bytes_, fixed_s))
            overhead_s = 0.0
        return tuple(flows)

    def _ring(self, members: tuple[int, ...], key: int, steps: int, bytes_: float) -> WorkerFlow:
        """Return so many steps of a ring, each with the members' share of the bytes."""
        count = len(members)
        if count == 1:
            return flow_over((), 0.0, 0.0)
        fixed_s = self.collective_overhead_s + steps * self.link(members).latency_s
        return flow_over(ring(self.routes, members, key), steps * bytes_ / count, fixed_s)
