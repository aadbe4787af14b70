"""Strategies whose workers step together: a round is one iteration of all that are present."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.simulation.engine import Engine, Strategy
from planner.sync.simulation.links import WorkerFlow
from planner.sync.simulation.world import LayerParameters, PipelineRank
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
    sizes = [sum(layer.bytes for layer in row) for row in rows]
    return [
        SimulatedBucket(
            size,
            max(layer.complete_s for layer in row),
            min(layer.needed_s for layer in row),
            sum(sizes[place:]) / max(rank.parameter_bytes, 1),
        )
        for place, (size, row) in enumerate(zip(sizes, rows, strict=True))
    ]


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


@dataclass
class Round:
    """One iteration of the workers that began it; arrays have one entry per worker.

    Attributes:
        number: of the round, from 1.
        workers: their numbers, ascending.
        start_s, slowdown: of their iterations.
        to_come: by pipeline rank, transfers that have not ended.
        reduced_s: by pipeline rank, the end of its last collective.
        free_s: when ranks can run the next iteration, by pipeline rank and worker.
        next_slowdown: of the workers' next iterations.
    """

    number: int
    workers: tuple[int, ...]
    start_s: FloatArray
    slowdown: FloatArray
    to_come: list[int] = field(default_factory=list)
    reduced_s: list[float] = field(default_factory=list)
    free_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    next_slowdown: FloatArray = field(default_factory=lambda: np.zeros(0))

    def at_s(self, offset_s: float) -> FloatArray:
        """Return the moments so many seconds after a usual iteration's start, by worker."""
        return self.start_s + offset_s * self.slowdown


class Rounds(Strategy):
    """One step of SGD with momentum on the mean of the gradients of all workers in a round.

    A worker that returns begins with the next round. A round that all workers leave is lost.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.weights: FloatArray = engine.training.weights[0].copy()
        self.velocity = np.zeros_like(self.weights)
        self._number = 0
        self._awaited = set(range(engine.world.workers))
        """Workers of the last round that have not begun the next one."""
        self._begun: list[int] = []
        self._returned: list[int] = []

    def start(self, round_: Round) -> None:
        """Begin to synchronise a round, whose iterations have all begun."""
        raise NotImplementedError

    def begun(self, now_s: float, worker: int) -> None:
        """Start the round once all have begun; those that have returned begin with the first."""
        self._awaited.discard(worker)
        self._begun.append(worker)
        returned, self._returned = self._returned, []
        self._awaited.update(returned)
        for other in returned:
            self._enter(other)
        self._start_if_all()

    def left(self, now_s: float, worker: int) -> None:
        """Continue without the worker."""
        self._awaited.discard(worker)
        for rows in (self._begun, self._returned):
            if worker in rows:
                rows.remove(worker)
        self._start_if_all()

    def joined(self, now_s: float, worker: int) -> None:
        """Begin with the next round; at once if nobody else is present."""
        if sum(self.engine.alive) == 1:
            self._awaited = {worker}
            self._enter(worker)
        else:
            self._returned.append(worker)

    def _enter(self, worker: int) -> None:
        self.engine.iteration[worker] = self._number
        self.engine.begin(worker)

    def _start_if_all(self) -> None:
        if self._awaited or not self._begun:
            return
        self._number += 1
        workers, self._begun = tuple(sorted(self._begun)), []
        self._awaited = set(workers)
        rows = np.array(workers)
        engine = self.engine
        self.start(Round(self._number, workers, engine.start_s[rows], engine.slowdown[rows]))

    def present(self, round_: Round) -> list[int]:
        """Return the places of workers that have not left since the round began."""
        iteration = self.engine.iteration
        return [n for n, worker in enumerate(round_.workers) if iteration[worker] == round_.number]

    def update(self, round_: Round) -> None:
        """Take the workers' batches as one large batch."""
        every = np.broadcast_to(self.weights, (len(round_.workers), len(self.weights)))
        self.step(self.gradients(every, round_).mean(axis=0))

    def gradients(self, weights: FloatArray, round_: Round) -> FloatArray:
        """Return the gradient of each worker on its row of weights."""
        training = self.engine.training
        return training.own_gradients(weights, np.array(round_.workers), round_.number)

    def step(self, gradient: FloatArray) -> None:
        """Apply a mean gradient."""
        learning = self.engine.training.learning
        self.velocity = learning.momentum * self.velocity + gradient
        self.weights = self.weights - learning.learning_rate * self.velocity

    def models(self) -> FloatArray:
        """Return the weights that all share."""
        return self.weights[None]


