"""Who does which share of a run's work, when pipelines come, go and die.

A share is what a pipeline does in one iteration: so many samples, always the same ones for the same
number. Every share is committed exactly once or named as dropped; what was lost with a worker is
done again by another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from planner.errors import PipeplanError


@dataclass(frozen=True)
class Taken:
    """A worker has begun a share, in a step of its own."""

    worker: int
    step: int
    share: int


@dataclass(frozen=True)
class Committed:
    """What a worker did with a share is in the weights."""

    worker: int
    share: int


@dataclass(frozen=True)
class GivenBack:
    """A worker is gone; its shares that are not committed are for others."""

    worker: int


@dataclass(frozen=True)
class Dropped:
    """A share that nobody will do."""

    share: int


LedgerEvent = Taken | Committed | GivenBack | Dropped


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
    """A pure ledger of shares ``0 .. total - 1``: what it says follows from its events alone.

    Args:
        total: how many shares there are.
        write: is given every event that changes something, before it is answered for: a log of
            them brings the ledger back, see :func:`replay`.
    """

    def __init__(self, total: int, write: Callable[[LedgerEvent], None] | None = None) -> None:
        if total < 0:
            raise PipeplanError(f"total: {total} shares; expected 0 or more")
        self.total = total
        self._write = write
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
        if share is not None:
            self._note(Taken(worker, step, share))
        return share

    def commit(self, worker: int, share: int) -> bool:
        """Note that a worker's share is done.

        Returns:
            Whether this is the share's one commit, told for the first time or again. If not, the
            share was given back or dropped meanwhile: the worker was taken for dead.
        """
        if self._holder.get(share) != worker:
            return self._by.get(share) == worker
        self._note(Committed(worker, share))
        return True

    def give_back(self, worker: int) -> tuple[int, ...]:
        """Hand a dead worker's shares to others; which those are.

        Its steps are forgotten, so that it may come back and count them anew.
        """
        shares = self._held_by(worker)
        if worker in self._steps:
            self._note(GivenBack(worker))
        return shares

    def drop(self, share: int) -> bool:
        """Name a share as one that nobody will do; whether that holds: it may be committed."""
        self._check(share)
        if share in self._by:
            return False
        if share not in self._dropped:
            self._note(Dropped(share))
        return True

    def report(self) -> LedgerReport:
        """Where all shares are."""
        return LedgerReport(
            total=self.total,
            committed=len(self._by),
            remaining=self.total - len(self._by) - len(self._dropped),
            repeated=sum(counts["repeated"] for counts in self._counts.values()),
            dropped=tuple(sorted(self._dropped)),
            workers={
                worker: WorkerShares(**counts) for worker, counts in sorted(self._counts.items())
            },
        )

    def apply(self, event: LedgerEvent) -> None:
        """Take in an event of a log.

        Raises:
            PipeplanError: if it cannot follow on those before.
        """
        match event:
            case Taken(worker, step, share):
                fits = step not in self._steps.get(worker, {}) and share == self._next()
            case Committed(worker, share):
                fits = self._holder.get(share) == worker
            case GivenBack(worker):
                fits = worker in self._steps
            case Dropped(share):
                self._check(share)
                fits = share not in self._by and share not in self._dropped
        if not fits:
            raise PipeplanError(
                f"{event} does not follow on the events before it; the log is not whole, or not "
                f"of a ledger of {self.total} shares"
            )
        self._note(event)

    def _note(self, event: LedgerEvent) -> None:
        if self._write is not None:
            self._write(event)
        match event:
            case Taken(worker, step, share):
                self._take(worker, step, share)
            case Committed(worker, share):
                del self._holder[share]
                self._by[share] = worker
                self._counts[worker]["committed"] += 1
            case GivenBack(worker):
                self._give_back(worker)
            case Dropped(share):
                self._drop(share)

    def _take(self, worker: int, step: int, share: int) -> None:
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

    def _give_back(self, worker: int) -> None:
        for share in self._held_by(worker):
            self._lose(share)
            self._returned.append(share)
        del self._steps[worker]

    def _drop(self, share: int) -> None:
        self._dropped.add(share)
        self._lose(share)
        if share in self._returned:
            self._returned.remove(share)

    def _held_by(self, worker: int) -> tuple[int, ...]:
        shares = self._steps.get(worker, {}).values()
        return tuple(share for share in shares if self._holder.get(share) == worker)

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

    def _check(self, share: int) -> None:
        if not 0 <= share < self.total:
            raise PipeplanError(f"share: {share} is not one of 0 to {self.total - 1}")


def replay(
    total: int,
    events: Iterable[LedgerEvent],
    write: Callable[[LedgerEvent], None] | None = None,
) -> ShareLedger:
    """The ledger that a log of events leads to.

    Args:
        total: as the ledger had it that wrote the log.
        events: of the log, in order.
        write: is given the events from now on.

    Raises:
        PipeplanError: naming the first event, counted from 1, that cannot follow on the others.
    """
    ledger = ShareLedger(total)
    for number, event in enumerate(events, 1):
        try:
            ledger.apply(event)
        except PipeplanError as error:
            raise PipeplanError(f"event {number}: {error}") from None
    ledger._write = write
    return ledger
