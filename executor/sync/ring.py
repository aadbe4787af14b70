"""Reduce-scatter around a ring of ranks, for backends whose own is slow or none."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
