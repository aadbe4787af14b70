"""Timing of synchronous strategies: all-reduce in its forms, and the synchronous server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.cluster.link_table import FloatArray, IntArray
from planner.sync.simulation.links import WorkerFlow
from planner.sync.simulation.rounds import Round, Rounded
from planner.sync.simulation.training import Training
from planner.sync.simulation.transfers import ends_s
from planner.sync.simulation.world import (
    LayerParameters,
    PipelineRank,
    StageReduction,
    World,
    transfers_of,
)
from planner.sync.strategies import CrossIterationOptions

MOST_BUCKETS = 256
"""Most buckets of a pipeline rank; larger models are divided into this many equal ones."""
MOST_KEPT = 1024
"""Collectives of a strategy that are kept at a time."""


@dataclass(frozen=True)
class SimulatedBucket:
    """Parameters whose gradients are reduced at once; times count from the iteration's start.

    Attributes:
        bytes: of the parameters.
        complete_s: when the last of their gradients is complete.
        needed_s: when the first of them is used.
        optimizer_share: fraction of the optimizer step that has to come before, with their own.
    """

    bytes: float
    complete_s: float
    needed_s: float
    optimizer_share: float


def buckets_of(rank: PipelineRank, bucket_mib: float) -> list[SimulatedBucket]:
    """Return a rank's buckets in the order in which their gradients are complete.

    Real parameters fill a bucket until the next would be too much; parameters that are spread
    evenly are divided into at most :data:`MOST_BUCKETS` equal buckets.
    """
    if not rank.layers:
        return _equal_buckets(rank, bucket_mib)
    rows: list[list[LayerParameters]] = []
    room = 0.0
    for layer in rank.layers:
        if not rows or layer.bytes > room:
            rows.append([])
            room = bucket_mib * 2**20
        rows[-1].append(layer)
        room -= layer.bytes
    found: list[SimulatedBucket] = []
    done = 0
    for row in reversed(rows):
        done += sum(layer.bytes for layer in row)
        found.append(
            SimulatedBucket(
                sum(layer.bytes for layer in row),
                max(layer.complete_s for layer in row),
                min(layer.needed_s for layer in row),
                done / max(rank.parameter_bytes, 1),
            )
        )
    return found[::-1]


def _equal_buckets(rank: PipelineRank, bucket_mib: float) -> list[SimulatedBucket]:
    wanted = math.ceil(rank.parameter_bytes / (bucket_mib * 2**20))
    count = min(max(wanted, 1), MOST_BUCKETS)
    return [
        SimulatedBucket(
            rank.parameter_bytes / count,
            rank.last_backward_s - rank.backward_s * (1 - (place + 1) / count),
            rank.first_forward_s + rank.forward_s * (count - 1 - place) / count,
            (count - place) / count,
        )
        for place in range(count)
    ]


Request = tuple[float, int, StageReduction]
"""When a collective is requested, its pipeline rank, and what it takes."""


class WorkerNetwork:
    """The resources of collectives of all workers: their rank's last collective, and the links.

    The collectives of one call share the links; those of earlier calls hold back only their own
    rank.
    """

    def __init__(self, world: World) -> None:
        self._place_free_s = [0.0] * len(world.ranks)
        self._transfers = transfers_of(world)

    def run(self, requests: Sequence[Request]) -> list[float]:
        """Return the ends of collectives; those of a rank run in the order of the requests."""
        nothing = WorkerFlow((), math.inf, 0.0, 0.0)  # Of a worker by itself.
        rows = []
        for ready_s, key, reduction in requests:
            flow = (*reduction.flows, nothing)[0]
            begin_s = max(ready_s, self._place_free_s[key] - flow.fixed_s)
            rows.append((begin_s, key, flow))
        found = ends_s(self._transfers, rows)
        for (_, key, _), end_s in zip(requests, found, strict=True):
            self._place_free_s[key] = max(self._place_free_s[key], end_s)
        return found


Collective = Callable[[tuple[int, ...], float, int], StageReduction]


class _Buckets:
    """Gradients of every pipeline rank in buckets, the last layers' first.

    Args:
        world: pipelines and links.
        bucket_mib: least bytes of a bucket.
        collective: of the world, what reduces a bucket.
        overlap: whether buckets are reduced during the backward.
    """

    def __init__(
        self, world: World, bucket_mib: float, collective: Collective, *, overlap: bool
    ) -> None:
        self.collective = lru_cache(MOST_KEPT)(collective)
        self.network = WorkerNetwork(world)
        self.rows = [buckets_of(rank, bucket_mib) for rank in world.ranks]
        self._ready_s = [
            np.array([bucket.complete_s if overlap else rank.last_backward_s for bucket in row])
            for rank, row in zip(world.ranks, self.rows, strict=True)
        ]

    def reduce(
        self, round_: Round, earliest_s: FloatArray | None = None
    ) -> tuple[list[list[float]], float]:
        """Return the ends of all buckets' collectives by pipeline rank, and the bytes sent.

        Args:
            round_: the round of the workers.
            earliest_s: before which no rank asks for any; None: as soon as gradients are there.
        """
        first_s = np.zeros(len(self.rows)) if earliest_s is None else earliest_s
        requests = [
            (
                max(ready_s, float(first_s[key])),
                key,
                self.collective(round_.workers, self.rows[key][place].bytes, key),
            )
            for ready_s, key, place in sorted(self._asked(round_))
        ]
        found: list[list[float]] = [[] for _ in self.rows]
        for (_, key, _), end_s in zip(requests, self.network.run(requests), strict=True):
            found[key].append(end_s)
        return found, sum(reduction.sent_bytes for _, _, reduction in requests)

    def _asked(self, round_: Round) -> Iterator[tuple[float, int, int]]:
        """Return when each bucket is requested: when the last worker has its gradients."""
        for key, offsets_s in enumerate(self._ready_s):
            times_s = round_.start_s[:, None] + round_.slowdown[:, None] * offsets_s
            for index, ready_s in enumerate(times_s.max(axis=0).tolist()):
                yield ready_s, key, index


def next_starts_s(round_: Round, ranks: Iterable[PipelineRank], free_s: FloatArray) -> FloatArray:
    """Return the earliest starts at which every pipeline rank is free when it is needed.

    Args:
        round_: the round of the workers.
        ranks: the pipeline ranks.
        free_s: when they are free, by worker and pipeline rank.
    """
    needed_s = np.array([rank.first_forward_s for rank in ranks])
    starts: FloatArray = (free_s - needed_s * round_.next_slowdown[:, None]).max(axis=1)
    return starts


def own_ends_s(round_: Round, ranks: Iterable[PipelineRank]) -> FloatArray:
    """Return the end of each pipeline rank's last backward, by worker and rank."""
    ends_s = np.array([rank.last_backward_s for rank in ranks])
    found: FloatArray = round_.start_s[:, None] + ends_s * round_.slowdown[:, None]
    return found


