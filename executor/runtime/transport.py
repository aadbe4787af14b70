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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.failure import talking_to
from executor.distributed.process_group import carrier_of
from executor.runtime.worker import TensorSpec


class Sending(Protocol):
    """A send under way; it keeps its tensor alive."""

    @property
    def is_over(self) -> bool:
        """Whether it is known to have succeeded: :meth:`wait` takes no time."""

    def wait(self) -> None:
        """Wait until the tensor may be freed."""


class Receiving(Protocol):
    """A receive under way.

    Attributes:
        arrived: mark of the device's clock at which it ended; None if it is not watched.
    """

    arrived: Any

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""


class Transport(Protocol):
    """Sends and receives tensors; those between two ranks arrive in the order they were sent."""

    def send(self, tensor: Tensor, peer: int) -> Sending:
        """Start to send a tensor."""

    def receive(self, spec: TensorSpec, peer: int) -> Receiving:
        """Start to receive the next tensor of a rank."""


class _Sending:
    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    @property
    def is_over(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()


class _WatchedSending:
    """A send that a thread waits for: gloo's know nothing of their end before they are waited for.

    The tensor goes on the thread that calls :meth:`wait`.
    """

    def __init__(self, sending: _Sending) -> None:
        self._sending: _Sending | None = sending
        self._error: BaseException | None = None
        self._done = threading.Event()

    def watch(self) -> None:
        assert self._sending is not None
        _waiting.add(self)
        try:
            self._sending.wait()
        except BaseException as error:
            self._error = error
        _waiting.discard(self)
        self._done.set()

    @property
    def is_over(self) -> bool:
        return self._done.is_set() and self._error is None

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error
        self._sending = None


class _Receiving:
    def __init__(self, work: Any, buffer: Tensor, device: torch.device) -> None:
        self._work = work
        self._buffer = buffer
        self._device = device
        self.arrived: Any = None

    def wait(self) -> Tensor:
        self._work.wait()
        return self._buffer.to(self._device, non_blocking=True)


Channels = Mapping[tuple[int, int], Any]
"""The process group of each direction (source, target) of messages; the default group elsewhere."""


class GroupTransport:
    """Messages of process groups, which read and write the memory that they lie in.

    Args:
        device: of the tensors that are computed with.
        memory: where messages lie. If it is not ``device``, each is copied there before it is sent,
            and from there once it has arrived.
        channels: the process groups.
    """

    def __init__(self, device: torch.device, memory: torch.device, channels: Channels) -> None:
        self._device = device
        self._memory = memory
        self._channels = channels
        self._rank = dist.get_rank()
        self._pins = memory != device
        self._waiters = None if carrier_of(device) == "nccl" else _Waiters()

    def send(self, tensor: Tensor, peer: int) -> Sending:
        """Start to send a tensor; a copy waits for the GPU."""
        whole = tensor.to(self._memory).contiguous()
        group = self._channels.get((self._rank, peer))
        sending = _Sending(dist.isend(whole, peer, group=group), whole)
        if self._waiters is None:
            return sending
        watched_sending = _WatchedSending(sending)
        self._waiters.put(peer, watched_sending)
        return watched_sending

    def receive(self, spec: TensorSpec, peer: int) -> Receiving:
        """Start to receive the next tensor of a rank."""
        buffer = torch.empty(
            spec.shape, dtype=spec.dtype, device=self._memory, pin_memory=self._pins
        )
        group = self._channels.get((peer, self._rank))
        return _Receiving(dist.irecv(buffer, peer, group=group), buffer, self._device)


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


def transport_of(device: torch.device, channels: Channels) -> Transport:
    """Return the transport for tensors of a device; gloo sends and receives none of a GPU."""
    through_host = device.type == "cuda" and carrier_of(device) == "gloo"
    memory = torch.device("cpu") if through_host else device
    return GroupTransport(device, memory, channels)


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


# --- when messages arrived -----------------------------------------------------------------------


def watched(transport: Transport, device: torch.device) -> Transport:
    """Return a transport whose receives note when they ended.

    NCCL's ``wait`` lets the calling thread's stream wait and returns, so a stream of each peer's
    own does. gloo's waits itself, so threads do.
    """
    if carrier_of(device) == "nccl":
        return StreamWatchedTransport(transport, CudaStreams(device))
    return WatchedTransport(transport)


class SideStreams(Protocol):
    """Streams beside the one that computes."""

    def beside(self, peer: int) -> AbstractContextManager[Any]:
        """Let the stream of a peer be the current one inside."""

    def mark(self) -> Any:
        """Return this place in the current stream, as the device's clock reads it."""


class CudaStreams:
    """A stream of a GPU for each peer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}

    def beside(self, peer: int) -> AbstractContextManager[Any]:
        """Let the stream of a peer be the current one inside."""
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams[peer])

    def mark(self) -> torch.cuda.Event:
        """Return this place in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class StreamWatchedTransport:
    """A transport whose receives are waited for by a stream of their own as well.

    Args:
        transport: whose ``wait`` lets the current stream wait.
        streams: that wait.
    """

    def __init__(self, transport: Transport, streams: SideStreams) -> None:
        self._transport = transport
        self._streams = streams

    def send(self, tensor: Tensor, peer: int) -> Sending:
        """Start to send a tensor."""
        return self._transport.send(tensor, peer)

    def receive(self, spec: TensorSpec, peer: int) -> Receiving:
        """Start to receive the next tensor of a rank."""
        receiving = self._transport.receive(spec, peer)
        with self._streams.beside(peer):
            receiving.wait()
            receiving.arrived = self._streams.mark()
        return receiving


class _Watched(Protocol):
    """Something under way that a thread waits for."""

    def watch(self) -> None:
        """Wait for it, and note that it has ended."""


_waiting: set[_Watched] = set()
"""What threads wait for now, inside torch."""


class WatchedReceiving:
    """A receive whose arrival is noted.

    Attributes:
        arrived: when it ended, in :func:`time.perf_counter` seconds, once :meth:`wait` returned.
    """

    def __init__(self, receiving: Receiving) -> None:
        self.arrived: Any = None
        self._receiving = receiving
        self._tensor: Tensor | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    def watch(self) -> None:
        """Wait for the receive, on the thread of its peer."""
        _waiting.add(self)
        try:
            self._tensor = self._receiving.wait()
        except BaseException as error:
            self._error = error
        _waiting.discard(self)
        self.arrived = time.perf_counter()
        self._done.set()

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._tensor is not None
        return self._tensor


_Queue = queue.SimpleQueue[_Watched | None]


class _Waiters:
    """Threads, one for each peer, that wait for what is under way one after the other."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _end_threads, self._queues, self._threads)

    def put(self, peer: int, watched: _Watched) -> None:
        """Let the peer's thread wait for one thing more."""
        if peer not in self._queues:
            self._queues[peer] = queue.SimpleQueue()
            thread = threading.Thread(target=_watch, args=(self._queues[peer],), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[peer].put(watched)


class WatchedTransport:
    """A transport whose receives note when they ended."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiters = _Waiters()

    def send(self, tensor: Tensor, peer: int) -> Sending:
        """Start to send a tensor."""
        return self._transport.send(tensor, peer)

    def receive(self, spec: TensorSpec, peer: int) -> WatchedReceiving:
        """Start to receive the next tensor of a rank."""
        receiving = WatchedReceiving(self._transport.receive(spec, peer))
        self._waiters.put(peer, receiving)
        return receiving


def _watch(things: _Queue) -> None:
    while (watched := things.get()) is not None:
        watched.watch()
        # Torch's objects are to be gone before the thread idles: see below.
        del watched


def _end_threads(queues: dict[int, _Queue], threads: list[threading.Thread]) -> None:
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
