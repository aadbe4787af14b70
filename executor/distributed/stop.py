"""SIGTERM and Ctrl-C: a training that has a folder for checkpoints writes one and ends."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from typing import Any

NO_FOLDER = "no [checkpoint] folder is configured, so nothing was written"
_SIGNAL_GRACE_S = 5.0
_AGAIN_S = 1.0
"""Torchrun sends a Ctrl-C on to ranks that have heard it themselves."""


class Stopped(SystemExit):
    """A training has ended because a signal asked it to; exits with 128 + the signal's number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.message = message


class StopRequest:
    """A signal that asks a training to stop.

    Args:
        grace_s: within which a checkpoint is written; None: there is no folder for one, and the
            process ends at once.

    Attributes:
        number: of the signal that this process has heard; 0: none.
        agreed: number of the signal that all ranks know of, after the same step; 0: none.
    """

    def __init__(self, grace_s: float | None) -> None:
        self.grace_s = grace_s
        self.number = 0
        self.agreed = 0
        self._heard_s = 0.0

    def hear(self, number: int) -> bool:
        """Note a signal; return whether it is a second Ctrl-C, which ends the process at once."""
        now_s = time.monotonic()
        if not self.number:
            self.number, self._heard_s = number, now_s
        return number == signal.SIGINT and now_s - self._heard_s > _AGAIN_S

    @property
    def is_late(self) -> bool:
        """Whether the grace time is over."""
        waited_s = time.monotonic() - self._heard_s
        return self.number != 0 and self.grace_s is not None and waited_s > self.grace_s

    @property
    def late_words(self) -> str:
        """What to tell where the grace time is over."""
        return (
            f"{signal.Signals(self.number).name} came {self.grace_s:g} s ago and the step has not "
            "ended: stopped without a checkpoint of it; give a longer checkpoint.grace_s"
        )


class TermSignal:
    """Takes SIGTERM, with which torchrun ends the other ranks, where nobody else wants it.

    Python runs signal handlers between two lines of the main thread, which may wait inside torch
    for ever; but whoever reads its wakeup descriptor hears of a signal at once.

    Args:
        numbers: of the signals to take, default SIGTERM.
    """

    _taken: dict[int, Any] = {}
    """The handlers before, by the signals that were taken."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers or (signal.SIGTERM,)
        self._heard, self._told = socket.socketpair()
        self._heard.setblocking(False)
        self._told.setblocking(False)

    def take(self) -> None:
        """Hear them from here on; only from the main thread, and where the default would act."""
        if threading.current_thread() is not threading.main_thread():
            return
        default = (signal.SIG_DFL, signal.default_int_handler)
        free = [number for number in self._numbers if signal.getsignal(number) in default]
        if not free:
            return
        before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        for number in free:
            TermSignal._taken[number] = signal.signal(number, lambda *_: None)

    @staticmethod
    def give_back() -> None:
        """They act as before again."""
        if TermSignal._taken:
            signal.set_wakeup_fd(-1)
        while TermSignal._taken:
            signal.signal(*TermSignal._taken.popitem())

    @staticmethod
    def end_soon() -> None:
        """SIGTERM ends the process some seconds after it comes; something is told first."""
        if signal.SIGTERM in TermSignal._taken:
            signal.signal(signal.SIGTERM, lambda *_: _end_later())

    def arrived(self, timeout_s: float) -> int:
        """Wait so long for one, or until :meth:`wake`; return its number, or 0."""
        # A process with many connections has descriptors that select itself does not take.
        with selectors.DefaultSelector() as selector:
            selector.register(self._heard, selectors.EVENT_READ)
            readable = selector.select(timeout_s)
        heard = self._heard.recv(4096) if readable else b""
        return next((number for number in self._numbers if number in heard), 0)

    def wake(self) -> None:
        """Let :meth:`arrived` return."""
        self._told.send(b"\0")


def _end_later() -> None:
    timer = threading.Timer(_SIGNAL_GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


# A child process is none of torchrun's: what ends it shall not end this one.
os.register_at_fork(after_in_child=TermSignal.give_back)