class AllReduceTiming:
    """Buckets are reduced during the backward (or after it), then the optimizer step follows."""

    def __init__(self, world: World, bucket_mib: float, *, overlap: bool = True) -> None:
        self._world = world
        self._buckets = _Buckets(world, bucket_mib, world.all_reduce, overlap=overlap)

    def run(self, round_: Round) -> Rounded:
        """Run a round: no worker continues before the last bucket."""
        ends_s, sent_bytes = self._buckets.reduce(round_)
        reduced_s = np.array([max(row) for row in ends_s])
        steps_s = np.array([rank.optimizer_s for rank in self._world.ranks])
        free_s = reduced_s + steps_s * round_.slowdown[:, None]
        told_s = free_s + self._world.telling_s(round_.workers)
        starts_s = next_starts_s(round_, self._world.ranks, told_s)
        every = np.broadcast_to(reduced_s, free_s.shape)
        return Rounded(starts_s, every, float(free_s.max()), sent_bytes)


class DecoupledTiming:
    """DeAR (Zhang et al. 2023): reduce-scatter overlaps the backward, all-gather the forward.

    The all-gathers run in the order of the layers; a layer's optimizer step comes right before its
    first forward.
    """

    def __init__(self, world: World, bucket_mib: float) -> None:
        self._world = world
        self._buckets = _Buckets(world, bucket_mib, world.half, overlap=True)

    def run(self, round_: Round) -> Rounded:
        """Run a round: the next iteration begins when no layer's parameters will come too late."""
        world, buckets = self._world, self._buckets
        scattered_s, sent_bytes = buckets.reduce(round_)
        starts_s = next_starts_s(round_, world.ranks, own_ends_s(round_, world.ranks))
        rows = [(key, bucket) for key, row in enumerate(buckets.rows) for bucket in reversed(row)]
        requests = [
            (scattered_s[key][-1], key, buckets.collective(round_.workers, bucket.bytes, key))
            for key, bucket in rows
        ]
        gathered_s = np.zeros(len(world.ranks))
        for (key, bucket), end_s in zip(rows, buckets.network.run(requests), strict=True):
            step_s = world.ranks[key].optimizer_s * bucket.optimizer_share
            before_s = bucket.needed_s - step_s
            starts_s = np.maximum(starts_s, end_s - before_s * round_.next_slowdown)
            gathered_s[key] = end_s
        sent_bytes += sum(reduction.sent_bytes for _, _, reduction in requests)
        every = np.broadcast_to(gathered_s, (len(round_.workers), len(world.ranks)))
        return Rounded(starts_s, every, float(gathered_s.max()), sent_bytes)


