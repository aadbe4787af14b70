"""Synchronous strategies: a round is one iteration of all workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from planner.cluster.link_table import FloatArray, IntArray
from planner.sync.simulation.course import Course
from planner.sync.simulation.links import flow_over
from planner.sync.simulation.training import Training
from planner.sync.simulation.transfers import WorkerTransfers, ends_s
from planner.sync.simulation.world import LayerParameters, PipelineRank, StageReduction, World
from planner.sync.strategies import CrossIterationOptions

MOST_BUCKETS = 256
"""Most buckets of a pipeline rank; larger models are divided into this many equal ones."""
MOST_KEPT = 1024
"""Collectives of a strategy that are kept at a time."""
NOTHING = flow_over((((), math.inf),), 0.0, 0.0)
"""The flow of a worker by itself."""


@dataclass(frozen=True)
class Round:
    """One iteration of the active workers; arrays have one entry per worker.

    Attributes:
        world: pipelines and links.
        workers: their numbers, ascending.
        start_s: starts of their iterations.
        slowdown, next_slowdown: slowdowns of this iteration and the next one.
    """

    world: World
    workers: tuple[int, ...]
    start_s: FloatArray
    slowdown: FloatArray
    next_slowdown: FloatArray

    def at_s(self, offsets_s: FloatArray) -> FloatArray:
        """Return, by worker, moments that many seconds after a usual iteration's start."""
        return np.asarray(self.start_s[:, None] + offsets_s * self.slowdown[:, None])

    def steps_s(self) -> FloatArray:
        """Return the durations of optimizer steps, by worker and pipeline rank."""
        return np.asarray(self.world.each("optimizer_s") * self.slowdown[:, None])

    def next_starts_s(self, free_s: FloatArray) -> FloatArray:
        """Return the earliest starts at which every pipeline rank is free when it is needed.

        Args:
            free_s: when they are free, by worker and pipeline rank.
        """
        needed_s = self.world.each("first_forward_s") * self.next_slowdown[:, None]
        return np.asarray((free_s - needed_s).max(axis=1))


@dataclass(frozen=True)
class Rounded:
    """The result of a round.

    Attributes:
        next_start_s: start of each worker's next iteration.
        reduced_s: when each rank's gradients were reduced, or each worker had its parameters back,
            by pipeline rank, or worker and pipeline rank.
        updated_s: when the parameters were updated.
        sent_bytes: bytes sent by all workers.
    """

    next_start_s: FloatArray
    reduced_s: FloatArray
    updated_s: float
    sent_bytes: float


Timing = Callable[[Round], Rounded]
"""Tells when the workers of a round may continue; rounds come in order, and it may remember."""


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


Collective = Callable[[tuple[int, ...], float, int], StageReduction]


