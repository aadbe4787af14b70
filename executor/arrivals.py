"""Telling when messages arrived, not when somebody asked for them.

gloo says nothing when a receive ends. A thread for each peer waits for its receives in order; used
where a timeline is written, since each message costs a switch between threads.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref

from torch import Tensor

from executor.transport import Receiving, Sending, Transport
from executor.worker import TensorSpec

_waiting: set[WatchedReceiving] = set()
"""Those that a thread waits for now, inside torch."""


class WatchedReceiving:
    """A receive whose arrival is noted.

    Attributes:
        arrived_s: when it ended, in :func:`time.perf_counter` seconds, once :meth:`wait` returned.
    """

    def __init__(self, receiving: Receiving) -> None:
        self.arrived_s: float | None = None
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
        self.arrived_s = time.perf_counter()
        self._done.set()

    def wait(self) -> Tensor:
        """The tensor, once it is here."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._tensor is not None
        return self._tensor


_Queue = queue.SimpleQueue[WatchedReceiving | None]


class WatchedTransport:
    """A transport whose receives tell when they ended."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._queues: dict[int, _Queue] = {}
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _end_threads, self._queues, self._threads)

    def send(self, tensor: Tensor, peer: int) -> Sending:
        """Start to send a tensor."""
        return self._transport.send(tensor, peer)

    def receive(self, spec: TensorSpec, peer: int) -> WatchedReceiving:
        """Start to receive the next tensor of a rank."""
        receiving = WatchedReceiving(self._transport.receive(spec, peer))
        if peer not in self._queues:
            self._queues[peer] = queue.SimpleQueue()
            thread = threading.Thread(target=_watch, args=(self._queues[peer],), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[peer].put(receiving)
        return receiving


def _watch(receives: _Queue) -> None:
    while (receiving := receives.get()) is not None:
        receiving.watch()
        # Torch's objects are to be gone before the thread idles: see below.
        del receiving


def _end_threads(queues: dict[int, _Queue], threads: list[threading.Thread]) -> None:
    for receives in queues.values():
        receives.put(None)
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