class CrossIterationTiming:
    """The all-reduce of an iteration overlaps the next one, which does not wait for it.

    It begins after the backward, and after the all-reduce of the iteration before has ended.
    """

    def __init__(self, world: World, fusion_mib: float) -> None:
        self._world = world
        self._buckets = _Buckets(world, fusion_mib, world.all_reduce, overlap=False)
        self._last_s: FloatArray = np.zeros(len(world.ranks))

    def run(self, round_: Round) -> Rounded:
        """Run a round: the iteration after the next needs this one's mean."""
        ends_s, sent_bytes = self._buckets.reduce(round_, self._last_s)
        steps_s = np.array([rank.optimizer_s for rank in self._world.ranks])
        own_s = own_ends_s(round_, self._world.ranks) + steps_s * round_.slowdown[:, None]
        starts_s = next_starts_s(round_, self._world.ranks, np.maximum(own_s, self._last_s))
        updated_s = float(own_s.max())
        self._last_s = np.array([max(row) for row in ends_s])
        every = np.broadcast_to(self._last_s, own_s.shape)
        return Rounded(starts_s, every, updated_s, sent_bytes)


class SynchronousServerTiming:
    """Gradients go to the servers; after the last one, the parameters are sent back.

    The first workers are the servers, and share the parameters evenly.
    """

    def __init__(self, world: World, servers: int) -> None:
        self._world, self._servers = world, servers
        self._messages = lru_cache(2 * world.workers * len(world.ranks))(world.server_messages)
        self._transfers = transfers_of(world)

    def run(self, round_: Round) -> Rounded:
        """Run a round: a worker continues when it has its parameters back."""
        world, count = self._world, len(round_.workers)
        steps_s = np.array([rank.optimizer_s for rank in world.ranks])
        asked_s = own_ends_s(round_, world.ranks)
        come_s = self._called_s(round_, asked_s, is_push=True)
        moved_s = np.broadcast_to(come_s.max(axis=0) + steps_s, asked_s.shape)
        back_s = self._called_s(round_, moved_s, is_push=False)
        starts_s = next_starts_s(round_, world.ranks, back_s)
        sent_bytes = 2.0 * count * world.parameter_bytes
        return Rounded(starts_s, back_s, float(moved_s.max()), sent_bytes)

    def _called_s(self, round_: Round, asked_s: FloatArray, *, is_push: bool) -> FloatArray:
        """Return when each worker's messages to or from the servers have arrived."""
        requests = [
            (float(asked_s[row, key]), (row, key), flow)
            for row, worker in enumerate(round_.workers)
            for key in range(len(self._world.ranks))
            for flow in self._messages(worker, self._servers, key, is_push=is_push)
        ]
        found = ends_s(self._transfers, requests)
        arrived_s: FloatArray = np.array(found).reshape(*asked_s.shape, self._servers).max(axis=2)
        return arrived_s


class ExactUpdate:
    """One step of SGD with momentum on the mean of all workers' gradients.

    All-reduce, its fused and decoupled forms and the synchronous parameter server compute this.
    """

    staleness = 0

    def __init__(self, training: Training) -> None:
        self._weights: FloatArray = training.weights[0].copy()
        self._velocity = np.zeros_like(self._weights)

    def run(self, training: Training, workers: IntArray, iteration: int) -> None:
        """Update the equal weights of all workers, with their batches as one large batch."""
        gradient = training.mean_gradient(self._weights, workers, iteration)
        self._velocity = training.learning.momentum * self._velocity + gradient
        self._weights = self._weights - training.learning.learning_rate * self._velocity

    def models(self) -> FloatArray:
        """Return the parameters."""
        return self._weights[None]


class CrossIterationUpdate:
    """Gradients at an approximation of the parameters, while the last mean is in transfer.

    With w and v the parameters and momentum that contain the means of all iterations but the last,
    an iteration begins on w - rate * (momentum * v + u): u is the worker's own last gradient, or
    the last mean that has arrived.
    """

    staleness = 1

    def __init__(self, training: Training, options: CrossIterationOptions) -> None:
        self._weights: FloatArray = training.weights[0].copy()
        self._velocity = np.zeros_like(self._weights)
        self._own = np.zeros_like(training.weights)
        self._on_its_way = np.zeros_like(self._weights)
        self._arrived = np.zeros_like(self._weights)
        self._uses_own = options.approximation == "own_gradient"

    def run(self, training: Training, workers: IntArray, iteration: int) -> None:
        """Compute gradients of this iteration; then apply the mean of the last one."""
        learning = training.learning
        at_hand = self._own[workers] if self._uses_own else self._arrived
        ahead = learning.momentum * self._velocity + at_hand
        begun = np.broadcast_to(
            self._weights - learning.learning_rate * ahead if iteration > 1 else self._weights,
            (len(workers), len(self._weights)),
        )
        found = training.own_gradients(np.ascontiguousarray(begun), workers, iteration)
        if iteration > 1:
            self._arrive(training)
        self._own[workers] = found
        self._on_its_way = found.mean(axis=0)

    def _arrive(self, training: Training) -> None:
        self._arrived = self._on_its_way
        self._velocity = training.learning.momentum * self._velocity + self._arrived
        self._weights = self._weights - training.learning.learning_rate * self._velocity

    def models(self) -> FloatArray:
        """Return the parameters with all means that have arrived."""
        return self._weights[None]