class _Buckets:
    """Gradients of every pipeline rank in buckets, the last layers' first.

    The collectives of one call share the links; those of earlier calls hold back only their own
    rank.

    Args:
        world: pipelines and links.
        bucket_mib: least bytes of a bucket.
        collective: of the world, what reduces a bucket.
        overlap: whether buckets are reduced during the backward.
    """

    def __init__(
        self, world: World, bucket_mib: float, collective: Collective, *, overlap: bool = True
    ) -> None:
        self.rows = [buckets_of(rank, bucket_mib) for rank in world.ranks]
        self._collective = lru_cache(MOST_KEPT)(collective)
        self._transfers = WorkerTransfers(world.routes.capacity_gb_per_s)
        self._free_s = [0.0] * len(world.ranks)
        """The end of each rank's last collective."""
        self._ready_s = [
            np.array([bucket.complete_s if overlap else rank.last_backward_s for bucket in row])
            for rank, row in zip(world.ranks, self.rows, strict=True)
        ]

    def reduce(
        self, round_: Round, earliest_s: FloatArray | None = None
    ) -> tuple[FloatArray, float]:
        """Return the ends of the last buckets' collectives by pipeline rank, and the bytes sent.

        Args:
            round_: the round of the workers.
            earliest_s: before which no rank asks for any; None: as soon as gradients are there.
        """
        first_s = np.zeros(len(self.rows)) if earliest_s is None else earliest_s
        # A bucket is requested when the last worker has its gradients.
        asked = sorted(
            (ready_s, key, place)
            for key, offsets_s in enumerate(self._ready_s)
            for place, ready_s in enumerate(round_.at_s(offsets_s).max(axis=0).tolist())
        )
        requests = [
            (max(ready_s, float(first_s[key])), key, place) for ready_s, key, place in asked
        ]
        _, sent_bytes = self.run(round_, requests)
        return np.array(self._free_s), sent_bytes

    def run(
        self, round_: Round, requests: Sequence[tuple[float, int, int]]
    ) -> tuple[list[float], float]:
        """Return the ends of collectives; those of a rank run in the order of the requests.

        Args:
            round_: the round of the workers.
            requests: the moment, the pipeline rank and the place of the bucket.
        """
        rows, sent_bytes = [], 0.0
        for ready_s, key, place in requests:
            found = self._collective(round_.workers, self.rows[key][place].bytes, key)
            flow = (*found.flows, NOTHING)[0]
            rows.append((max(ready_s, self._free_s[key] - flow.fixed_s), key, flow))
            sent_bytes += found.sent_bytes
        ends = ends_s(self._transfers, rows)
        for (_, key, _), end_s in zip(rows, ends, strict=True):
            self._free_s[key] = max(self._free_s[key], end_s)
        return ends, sent_bytes


def all_reduce_timing(world: World, bucket_mib: float, *, overlap: bool = True) -> Timing:
    """Return the timing of buckets that are reduced during the backward, or after it.

    The optimizer step follows; no worker continues before the last bucket.
    """
    buckets = _Buckets(world, bucket_mib, world.all_reduce, overlap=overlap)

    def run(round_: Round) -> Rounded:
        reduced_s, sent_bytes = buckets.reduce(round_)
        free_s = reduced_s + round_.steps_s()
        told_s = free_s + world.telling_s(round_.workers)
        return Rounded(round_.next_starts_s(told_s), reduced_s, float(free_s.max()), sent_bytes)

    return run


def decoupled_timing(world: World, bucket_mib: float) -> Timing:
    """Return the timing of DeAR (Zhang et al. 2023).

    Reduce-scatter overlaps the backward, all-gather the forward. The all-gathers run in the order
    of the layers; a layer's optimizer step comes right before its first forward. The next iteration
    begins when no layer's parameters will come too late.
    """
    buckets = _Buckets(world, bucket_mib, world.half)
    rows = [(key, place) for key, row in enumerate(buckets.rows) for place in range(len(row))[::-1]]

    def run(round_: Round) -> Rounded:
        scattered_s, sent_bytes = buckets.reduce(round_)
        starts_s = round_.next_starts_s(round_.at_s(world.each("last_backward_s")))
        requests = [(float(scattered_s[key]), key, place) for key, place in rows]
        ends, gathered_bytes = buckets.run(round_, requests)
        gathered_s = np.zeros(len(world.ranks))
        for (key, place), end_s in zip(rows, ends, strict=True):
            bucket = buckets.rows[key][place]
            step_s = world.ranks[key].optimizer_s * bucket.optimizer_share
            before_s = bucket.needed_s - step_s
            starts_s = np.maximum(starts_s, end_s - before_s * round_.next_slowdown)
            gathered_s[key] = end_s
        updated_s = float(gathered_s.max())
        return Rounded(starts_s, gathered_s, updated_s, sent_bytes + gathered_bytes)

    return run


def cross_iteration_timing(world: World, fusion_mib: float) -> Timing:
    """Return the timing of an all-reduce that overlaps the next iteration, which does not wait.

    It begins after the backward, and after the all-reduce of the iteration before has ended. The
    iteration after the next needs this one's mean.
    """
    buckets = _Buckets(world, fusion_mib, world.all_reduce, overlap=False)
    last_s: FloatArray = np.zeros(len(world.ranks))

    def run(round_: Round) -> Rounded:
        nonlocal last_s
        reduced_s, sent_bytes = buckets.reduce(round_, last_s)
        own_s = round_.at_s(world.each("last_backward_s")) + round_.steps_s()
        starts_s = round_.next_starts_s(np.maximum(own_s, last_s))
        last_s = reduced_s
        return Rounded(starts_s, reduced_s, float(own_s.max()), sent_bytes)

    return run


