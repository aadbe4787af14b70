"""Who does which share of a run's work, when pipelines come, go and die.

A share is what a pipeline does in one iteration: so many samples, always the same ones for the same
number. Every share is committed exactly once or named as dropped; what was lost with a worker is
done again by another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from planner.errors import PipeplanError


@dataclass(frozen=True)
class WorkerShares:
    """What a worker did: shares it took, committed, took after another lost them, and lost."""

    taken: int = 0
    committed: int = 0
    repeated: int = 0
    lost: int = 0


@dataclass(frozen=True)
class LedgerReport:
    """Where a run's shares are.

    Attributes:
        total: of all shares: ``committed`` + ``remaining`` + the number of ``dropped``.
        committed: how many are done.
        remaining: how many are still to be committed, whether taken or not.
        repeated: how often one was taken again after it had been given back.
        dropped: which ones nobody will do, ascending.
        workers: by worker that has taken any.
    """

    total: int
    committed: int
    remaining: int
    repeated: int
    dropped: tuple[int, ...]
    workers: dict[int, WorkerShares]


class ShareLedger:
    """A pure ledger of shares ``0 .. total - 1``: what it says follows from its calls alone.

    Args:
        total: how many shares there are.
    """

    def __init__(self, total: int) -> None:
        if total < 0:
            raise PipeplanError(f"total: {total} shares; expected 0 or more")
        self.total = total
        self._fresh = 0
        self._returned: deque[int] = deque()
        self._holder: dict[int, int] = {}
        """Of each share that is taken and not committed."""
        self._by: dict[int, int] = {}
        """Who committed a share."""
        self._dropped: set[int] = set()
        self._steps: dict[int, dict[int, int]] = {}
        """By worker and step, the share; from scratch when the worker is gone."""
        self._counts: dict[int, dict[str, int]] = {}

    def take(self, worker: int, step: int) -> int | None:
        """The share for a worker's step; the same one if it asks again for the same step.

        What was given back goes first.

        Returns:
            None if no share is left to take; one may come back later.
        """
        known = self._steps.get(worker, {}).get(step)
        if known is not None:
            return known
        share = self._next()
        if share is None:
            return None
        counts = self._counts.setdefault(
            worker, {"taken": 0, "committed": 0, "repeated": 0, "lost": 0}
        )
        counts["taken"] += 1
        if share < self._fresh:
            counts["repeated"] += 1
            self._returned.popleft()
        self._fresh = max(self._fresh, share + 1)
        self._holder[share] = worker
        self._steps.setdefault(worker, {})[step] = share
        return share

    def commit(self, worker: int, share: int) -> bool:
        """Note that a worker's share is done.

        Returns:
            Whether this is the share's one commit, told for the first time or again. If not, the
            share was given back or dropped meanwhile: the worker was taken for dead.
        """
        if self._holder.get(share) != worker:
            return self._by.get(share) == worker
        del self._holder[share]
        self._by[share] = worker
        self._counts[worker]["committed"] += 1
        return True

    def give_back(self, worker: int) -> tuple[int, ...]:
        """Hand a dead worker's shares to others; which those are.

        Its steps are forgotten, so that it may come back and count them anew.
        """
        taken = self._steps.pop(worker, {}).values()
        shares = tuple(share for share in taken if self._holder.get(share) == worker)
        for share in shares:
            self._lose(share)
            self._returned.append(share)
        return shares

    def drop(self, share: int) -> bool:
        """Name a share as one that nobody will do; whether that holds: it may be committed."""
        if not 0 <= share < self.total:
            raise PipeplanError(f"share: {share} is not one of 0 to {self.total - 1}")
        if share in self._by:
            return False
        self._dropped.add(share)
        self._lose(share)
        if share in self._returned:
            self._returned.remove(share)
        return True

    @property
    def committed(self) -> int:
        """Shares that are done."""
        return len(self._by)

    @property
    def remaining(self) -> int:
        """Shares that are still to be committed, whether taken or not."""
        return self.total - len(self._by) - len(self._dropped)

    def report(self) -> LedgerReport:
        """Where all shares are."""
        return LedgerReport(
            total=self.total,
            committed=self.committed,
            remaining=self.remaining,
            repeated=sum(counts["repeated"] for counts in self._counts.values()),
            dropped=tuple(sorted(self._dropped)),
            workers={
                worker: WorkerShares(**counts) for worker, counts in sorted(self._counts.items())
            },
        )

    def _lose(self, share: int) -> None:
        holder = self._holder.pop(share, None)
        if holder is not None:
            self._counts[holder]["lost"] += 1

    def _next(self) -> int | None:
        """What would be taken now."""
        if self._returned:
            return self._returned[0]
        fresh = self._fresh
        while fresh in self._dropped:
            fresh += 1
        return fresh if fresh < self.total else None
