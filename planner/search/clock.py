"""The one clock of a search: seconds of wall time, or of work that is the same on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
TASKS_PER_S = 4e6
"""Tasks that a core of 2020 replays in a second, with all that is done around it."""
STATES_PER_S = 1e7
"""States of the dynamic programs of bounds that a core looks at in a second."""
OPERATIONS_PER_S = 7e3
"""Operations of a plan of which Python makes objects, or that it verifies, in a second."""


class Clock:
    """How much of a limit is used.

    Args:
        limit_s: of the whole search.
        deterministic: whether only work counts that :meth:`spend` is told of.
        threads: that the search may keep busy.

    Attributes:
        is_stopped: whether the user asked to stop.
    """

    def __init__(self, limit_s: float, *, deterministic: bool, threads: int = 1) -> None:
        self.limit_s, self.deterministic = limit_s, deterministic
        self.is_stopped = False
        self._threads = threads
        self._begin_s, self._spent_s = time.monotonic(), 0.0
        self._processor_begin_s = time.process_time()

    @property
    def elapsed_s(self) -> float:
        """Seconds used so far."""
        return self._spent_s if self.deterministic else time.monotonic() - self._begin_s

    def spend(self, seconds: float) -> None:
        """Count work; where wall time counts this does nothing."""
        self._spent_s += seconds

    def left_s(self, until: float = 1.0) -> float:
        """Return the seconds before a share of the limit is used; 0 if it is or was stopped."""
        if self.is_stopped:
            return 0.0
        return max(0.0, until * self.limit_s - self.elapsed_s)

    @property
    def processor_share(self) -> float | None:
        """Seconds of a core that each thread had in each second; None where work counts."""
        if self.deterministic:
            return None
        used_s = time.process_time() - self._processor_begin_s
        return min(1.0, used_s / max(self._threads * self.elapsed_s, 1e-9))

    def run(self, work: Callable[[], T]) -> T:
        """Run work in a thread, so that Ctrl-C stops the clock and the work ends by itself.

        Python handles no signal while its main thread is inside compiled code or CP-SAT.
        """
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work)
            while True:
                try:
                    return running.result()
                except KeyboardInterrupt:
                    self.is_stopped = True


class Part:
    """The time from now until a share of a clock's limit is used, as a limit of its own.

    Args:
        clock: of the whole search.
        until: the share.
        is_enough: asked whether to end at once.
    """

    def __init__(
        self, clock: Clock, until: float, is_enough: Callable[[], bool] = lambda: False
    ) -> None:
        self.deterministic = clock.deterministic
        self._clock, self._is_enough = clock, is_enough
        self._begin_s, self._limit_s = clock.elapsed_s, clock.left_s(until)

    def left_s(self, until: float = 1.0) -> float:
        """Return the seconds before a share of this part is used."""
        if self._clock.is_stopped or self._is_enough():
            return 0.0
        return max(0.0, self._begin_s + until * self._limit_s - self._clock.elapsed_s)

    @property
    def used_s(self) -> float:
        """Seconds of this part that are used."""
        return self._clock.elapsed_s - self._begin_s

    @property
    def share(self) -> float:
        """The share of this part that is used; 1 once it is over."""
        left_s = self.left_s()
        return 1.0 - left_s / self._limit_s if left_s > 0 else 1.0

    def spend(self, seconds: float) -> None:
        """Count work."""
        self._clock.spend(seconds)