def server_timing(world: World, servers: int) -> Timing:
    """Return the timing of synchronous servers: the first workers, which share the parameters.

    Gradients go to the servers; after the last one, the parameters are sent back. A worker
    continues when it has its parameters back.
    """
    messages = lru_cache(2 * world.workers * len(world.ranks))(world.server_messages)
    transfers = WorkerTransfers(world.routes.capacity_gb_per_s)

    def called_s(round_: Round, asked_s: FloatArray, *, is_push: bool) -> FloatArray:
        """Return when each worker's messages to or from the servers have arrived."""
        requests = [
            (float(asked_s[row, key]), (row, key), flow)
            for row, worker in enumerate(round_.workers)
            for key in range(len(world.ranks))
            for flow in messages(worker, servers, key, is_push=is_push)
        ]
        found = np.array(ends_s(transfers, requests)).reshape(*asked_s.shape, servers)
        return np.asarray(found.max(axis=2))

    def run(round_: Round) -> Rounded:
        asked_s = round_.at_s(world.each("last_backward_s"))
        come_s = called_s(round_, asked_s, is_push=True)
        moved_s = np.broadcast_to(come_s.max(axis=0) + world.each("optimizer_s"), asked_s.shape)
        back_s = called_s(round_, moved_s, is_push=False)
        sent_bytes = 2.0 * len(round_.workers) * world.parameter_bytes
        return Rounded(round_.next_starts_s(back_s), back_s, float(moved_s.max()), sent_bytes)

    return run


class ExactUpdate:
    """One step of SGD with momentum on the mean of all workers' gradients.

    All-reduce, its fused and decoupled forms and the synchronous parameter server compute this.

    Attributes:
        staleness: iterations between the weights and the gradients that they have.
    """

    staleness = 0

    def __init__(self, training: Training) -> None:
        self._learning = training.learning
        self._weights: FloatArray = training.weights[0].copy()
        self._velocity = np.zeros_like(self._weights)

    def run(self, training: Training, workers: IntArray, iteration: int) -> None:
        """Update the equal weights of all workers, with their batches as one large batch."""
        every = np.broadcast_to(self._weights, (len(workers), len(self._weights)))
        self._step(training.own_gradients(every, workers, iteration).mean(axis=0))

    def _step(self, gradient: FloatArray) -> None:
        self._velocity = self._learning.momentum * self._velocity + gradient
        self._weights = self._weights - self._learning.learning_rate * self._velocity

    def models(self) -> FloatArray:
        """Return the weights to observe, one row that all share, with all means that have come."""
        return self._weights[None]


class CrossIterationUpdate(ExactUpdate):
    """Gradients at an approximation of the parameters, while the last mean is in transfer.

    With w and v the parameters and momentum that contain the means of all iterations but the last,
    an iteration begins on w - rate * (momentum * v + u): u is the worker's own last gradient, or
    the last mean that has arrived.
    """

    staleness = 1

    def __init__(self, training: Training, options: CrossIterationOptions) -> None:
        super().__init__(training)
        self._own = np.zeros_like(training.weights)
        self._on_its_way = np.zeros_like(self._weights)
        self._arrived = np.zeros_like(self._weights)
        self._uses_own = options.approximation == "own_gradient"

    def run(self, training: Training, workers: IntArray, iteration: int) -> None:
        """Compute gradients of this iteration; then apply the mean of the last one."""
        at_hand = self._own[workers] if self._uses_own else self._arrived
        ahead = self._learning.momentum * self._velocity + at_hand
        begun = self._weights - self._learning.learning_rate * ahead * (iteration > 1)
        begun = np.ascontiguousarray(np.broadcast_to(begun, (len(workers), len(self._weights))))
        found = training.own_gradients(begun, workers, iteration)
        if iteration > 1:
            self._arrived = self._on_its_way
            self._step(self._arrived)
        self._own[workers] = found
        self._on_its_way = found.mean(axis=0)


