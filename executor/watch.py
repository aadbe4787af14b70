"""A thread that ends this rank when another one failed, whatever its main thread waits for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from executor.error_line import print_error
from executor.failure import BEAT_S, Failures, FollowedError, LostRankError, followed
from executor.term_signal import TermSignal

_GRACE_S = 3.0
"""What the main thread has to find out by itself, and to tell."""
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