class AllReduce(Rounds):
    """Gradients in buckets, the last layers' first; the optimizer step follows the last bucket.

    Ranks in step then gather their losses.

    Args:
        engine: the event loop.
        bucket_mib: size of a bucket.
        overlap: whether buckets are reduced during the backward, or after it.
    """

    def __init__(self, engine: Engine, bucket_mib: float, *, overlap: bool = True) -> None:
        super().__init__(engine)
        self._overlap = overlap
        self._buckets = [buckets_of(rank, bucket_mib) for rank in engine.world.ranks]
        self._collective = lru_cache(MOST_KEPT)(self._collective_of())

    def _collective_of(self) -> Callable[[tuple[int, ...], float, int], WorkerFlow]:
        return self.engine.world.all_reduce

    def start(self, round_: Round) -> None:
        """Reduce each bucket when the last worker has its gradients."""
        round_.to_come = [len(row) for row in self._buckets]
        round_.reduced_s = [0.0] * len(self._buckets)
        for key, row in enumerate(self._buckets):
            rank = self.engine.world.ranks[key]
            for bucket in row:
                offset_s = bucket.complete_s if self._overlap else rank.last_backward_s
                ready_s = float(round_.at_s(offset_s).max())
                flow = self._collective(round_.workers, bucket.bytes, key)
                self.engine.queue(ready_s, key, flow, self._ended, round_, key)

    def _ended(self, now_s: float, round_: Round, key: int) -> None:
        round_.to_come[key] -= 1
        if not round_.to_come[key]:
            round_.reduced_s[key] = now_s
            self.reduced(now_s, round_, key)

    def reduced(self, now_s: float, round_: Round, key: int) -> None:
        """Step after the last rank's last bucket."""
        if not any(round_.to_come):
            ranks, slowest = self.engine.world.ranks, float(round_.slowdown.max())
            steps_s = (rank.optimizer_s * slowest for rank in ranks)
            updated_s = max(a + b for a, b in zip(round_.reduced_s, steps_s, strict=True))
            self.engine.at(updated_s, self._updated, round_)

    def _updated(self, now_s: float, round_: Round) -> None:
        self.update(round_)
        engine, told_s = self.engine, self.engine.world.telling_s(round_.workers)
        for place in self.present(round_):
            slowdown = float(round_.slowdown[place])
            for key, rank in enumerate(engine.world.ranks):
                free_s = round_.reduced_s[key] + rank.optimizer_s * slowdown + told_s
                engine.free(round_.workers[place], key, free_s)


class Decoupled(AllReduce):
    """DeAR (Zhang et al. 2023): reduce-scatter behind the backward, all-gather behind the forward.

    The all-gathers run in the order of the layers; a layer's optimizer step comes right before its
    first forward. The next iteration begins when no layer's parameters will come too late.
    """

    def _collective_of(self) -> Callable[[tuple[int, ...], float, int], WorkerFlow]:
        return self.engine.world.half

    def start(self, round_: Round) -> None:
        """Scatter, and note when each rank is free if no parameters are late."""
        ranks = self.engine.world.ranks
        round_.free_s = np.stack([round_.at_s(rank.last_backward_s) for rank in ranks])
        at = self.engine.slowdowns.at
        following = [at(worker, round_.number + 1) for worker in round_.workers]
        round_.next_slowdown = np.array(following)
        super().start(round_)

    def reduced(self, now_s: float, round_: Round, key: int) -> None:
        """Gather the rank's buckets, the first layers' first."""
        row = self._buckets[key]
        round_.to_come[key] = -len(row)
        for bucket in reversed(row):
            flow = self._collective(round_.workers, bucket.bytes, key)
            self.engine.queue(now_s, key, flow, self._gathered, round_, key, bucket)

    def _gathered(self, now_s: float, round_: Round, key: int, bucket: SimulatedBucket) -> None:
        rank = self.engine.world.ranks[key]
        step_s = rank.optimizer_s * bucket.optimizer_share
        after_s = bucket.needed_s - step_s - rank.first_forward_s
        free_s = round_.free_s
        free_s[key] = np.maximum(free_s[key], now_s - after_s * round_.next_slowdown)
        round_.to_come[key] += 1
        if any(round_.to_come):
            return
        self.update(round_)
        for place in self.present(round_):
            for key in self.engine.keys:
                self.engine.free(round_.workers[place], key, float(free_s[key, place]))