class Rounds:
    """Runs rounds until all iterations are done.

    A worker that leaves is left out from the next round on; one that returns, with the parameters
    of the others, begins with the first round after. A round pauses while no worker is active.

    Args:
        course: the state of the run.
    """

    def __init__(self, course: Course) -> None:
        self._course, self._world = course, course.world
        self._start_s = np.zeros(course.world.workers)
        self._active: tuple[int, ...] = tuple(range(course.world.workers))
        self._deserted = tuple(self._deserted_spans())

    def run(self, timing: Timing, update: ExactUpdate) -> float:
        """Run to the end, once only; return the virtual time."""
        course, now_s, iteration, total = self._course, 0.0, 0, 0
        while total < course.limit:
            iteration += 1
            workers = self._gathered()
            round_ = self._round(workers, iteration)
            rounded = self._paused(round_, timing(round_))
            now_s = rounded.updated_s
            course.observer.until(now_s, update.models(), total)
            update.run(course.training, workers, iteration)
            self._record(round_, rounded, iteration)
            self._start_s[workers] = rounded.next_start_s
            for worker in round_.workers:
                course.done[worker] += 1
            total += len(workers)
            course.busy_s += float(round_.slowdown.sum()) * self._world.iteration_s
            course.sent_bytes += rounded.sent_bytes
        course.observer.observe(now_s, update.models(), total)
        return now_s

    def _gathered(self) -> IntArray:
        """Return the workers of the round; if all have left, those that return first."""
        faults, active = self._course.faults, self._active
        if faults and active:
            now_s = float(self._start_s[list(active)].min())
            active = self._present(now_s)
            before = set(self._active)
            if not active:
                now_s = min(f.returns_s for f in faults if f.returns_s > now_s)
                active = self._present(now_s)
                before.clear()  # Everybody is back from being away.
            for worker in set(active) - before:
                self._start_s[worker] = now_s
        self._active = active
        return np.array(active, dtype=np.int64)

    def _present(self, now_s: float) -> tuple[int, ...]:
        gone = {f.worker for f in self._course.faults if f.leaves_s <= now_s < f.returns_s}
        return tuple(w for w in range(self._world.workers) if w not in gone)

    def _deserted_spans(self) -> Iterator[tuple[float, float]]:
        """Return the intervals without an active worker, in order; two may touch."""
        faults = self._course.faults
        moments = {moment for f in faults for moment in (f.leaves_s, f.returns_s)}
        for from_s, to_s in pairwise(sorted(moments)):
            if not self._present(from_s):
                yield from_s, to_s

    def _paused(self, round_: Round, rounded: Rounded) -> Rounded:
        """Extend the round by the time without an active worker."""
        start_s, end_s = float(round_.start_s.min()), float(rounded.next_start_s.min())
        pause_s = 0.0
        for from_s, to_s in self._deserted:
            if start_s <= from_s < end_s + pause_s:
                pause_s += to_s - from_s
        return replace(
            rounded,
            next_start_s=rounded.next_start_s + pause_s,
            reduced_s=rounded.reduced_s + pause_s,
            updated_s=rounded.updated_s + pause_s,
        )

    def _round(self, workers: IntArray, iteration: int) -> Round:
        slowdowns = (self._course.slowdowns.of_all(iteration + n)[workers] for n in (0, 1))
        return Round(self._world, self._active, self._start_s[workers], *slowdowns)

    def _record(self, round_: Round, rounded: Rounded, iteration: int) -> None:
        recorder = self._course.recorder
        if recorder is None:
            return
        ended_s = round_.at_s(self._world.each("last_backward_s"))
        reduced_s = np.broadcast_to(rounded.reduced_s, ended_s.shape)
        for row, worker in enumerate(round_.workers):
            for key in range(len(self._world.ranks)):
                start_s, end_s = float(round_.start_s[row]), float(ended_s[row, key])
                recorder.begin(worker, key, iteration, start_s, end_s)
                recorder.free(worker, key, float(reduced_s[row, key]), round_.workers)
