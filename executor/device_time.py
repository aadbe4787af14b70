"""The time of a device that is emulated: operations take what a plan says, by the clock."""

from __future__ import annotations

import math
import time

_AT_ONCE_S = 1e-4
"""A wait shorter than this found its message there."""


class DeviceTime:
    """When the emulated device is free again, in :func:`time.perf_counter` seconds.

    Args:
        factor: every operation takes so many times as long.
        most_late_s: lateness up to this is made up for by the operations that follow, as that of a
            sleep that woke late; the device is busy for what is more.
    """

    def __init__(self, factor: float = 1.0, most_late_s: float = math.inf) -> None:
        self._factor = factor
        self._most_late_s = most_late_s
        self._free_at_s = 0.0
        self._ready_s = 0.0
        self._start_s = 0.0

    def waited(self, start_s: float, end_s: float) -> None:
        """The next operation's input was waited for from ``start_s`` to ``end_s``."""
        self._ready_s = end_s if end_s - start_s > _AT_ONCE_S else 0.0

    def begin(self, pause_s: float = 0.0) -> None:
        """An iteration starts now, or after a pause."""
        if pause_s:
            time.sleep(pause_s)
        self._free_at_s = time.perf_counter()
        self._ready_s = 0.0

    def begin_operation(self) -> None:
        """An operation starts when the device is free and its input was there."""
        self._start_s = max(self._free_at_s, self._ready_s)
        self._ready_s = 0.0

    def reach(self, seconds: float) -> None:
        """Be busy until so many seconds of the operation have passed."""
        self._free_at_s = self._start_s + seconds * self._factor
        left = self._free_at_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
        elif -left > self._most_late_s:
            self._free_at_s = time.perf_counter()

    def take(self, seconds: float) -> None:
        """A whole operation."""
        self.begin_operation()
        self.reach(seconds)

    def idle_until_now(self) -> None:
        """What comes next starts now: the device has waited for something else."""
        self._free_at_s = max(self._free_at_s, time.perf_counter())