class CrossIteration(AllReduce):
    """An all-reduce that overlaps the next iteration, which begins without it (Jin, HKU 2023).

    It begins after the backward, and after that of the iteration before. The iteration after the
    next needs its mean. With w and v the parameters and momentum that contain the means of all
    iterations but the last, an iteration begins on w - rate * (momentum * v + u): u is the worker's
    own last gradient, or the last mean that has arrived.
    """

    def __init__(self, engine: Engine, options: CrossIterationOptions) -> None:
        super().__init__(engine, options.fusion_mib, overlap=False)
        self.staleness = 1
        self._uses_own = options.approximation == "own_gradient"
        self._own = np.zeros_like(engine.training.weights)
        self._on_its_way = np.zeros_like(self.weights)
        self._arrived = np.zeros_like(self.weights)
        self._reduced = [0 for _ in engine.keys]
        """The last round whose mean has arrived, by pipeline rank."""
        self._held: list[list[Round]] = [[] for _ in engine.keys]
        self._due: list[tuple[float, Round]] = []
        """Rounds whose gradients are not computed, and when the last of their workers steps."""
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in engine.keys]
        """Workers and iterations that wait for the mean of the iteration before."""

    def start(self, round_: Round) -> None:
        """Ask for the reductions once those of the round before have ended."""
        round_.to_come = [len(row) for row in self._buckets]
        round_.reduced_s = [0.0] * len(self._buckets)
        ends_s = []
        for key, rank in enumerate(self.engine.world.ranks):
            self._held[key].append(round_)
            if len(self._held[key]) == 1:
                self._ask(0.0, key)
            ends_s.append(float(round_.at_s(rank.last_backward_s + rank.optimizer_s).max()))
        self._due.append((max(ends_s), round_))

    def _ask(self, earliest_s: float, key: int) -> None:
        round_ = self._held[key][0]
        ended_s = float(round_.at_s(self.engine.world.ranks[key].last_backward_s).max())
        for bucket in self._buckets[key]:
            flow = self._collective(round_.workers, bucket.bytes, key)
            ready_s = max(ended_s, earliest_s)
            self.engine.queue(ready_s, key, flow, self._ended, round_, key)

    def reduced(self, now_s: float, round_: Round, key: int) -> None:
        """Let workers continue that need this mean, and ask for the next round's."""
        self._reduced[key] = round_.number
        self._held[key].pop(0)
        if self._held[key]:
            self._ask(now_s, key)
        waiting, self._waiting[key] = self._waiting[key], []
        for worker, iteration in waiting:
            if self.engine.iteration[worker] == iteration:
                self.ready(now_s, worker, key)

    def ready(self, now_s: float, worker: int, key: int) -> None:
        """Continue, unless the mean of the iteration before is still on its way."""
        while self._due and self._due[0][0] <= now_s:
            self.update(self._due.pop(0)[1])
        iteration = self.engine.iteration[worker]
        if self._reduced[key] >= iteration - 1:
            self.engine.free(worker, key, now_s)
        else:
            self._waiting[key].append((worker, iteration))

    def update(self, round_: Round) -> None:
        """Compute gradients of this round; then apply the mean of the last one."""
        rows = np.array(round_.workers)
        at_hand = self._own[rows] if self._uses_own else self._arrived
        learning = self.engine.training.learning
        ahead = learning.momentum * self.velocity + at_hand
        begun = self.weights - learning.learning_rate * ahead * (round_.number > 1)
        begun = np.ascontiguousarray(np.broadcast_to(begun, (len(rows), len(self.weights))))
        found = self.gradients(begun, round_)
        if round_.number > 1:
            self._arrived = self._on_its_way
            self.step(self._arrived)
        self._own[rows] = found
        self._on_its_way = found.mean(axis=0)


class SynchronousServer(Rounds):
    """Gradients go to the servers; after the last one, the parameters are sent back.

    A worker continues when it has its parameters back.

    Args:
        engine: the event loop.
        servers: the first workers, which share the parameters.
    """

    def __init__(self, engine: Engine, servers: int) -> None:
        super().__init__(engine)
        kept = 2 * engine.world.workers * len(engine.keys)
        self._messages = lru_cache(kept)(engine.world.server_messages)
        self._servers = servers

    def start(self, round_: Round) -> None:
        """Push all gradients."""
        count = len(round_.workers) * self._servers
        round_.to_come = [count for _ in self.engine.keys]
        for key, rank in enumerate(self.engine.world.ranks):
            asked_s = round_.at_s(rank.last_backward_s).tolist()
            for worker, ready_s in zip(round_.workers, asked_s, strict=True):
                for flow in self._messages(worker, self._servers, key, is_push=True):
                    self.engine.queue(ready_s, (worker, key), flow, self._pushed, round_, key)

    def _pushed(self, now_s: float, round_: Round, key: int) -> None:
        round_.to_come[key] -= 1
        if not round_.to_come[key]:
            optimizer_s = self.engine.world.ranks[key].optimizer_s
            self.engine.at(now_s + optimizer_s, self._stepped, round_, key)

    def _stepped(self, now_s: float, round_: Round, key: int) -> None:
        """Send a rank's parameters back; the step of the last rank's ends the update."""
        round_.reduced_s.append(now_s)
        if len(round_.reduced_s) == len(self.engine.keys):
            self.update(round_)
        for worker in round_.workers:
            flows = self._messages(worker, self._servers, key, is_push=False)
            for number, flow in enumerate(flows, 1):
                is_last = number == len(flows)
                arguments = (round_, worker, key, is_last)
                self.engine.queue(now_s, (worker, key), flow, self._pulled, *arguments)

    def _pulled(self, now_s: float, round_: Round, worker: int, key: int, is_last: bool) -> None:
        if is_last and self.engine.iteration[worker] == round_.number:
            self.engine.free(worker, key, now_s)
