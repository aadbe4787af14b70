"""A thread that ends this rank when another one failed, whatever its main thread waits for."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from executor.distributed.failure import BEAT_S, Failures, FollowedError, LostRankError, followed
from executor.launch.console import print_error

_SIGNAL_GRACE_S = 5.0


class TermSignal:
    """Takes SIGTERM, with which torchrun ends the other ranks, where nobody else wants it.

    Python runs signal handlers between two lines of the main thread, which may wait inside torch
    for ever; but whoever reads its wakeup descriptor hears of a signal at once.
    """

    _taken = False

    def __init__(self) -> None:
        self._heard, self._told = socket.socketpair()
        self._heard.setblocking(False)
        self._told.setblocking(False)

    def take(self) -> None:
        """Hear it from here on; only from the main thread, and where the default would act."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGTERM, lambda *_: None)
        TermSignal._taken = True

    @staticmethod
    def give_back() -> None:
        """It ends the process again."""
        if TermSignal._taken:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            TermSignal._taken = False

    @staticmethod
    def end_soon() -> None:
        """It ends the process some seconds after it comes: there is something to be told first."""
        if TermSignal._taken:
            signal.signal(signal.SIGTERM, lambda *_: _end_later())

    def arrived(self, timeout_s: float) -> bool:
        """Wait so long for it, or until :meth:`wake`."""
        # A process with many connections has descriptors that select itself does not take.
        with selectors.DefaultSelector() as selector:
            selector.register(self._heard, selectors.EVENT_READ)
            readable = selector.select(timeout_s)
        return bool(readable) and signal.SIGTERM in self._heard.recv(4096)

    def wake(self) -> None:
        """Let :meth:`arrived` return."""
        self._told.send(b"\0")


def _end_later() -> None:
    timer = threading.Timer(_SIGNAL_GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


# A child process is none of torchrun's: what ends it shall not end this one.
os.register_at_fork(after_in_child=TermSignal.give_back)


_GRACE_S = 3.0
"""Seconds in which the main thread may find out and report by itself."""
_FIRST_COME_S = 1.0
"""The rank that failed tells first."""


@contextmanager
def watched(failures: Failures) -> Iterator[None]:
    """All ranks end when one fails inside; alone there is nobody to watch.

    Raises:
        FollowedError: if another rank failed first.
        LostRankError: if a rank was lost; it names which.
    """
    if failures.world_size == 1:
        yield
        return
    watch = Watch(failures.for_a_thread())
    watch.start()
    try:
        with followed(failures):
            yield
    except BaseException as error:
        watch.end(failed=True)
        if isinstance(error, FollowedError):
            time.sleep(_FIRST_COME_S)
        raise
    watch.end(failed=False)


class Watch:
    """Gives signs of life, and looks whether another rank failed.

    A rank may compute, or wait inside torch, for long after another one has failed, and no
    exception reaches it there. The watch gives it some seconds and then ends the process with
    status 1 and a line on stderr, as NCCL's own watchdog does. So it does on SIGTERM, with which
    torchrun ends the other ranks.

    Args:
        failures: over a connection of the watch's own.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._over = threading.Event()
        self._signal = TermSignal()
        # The first sign of life, before anybody can ask for one.
        failures.beat()
        self._thread = threading.Thread(target=self._run, name="pipeplan-watch", daemon=True)

    def start(self) -> None:
        """Begin; on the main thread, to hear of SIGTERM."""
        self._signal.take()
        self._thread.start()

    def end(self, *, failed: bool) -> None:
        """Training is over, with something to be told if it has failed."""
        if failed:
            self._signal.end_soon()
        else:
            self._signal.give_back()
        self._over.set()
        self._signal.wake()
        self._thread.join(_GRACE_S)

    def _run(self) -> None:
        try:
            self._wait_for_a_reason_to_end()
        except LostRankError as error:
            self._end(error.problems[0])
        except (RuntimeError, ConnectionError):
            # Torchrun was killed, or the first host is gone. Whoever waits for a rank finds out by
            # that and says more; nobody would ever end those who need no other.
            self._end("ends, because the store that the ranks met at is gone: torchrun or its host")

    def _end(self, reason: str) -> None:
        """End the process, unless the main thread does."""
        if self._over.wait(_GRACE_S):
            return
        try:
            print_error(f"rank {self._failures.rank}: {reason}")
        finally:
            # Whoever read that may be gone as well.
            os._exit(1)

    def _wait_for_a_reason_to_end(self) -> None:
        """Returns once training is over."""
        while not self._over.is_set():
            terminated = self._signal.arrived(BEAT_S)
            if self._over.is_set():
                return
            self._failures.beat()
            self._failures.raise_first()
            if terminated:
                # Torchrun ends all ranks once one has ended, or because it was told to end.
                self._failures.raise_lost("ended by SIGTERM", "was ended by SIGTERM")
