"""A thread that ends this rank when another one failed, whatever its main thread waits for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from executor.failure import BEAT_S, Failures, FollowedError, followed
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
            reason = self._reason_to_end()
        except FollowedError as error:
            reason = str(error)
        except (RuntimeError, ConnectionError):
            # Torchrun was killed, or the first host is gone. Whoever waits for a rank finds out by
            # that and says more; nobody would ever end those who need no other.
            reason = "ends, because the store that the ranks met at is gone: torchrun or its host"
        if reason is not None and not self._over.wait(_GRACE_S):
            try:
                print(f"error: rank {self._failures.rank}: {reason}", file=sys.stderr, flush=True)
            finally:
                # Whoever read that may be gone as well.
                os._exit(1)

    def _reason_to_end(self) -> str | None:
        """None once training is over."""
        while not self._over.is_set():
            if self._signal.arrived(BEAT_S):
                return self._why_terminated()
            self._failures.beat()
            first = self._failures.first()
            if first is not None:
                return None if self._over.is_set() else f"stopped, because {first}"
        return None

    def _why_terminated(self) -> str | None:
        """Torchrun ends all ranks once one has ended, or because it was told to end."""
        if self._over.is_set():
            return None
        first = self._failures.first()
        if first is not None:
            return f"stopped, because {first}"
        return self._failures.lost("ended by SIGTERM", "was ended by SIGTERM")
