"""Ctrl-C on the first rank: what was measured so far is kept, wherever the main thread waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from executor.launch.console import say

INTERRUPTED = 130
_SOON_S = 2.0


def nothing_measured() -> None:
    """Tell that an interrupt came too early."""
    say("interrupted: no pair was measured yet, nothing is written", err=True)


class Interrupt:
    """Hears SIGINT on a thread of its own, as the main thread may wait inside torch for ever.

    To be made before any other thread is, which would take the signal.
    """

    def __init__(self) -> None:
        self._heard = threading.Event()
        self._finish: Callable[[], None] = nothing_measured
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        threading.Thread(target=self._listen, name="pipeplan-interrupt", daemon=True).start()

    def finish_with(self, finish: Callable[[], None]) -> None:
        """Call this on an interrupt from here on, on its own thread; the process then ends."""
        self._finish = finish

    def give_way(self) -> None:
        """Return unless the interrupt was heard, or is within a moment; then never.

        It may end other ranks first, and this one fails for missing them.
        """
        if self._heard.wait(_SOON_S):
            threading.Event().wait()

    def _listen(self) -> None:
        signal.sigwait({signal.SIGINT})
        self._heard.set()
        try:
            self._finish()
        finally:
            os._exit(INTERRUPTED)
