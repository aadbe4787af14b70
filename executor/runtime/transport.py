"""Messages between ranks: how they are sent and received, and when they arrived."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.failure import talking_to
from executor.distributed.process_group import carrier_of
from executor.runtime.worker import TensorSpec

Channels = Mapping[tuple[int, int], Any]
"""The process group of each direction (source, target) of messages; the default group elsewhere."""


class Underway:
    """A send or receive under way; it keeps its tensor alive until it is waited for.

    Args:
        work: of torch.distributed.
        tensor: that is sent or received.

    Attributes:
        work: as it was given.
        arrived: mark of the device's clock at which a receive ended; None if it is not watched.
    """

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self.arrived: Any = None
        self.work = work
        self._tensor: Tensor | None = tensor

    @property
    def is_over(self) -> bool:
        """Whether it is known to have succeeded: :meth:`wait` takes no time."""
        return bool(self.work.is_completed())

    def wait(self) -> Tensor:
        """Wait until the tensor was sent or received, return it and let it go."""
        self.work.wait()
        assert self._tensor is not None
        tensor, self._tensor = self._tensor, None
        return tensor


class Watched(Underway):
    """A message that a thread waits for: gloo knows nothing of its end before it is waited for."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        super().__init__(work, tensor)
        self._error: BaseException | None = None
        self._done = threading.Event()

    def watch(self) -> None:
        """Wait for it on a thread, and note its end in :func:`time.perf_counter` seconds."""
        _waiting.add(self)
        try:
            self.work.wait()
        except BaseException as error:
            self._error = error
        _waiting.discard(self)
        self.arrived = time.perf_counter()
        self._done.set()

    @property
    def is_over(self) -> bool:
        """Whether it has ended without an error."""
        return self._done.is_set() and self._error is None

    def wait(self) -> Tensor:
        """Wait for the thread; raises what it met."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._tensor is not None
        # Torch's objects go on the thread that waits, not on the one that watches.
        tensor, self._tensor, self.work = self._tensor, None, None
        return tensor


class Transport:
    """Messages of process groups, which read and write the memory that they lie in.

    Those between two ranks arrive in the order in which they were sent. Tensors of a GPU that gloo
    carries lie in the host's memory on their way: each is copied there before it is sent, and from
    there once it has arrived.

    Args:
        device: of the tensors that are computed with.
        channels: the process groups.
        watches: whether receives note when they ended. NCCL's ``wait`` lets the calling thread's
            stream wait and returns, so a stream of each peer's own does; gloo's blocks, so threads
            call it.
    """

    def __init__(self, device: torch.device, channels: Channels, *, watches: bool = False) -> None:
        is_nccl = carrier_of(device) == "nccl"
        self._device = device
        self._memory = device if is_nccl else torch.device("cpu")
        self._channels = channels
        self._rank = dist.get_rank()
        self._waiters = None if is_nccl else _Waiters()
        self._watches = watches
        self._streams = CudaStreams(device) if watches and is_nccl else None

    def send(self, tensor: Tensor, peer: int) -> Underway:
        """Start to send a tensor; a copy waits for the GPU."""
        whole = tensor.to(self._memory).contiguous()
        work = dist.isend(whole, peer, group=self._channels.get((self._rank, peer)))
        if self._waiters is None:
            return Underway(work, whole)
        return self._waiters.put("send", peer, Watched(work, whole))

    def receive(self, spec: TensorSpec, peer: int) -> Underway:
        """Start to receive the next tensor of a rank, on the memory of messages."""
        pins = self._memory != self._device
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._memory, pin_memory=pins)
        work = dist.irecv(buffer, peer, group=self._channels.get((peer, self._rank)))
        if self._watches and self._waiters is not None:
            return self._waiters.put("receive", peer, Watched(work, buffer))
        receiving = Underway(work, buffer)
        if self._streams is not None:
            with self._streams.beside(peer):
                receiving.work.wait()
                receiving.arrived = self._streams.mark()
        return receiving

    def received(self, receiving: Underway) -> Tensor:
        """Wait for a tensor, and return it on the device."""
        return receiving.wait().to(self._device, non_blocking=True)


class CudaStreams:
    """A stream of a GPU for each peer, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}

    def beside(self, peer: int) -> AbstractContextManager[Any]:
        """Let the stream of a peer be the current one inside."""
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams[peer])

    def mark(self) -> torch.cuda.Event:
        """Return this place in the current stream, as the device's clock reads it."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


# --- process groups -------------------------------------------------------------------------------


def make_channels(
    directions: Iterable[tuple[int, int]], device: torch.device, timeout: timedelta | None = None
) -> Channels:
    """Return the process groups that messages go over; all ranks call it with all directions.

    NCCL runs what a communicator is given in order, and what waits for its peer holds up what is
    behind it. So that a receive that is posted early holds up no send to the same rank, each
    direction has a communicator of its own. gloo holds nothing up.
    """
    if carrier_of(device) != "nccl":
        return {}
    with talking_to("the other ranks, to make a process group for each direction"):
        return {
            ends: dist.new_group(list(ends), timeout=timeout, backend="nccl") for ends in directions
        }


def open_groups(groups: Mapping[tuple[int, ...], Any], device: torch.device) -> None:
    """Use process groups once, in one order on all ranks.

    Args:
        groups: by their ranks.
        device: of the tensors that they carry.
    """
    with talking_to("all ranks, for the first time"):
        for ranks in sorted(groups):
            if dist.get_rank() in ranks:
                dist.all_reduce(torch.zeros(1, device=device), group=groups[ranks])


def open_communicators(
    transport: Transport,
    directions: Iterable[tuple[int, int]],
    groups: Mapping[tuple[int, ...], Any],
    device: torch.device,
) -> None:
    """Use everything that ranks talk over once, in one order on all of them.

    NCCL makes a communicator at its first use, where all its ranks wait for each other. In the
    first iteration they would come there in orders of their own, and could wait for ever.

    Args:
        transport: of this rank.
        directions: (source, target) of all messages of the plan, in the same order on all ranks.
        groups: process groups by their ranks.
        device: of the tensors that are reduced.
    """
    rank, word = dist.get_rank(), TensorSpec((1,), torch.uint8)
    with talking_to("all ranks, for the first time"):
        dist.all_reduce(torch.zeros(1, device=device))
    open_groups(groups, device)
    for source, target in directions:
        with talking_to(f"rank {source if rank == target else target}, for the first time"):
            if rank == source:
                transport.send(torch.zeros(1, dtype=word.dtype, device=device), target).wait()
            elif rank == target:
                transport.receive(word, source).wait()


# --- threads that wait ----------------------------------------------------------------------------

_waiting: set[Watched] = set()
"""What threads wait for now, inside torch."""
_Queue = queue.SimpleQueue[Watched | None]


class _Waiters:
    """Threads, one for each peer and direction, that wait for what is under way, in order."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _end_threads, self._queues, self._threads)

    def put(self, direction: str, peer: int, watched: Watched) -> Watched:
        """Let a thread wait for one thing more, and return it."""
        key = direction, peer
        if key not in self._queues:
            self._queues[key] = queue.SimpleQueue()
            thread = threading.Thread(target=_watch, args=(self._queues[key],), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[key].put(watched)
        return watched


def _watch(things: _Queue) -> None:
    while (watched := things.get()) is not None:
        watched.watch()
        # Torch's objects are to be gone before the thread idles: see below.
        del watched


def _end_threads(queues: dict[tuple[str, int], _Queue], threads: list[threading.Thread]) -> None:
    for things in queues.values():
        things.put(None)
    for thread in threads:
        if not _waiting and thread is not threading.current_thread():
            thread.join()


@atexit.register
def _end_hard_if_any_waits() -> None:
    """A thread that wakes inside torch while the interpreter is taken down aborts the process.

    Threads wait at the end only if the training has failed: the status is 1.
    """
    if _waiting:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
