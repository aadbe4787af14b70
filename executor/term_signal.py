"""SIGTERM, heard even while the main thread waits inside torch."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading

_GRACE_S = 5.0


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
    timer = threading.Timer(_GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


# A child process is none of torchrun's: what ends it shall not end this one.
os.register_at_fork(after_in_child=TermSignal.give_back)
