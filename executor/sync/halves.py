"""Sums over ranks in two halves: a reduce-scatter, and later an all-gather of what it made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.process_group import (
    all_gather_single,
    carrier_of,
    reduce_scatter_single,
)
from executor.sync.gradients import Bucket, BucketSum
from planner.errors import PipeplanError

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
        parts, steps = flat.view(self._size, -1), self._size - 1
        received = [torch.empty_like(parts[0]) for _ in range(min(2, steps))]
        # gloo sends only what a receiver has asked for, and a request waits behind the messages
        # that go the other way: the next one is on its way while a part still comes.
        coming = [self._ask(buffer) for buffer in received]
        for step in range(steps):
            leaving = parts[(self._place - step - 1) % self._size]
            arriving = parts[(self._place - step - 2) % self._size]
            sent = dist.isend(leaving, self._next, group=self._group, tag=_TAG)
            coming[step % 2].wait()
            arriving += received[step % 2]
            if step + 2 < steps:
                coming[step % 2] = self._ask(received[step % 2])
            assert sent is not None
            sent.wait()

    def _ask(self, buffer: Tensor) -> Any:
        work = dist.irecv(buffer, self._previous, group=self._group, tag=_TAG)
        assert work is not None
        return work


class PartSums:
    """Sums over ranks of which each rank keeps its part, the first half of an all-reduce.

    gloo's own reduce-scatter takes as long as a whole all-reduce, so that gloo's ranks are rings.

    Args:
        buckets: whose gradients will be summed.
        process_groups: by their ranks.
        field: of the plan that asks for it, with its value, for a message.
        remedy: what to do where it cannot be done.

    Raises:
        PipeplanError: if gradients lie on a GPU, from which gloo sends nothing to single ranks.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        process_groups: Mapping[tuple[int, ...], Any],
        field: str,
        remedy: str,
    ) -> None:
        self._groups = process_groups
        self._rings: dict[tuple[int, ...], Ring] = {}
        for ranks, device in dict.fromkeys((bucket.ranks, bucket.device) for bucket in buckets):
            if ranks not in self._rings and carrier_of(device, process_groups[ranks]) == "gloo":
                require_on_cpu(device, field, remedy)
                self._rings[ranks] = Ring(process_groups[ranks])

    def start(self, ranks: tuple[int, ...], flat: Tensor) -> Callable[[], object]:
        """Start to sum a tensor over ranks.

        Args:
            ranks: of a bucket.
            flat: of one dimension, of equal parts for the ranks; changed in place. Afterwards this
                rank's part is the sum.

        Returns:
            A function that waits for the end.
        """
        if ranks in self._rings:
            return self._rings[ranks].reduce_scatter(flat).result
        group = self._groups[ranks]
        mine = flat.view(len(ranks), -1)[dist.get_rank(group)]
        wait: Callable[[], object] = reduce_scatter_single(
            mine, flat, group=group, async_op=True
        ).wait
        return wait

    def close(self) -> None:
        """Let the rings go."""
        for ring in self._rings.values():
            ring.close()


def require_on_cpu(device: torch.device, field: str, remedy: str) -> None:
    """Refuse parts of gradients that lie on a GPU where gloo is to carry them.

    Args:
        device: of the gradients.
        field: of the plan that asks for it, with its value.
        remedy: what to do without.

    Raises:
        PipeplanError: if they do.
    """
    if device.type == "cuda":
        raise PipeplanError(
            f"{field} with gradients on {device} and messages over gloo, which "
            "passes no parts of them from rank to rank; give each rank a GPU of its own and leave "
            f"--backend out, or {remedy}"
        )


class Halves(BucketSum):
    """A bucket whose sum over the ranks is taken in two halves.

    After the first each rank has the sum of its own part of the bucket, after the second all have
    all of it.

    Args:
        bucket: to reduce.
        group: of its ranks.
        sums: take the first half.
    """

    def __init__(self, bucket: Bucket, group: Any, sums: PartSums) -> None:
        super().__init__(bucket, group, multiple=len(bucket.ranks))
        self._sums = sums
        self.mine = self._my_part(self.flat)
        # Parameters, of no larger a type, are gathered in the memory of gradients done with.
        kind = next(iter(bucket.parameters.values())).dtype
        self._weights = self.flat.view(kind)[: self.flat.numel()]
        self.my_weights = self._my_part(self._weights)
        self.weights = bucket.views(self._weights)

    def _my_part(self, whole: Tensor) -> Tensor:
        return whole.view(len(self.bucket.ranks), -1)[dist.get_rank(self.group)]

    def start(self) -> None:
        """Start the first half."""
        self.begin(lambda: self._sums.start(self.bucket.ranks, self.flat))

    def gather(self, *, weights: bool = False) -> None:
        """Start the second half: of the gradients, or of the parameters in ``my_weights``."""
        whole, mine = self.flat, self.mine
        if weights:
            whole, mine = self._weights, self.my_weights
        self.begin(lambda: all_gather_single(whole, mine, group=self.group, async_op=True).wait)
