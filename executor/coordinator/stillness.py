"""For how long a sign of life has not come."""

from __future__ import annotations

from executor.coordinator.store import BEAT_S

_MOST_BEATS = 2
"""Between two looks, as far as they count."""


class Stillness:
    """For how long a count has stood still.

    Time in which nobody looked does not count. It passes where the process that looks or the store
    stands still, and then nobody could give a sign of life: torch's store looks up the name of who
    connects, on its only thread, and where no name server answers that takes seconds.
    """

    def __init__(self) -> None:
        self._count: int | None = None
        self._looked_s = float("-inf")
        self._still_s = 0.0

    def seconds(self, count: int, now_s: float) -> float:
        """Take a look: so long has the count been what it is."""
        passed_s = min(now_s - self._looked_s, _MOST_BEATS * BEAT_S)
        self._looked_s = now_s
        self._still_s = self._still_s + passed_s if count == self._count else 0.0
        self._count = count
        return self._still_s
