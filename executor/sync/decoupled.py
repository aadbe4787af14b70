"""Exact synchronisation in two parts, the second overlapped with the next forward."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.failure import talking_to
from executor.distributed.process_group import (
    all_gather_single,
    carrier_of,
    reduce_scatter_single,
)
from executor.sync.all_reduce import InOrder, Spans
from executor.sync.gradients import Bucket, Buffer, buckets_by_reduction
from executor.sync.protocol import Optimise, Setting
from executor.training.optimisation import StepOutcome
from planner.errors import PipeplanError
from planner.plan.programs import Reduce
from planner.sync.strategies import DecoupledOptions

_TAG = 1


class Ring:
    """The ranks of a group, each of which talks to its two neighbours.

    Of a buffer of S bytes every rank sends (n-1)/n S to the next one (Patarasuk and Yuan 2009,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations"), so that no link
    between two nodes carries more: ranks that exchanged their parts in pairs would send n/2 S over
    a link between two halves. Sums go on a thread of their own, in the order in which they start,
    which has to be one order on all ranks.

    Args:
        group: of the ranks, over gloo, in the order of the ring.
    """

    def __init__(self, group: Any) -> None:
        ranks, self._place = dist.get_process_group_ranks(group), dist.get_rank(group)
        self._size = len(ranks)
        self._next = ranks[(self._place + 1) % self._size]
        self._previous = ranks[self._place - 1]
        self._group = group
        self._queue: SimpleQueue[tuple[Tensor, Future[None]] | None] = SimpleQueue()
        # A daemon: whoever waits for a rank that is gone does not keep this process.
        threading.Thread(target=self._serve, name="pipeplan-ring", daemon=True).start()

    def reduce_scatter(self, flat: Tensor) -> Future[None]:
        """Start to sum a buffer over the ranks.

        Args:
            flat: one dimension, of equal parts for the ranks. Once the future is done, this rank's
                part is the sum; the others hold whatever went around.
        """
        done: Future[None] = Future()
        self._queue.put((flat, done))
        return done

    def close(self) -> None:
        """Let the thread end, once it has done what was started."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            flat, done = job
            try:
                self._around(flat)
            except (RuntimeError, ConnectionError) as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _around(self, flat: Tensor) -> None:
        """Part p starts at rank p + 1 and collects the ranks' own on its way to rank p."""
        parts = flat.view(self._size, -1)
        received = torch.empty_like(parts[0])
        for step in range(self._size - 1):
            leaving = parts[(self._place - step - 1) % self._size]
            arriving = parts[(self._place - step - 2) % self._size]
            sent = dist.isend(leaving, self._next, group=self._group, tag=_TAG)
            dist.recv(received, self._previous, group=self._group, tag=_TAG)
            arriving += received
            assert sent is not None
            sent.wait()


def _ring(group: Any, device: torch.device) -> Ring:
    """Return the ring of a group over gloo.

    Raises:
        PipeplanError: if gradients lie on a GPU, from which gloo sends nothing to single ranks.
    """
    if device.type == "cuda":
        raise PipeplanError(
            f"sync.strategy: 'decoupled' with gradients on {device} and messages over gloo, which "
            "passes no parts of them from rank to rank; give each rank a GPU of its own and leave "
            "--backend out, or use --sync all_reduce"
        )
    return Ring(group)


class _Halves:
    """A bucket whose sum over the ranks is taken in two halves.

    After the first each rank has the sum of its own part of the bucket, after the second all have
    all of it. gloo's own reduce-scatter takes as long as a whole all-reduce, so there is a ring.

    Args:
        bucket: to reduce.
        group: of its ranks.
        ring: of these, where it serves better than the group's own reduce-scatter.
    """

    def __init__(self, bucket: Bucket, group: Any, ring: Ring | None) -> None:
        self.bucket = bucket
        self.buffer = Buffer(bucket, multiple=len(bucket.ranks))
        self._group = group
        self._ring = ring
        self._work: Any = None
        flat = self.buffer.flat
        self.mine = flat.view(len(bucket.ranks), -1)[dist.get_rank(group)]

    def reduce(self) -> None:
        """Start the first half."""
        flat = self.buffer.flat
        with talking_to(self.bucket.partners):
            if self._ring is not None:
                self._work = self._ring.reduce_scatter(flat)
            else:
                self._work = reduce_scatter_single(
                    self.mine, flat, group=self._group, async_op=True
                )

    def reduced(self) -> None:
        """Wait for the first half."""
        with talking_to(self.bucket.partners):
            if self._ring is not None:
                self._work.result()
            else:
                self._work.wait()

    def gather(self) -> None:
        """Start the second half."""
        with talking_to(self.bucket.partners):
            flat = self.buffer.flat
            self._work = all_gather_single(flat, self.mine, group=self._group, async_op=True)

    def gathered(self) -> None:
        """Wait for the second half."""
        with talking_to(self.bucket.partners):
            self._work.wait()


@dataclass
class _Pending:
    """A step that the optimizer has still to make on the parameters of some buckets."""

    step: int = 0
    scale: float = 1.0
    factor: Tensor | None = None
    buckets: set[int] = field(default_factory=set)


class Decoupled:
    """``decoupled``: reduce-scatter during the backward, all-gather during the next forward.

    DeAR (Zhang et al. 2023, "Decoupling the All-Reduce Primitive"). The optimizer steps on a
    bucket's parameters before the first layer that uses one of them, so it must treat each
    parameter by itself, as torch's AdamW and SGD do. The norm of the gradient, where it is needed,
    is taken of the reduced parts, before any is gathered.

    Args:
        setting: of this rank.
    """

    announced, gated = True, True

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        assert isinstance(options, DecoupledOptions)
        self._optimisation = setting.optimisation
        buckets = buckets_by_reduction(setting.shared, options.bucket_mib)
        groups = {bucket.ranks: setting.process_groups[bucket.ranks] for bucket in buckets}
        devices = {bucket.ranks: bucket.device for bucket in buckets}
        self._rings = {
            ranks: _ring(group, devices[ranks])
            for ranks, group in groups.items()
            if carrier_of(devices[ranks], group) == "gloo"
        }
        self._rows = [
            _Halves(bucket, groups[bucket.ranks], self._rings.get(bucket.ranks))
            for bucket in buckets
        ]
        self._bucket_of = {name: k for k, row in enumerate(buckets) for name in row.parameters}
        self._order = InOrder(buckets, self._launch)
        self._spans = Spans(setting.recorder)
        self._step = 0
        self._pending = _Pending()

    def begin(self, step: int) -> None:
        """All gradients are zero, but for those that the optimizer has still to step by."""
        self._step = step
        self._order.begin()
        for number, row in enumerate(self._rows):
            if number not in self._pending.buckets:
                row.buffer.clear()
                row.buffer.attach()

    def ready(self, name: str) -> None:
        """A parameter's gradient is complete on this rank."""
        self._order.ready(name)

    def start(self, reduce: Reduce) -> None:
        """All gradients of a reduction are complete on this rank."""
        self._order.over(reduce)

    def _launch(self, number: int) -> None:
        self._bring_up_to_date(number)  # This rank may have run no forward that uses it.
        self._spans.started(self._rows[number].bucket)
        self._rows[number].reduce()

    def finish(self) -> None:
        """Start what is left, and wait for nothing."""
        self._order.finish()

    def update(self, optimise: Optimise) -> StepOutcome:
        """Decide on the step, make it on what this rank alone holds, and start to gather."""
        for row in self._rows:
            row.reduced()
            self._spans.ended(row.bucket)
        self._spans.note()
        optimisation = self._optimisation
        rate, scale = optimisation.set_rate(self._step), optimisation.scale
        norm = optimisation.norm(self._pieces(1 / scale)) if optimisation.needs_norm else None
        decided = optimisation.judge(norm)
        if decided.skipped:
            optimisation.zero_gradients()
        else:
            optimisation.train(self._step, self._own(), scale, decided.factor)
            self._gather(_Pending(self._step, scale, decided.factor, set(range(len(self._rows)))))
        return optimisation.outcome(rate, norm, decided)

    def _own(self) -> list[str]:
        """Parameters that no other rank holds."""
        return [n for n in self._optimisation.weights.masters if n not in self._bucket_of]

    def _pieces(self, factor: float) -> Iterator[tuple[Tensor, float]]:
        for row in self._rows:
            yield row.mine, factor
        for name in self._own():
            gradient = self._optimisation.weights.parameters[name].grad
            if gradient is not None:
                yield gradient, factor

    def _gather(self, pending: _Pending) -> None:
        """Start with what a forward uses first, which the backward has completed last."""
        self._pending = pending
        for row in reversed(self._rows):
            row.gather()

    def before_use(self, names: Iterable[str]) -> None:
        """A forward is about to use parameters."""
        if self._pending.buckets:
            for number in {self._bucket_of[name] for name in names if name in self._bucket_of}:
                self._bring_up_to_date(number)

    def _bring_up_to_date(self, number: int) -> None:
        """Make the step on a bucket's parameters, and begin their next gradients."""
        pending, row = self._pending, self._rows[number]
        if number not in pending.buckets:
            return
        pending.buckets.remove(number)
        row.gathered()
        row.buffer.attach()
        names = row.bucket.parameters
        self._optimisation.train(pending.step, names, pending.scale, pending.factor)
        row.buffer.clear()
        row.buffer.attach()

    def settle(self) -> None:
        """Make all steps that are left."""
        for number in range(len(self._rows)):
            self._bring_up_to_date(number)

    def close(self) -> None:
        """Let the rings go."""
        for ring in self._rings.values():
            ring.close()
