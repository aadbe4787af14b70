"""One rank fails and all end: the one that failed first says why, the others that it did.

The first to fail leaves a note in the store that the ranks met at, before its connections close. A
rank whose connection closes, or that waited for too long, looks there: it failed because another
did. If there is no note, a rank was lost without a word: killed, stopped, or its host is gone. Each
rank counts up in the store as long as it lives, which tells who that was. :class:`Watch` is a
thread that ends a rank when another one failed, whatever its main thread waits for.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import NoReturn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from executor.distributed.errors import FollowedError, LostRankError
from executor.distributed.machines import Machine
from executor.distributed.stop import NO_FOLDER, StopRequest, TermSignal
from executor.launch.console import print_error, say
from planner.errors import shorten

BEAT_S = 0.5
"""Seconds between two signs of life."""
_SILENT_BEATS = 4
_FIRST = "first failure"
_ORIGIN = re.compile(r"^\[\S+:\d+\] ")


def absent(ranks: Sequence[int], timeout_s: float) -> LostRankError:
    """Return the error about ranks that did not come before any training."""
    return LostRankError(
        f"{_ranks(ranks)} did not come within {timeout_s:.0f} s; start all processes of the plan, "
        "with the same rendezvous address"
    )


@contextmanager
def talking_to(whom: str) -> Iterator[None]:
    """Tell who could not be talked to inside.

    Args:
        whom: such as ``rank 3, which was to send 1F0``.

    Raises:
        LostRankError: with the reason, in place of what torch raises.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ConnectionError) as error:
        raise LostRankError(f"could not talk to {whom}; torch says: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return torch's message on one line, without places in its sources."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _ORIGIN.sub("", lines[0]).partition(". This is typically")[0]


class Failures:
    """The notes about failures that the ranks of a run leave in their store.

    Args:
        store: a part of it of its own.
        rank: this one.
        machines: of the ranks.
    """

    def __init__(self, store: Store, rank: int, machines: Sequence[Machine]) -> None:
        self._store = store
        self.rank = rank
        self.world_size = len(machines)
        self._machines = machines

    def for_a_thread(self) -> Failures:
        """Return a copy with a connection of its own: a store serves one thread at a time."""
        store = self._store.clone()  # type: ignore[attr-defined]
        return Failures(store, self.rank, self._machines)

    def beat(self) -> None:
        """A sign of life."""
        self._store.add(_beats(self.rank), 1)

    def raise_first(self) -> None:
        """Tell what failed first, if anything did.

        Raises:
            FollowedError: it was another rank.
            LostRankError: it was this one, whose other thread has told the others.
        """
        if self._store.check([_FIRST]):
            raise self._ended_by(self._store.get(_FIRST).decode())

    def _ended_by(self, note: str) -> LostRankError:
        """Return this rank's error about a note in the store."""
        mine = f"rank {self.rank} "
        if note.startswith(mine):
            return LostRankError(note.removeprefix(mine))
        return FollowedError(f"stopped, because {_brief(note)}")

    def note(self, words: str) -> str | None:
        """Leave the note, unless there is one.

        Returns:
            What failed first: ``words``, or another's; None if the store is gone with its host.
        """
        try:
            return str(self._store.compare_set(_FIRST, "", words).decode())
        except (RuntimeError, ConnectionError):
            return None

    def silent(self) -> list[int]:
        """The ranks that give no sign of life, after some beats; this one gives its own."""
        before = self._counts()
        for _ in range(_SILENT_BEATS):
            self.beat()
            time.sleep(BEAT_S)
        pairs = zip(before, self._counts(), strict=True)
        return [rank for rank, (a, b) in enumerate(pairs) if a == b]

    def _counts(self) -> list[int]:
        return [self._store.add(_beats(rank), 0) for rank in range(self.world_size)]

    def raise_lost(self, noticed: str, happened: str) -> NoReturn:
        """Find out who was lost, and leave a note of it.

        Args:
            noticed: how this rank noticed, for its user.
            happened: to this rank, if nobody was lost; for the note.

        Raises:
            FollowedError: if another rank has left a note meanwhile.
            LostRankError: what to tell the user.
        """
        silent = self.silent()
        words = happened
        if silent:
            words = f"lost {_ranks(silent)}: killed, stopped, or its host is gone; {noticed}"
        mine = f"rank {self.rank} {words}"
        first = self.note(mine)
        self._let_them_end(silent)
        if first is not None and first != mine:
            raise self._ended_by(first)
        raise LostRankError(words if silent else noticed)

    def _let_them_end(self, ranks: Sequence[int]) -> None:
        """Let processes of this host that were stopped go on, so that they can end."""
        for rank in ranks:
            machine = self._machines[rank]
            if machine.host == socket.gethostname():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(machine.pid, signal.SIGCONT)


def _beats(rank: int) -> str:
    return f"beats/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    word = "ranks" if len(ranks) > 1 else "rank"
    return f"{word} {', '.join(map(str, ranks))}"


@contextmanager
def followed(failures: Failures) -> Iterator[None]:
    """Leave a note of a failure inside, and tell a failure from one that followed another.

    Raises:
        FollowedError: if another rank failed first.
        LostRankError: if a rank was lost; it names which.
    """
    try:
        yield
    except LostRankError as error:
        raise _followed_or_lost(failures, error) from None
    except BaseException as error:
        cause = shorten(str(error), 300)
        words = f"rank {failures.rank} failed"
        first = failures.note(f"{words}: {cause}")
        # All ranks may find the same fault; then one tells it.
        if first is not None and not first.startswith(words) and first.endswith(cause):
            raise FollowedError(f"stopped, because {_brief(first)}") from None
        raise


def _brief(note: str) -> str:
    return note.partition(":")[0]


def _followed_or_lost(failures: Failures, error: LostRankError) -> LostRankError:
    noticed = error.problems[0]
    try:
        failures.raise_first()
        failures.raise_lost(noticed, "lost a connection")
    except LostRankError as known:
        return known
    except (RuntimeError, ConnectionError):
        return LostRankError(f"{noticed}; the ranks' store on the first host is gone too")


_GRACE_S = 3.0
"""Seconds in which the main thread may find out and report by itself."""
_FIRST_COME_S = 1.0
"""The rank that failed tells first."""


@contextmanager
def watched(failures: Failures | None, stop: StopRequest | None = None) -> Iterator[None]:
    """All ranks end when one fails inside; alone there is nobody to watch.

    Args:
        failures: of the ranks; None: others watch them.
        stop: told of signals that ask the training to stop; None: they end it.

    Raises:
        FollowedError: if another rank failed first.
        LostRankError: if a rank was lost; it names which.
    """
    if failures is not None and failures.world_size == 1:
        failures = None
    if failures is None and stop is None:
        yield
        return
    watch = Watch(None if failures is None else failures.for_a_thread(), stop)
    watch.start()
    try:
        with followed(failures) if failures is not None else nullcontext():
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
    torchrun ends the other ranks, unless a checkpoint is to be written first.

    Args:
        failures: over a connection of the watch's own; None: there are no other ranks to watch.
        stop: told of signals; None: they end the process.
    """

    def __init__(self, failures: Failures | None, stop: StopRequest | None = None) -> None:
        self._failures = failures
        self._stop = stop
        self._over = threading.Event()
        self._signal = TermSignal(signal.SIGTERM, *([] if stop is None else [signal.SIGINT]))
        if failures is not None:
            # The first sign of life, before anybody can ask for one.
            failures.beat()
        self._thread = threading.Thread(target=self._run, name="pipeplan-watch", daemon=True)

    def start(self) -> None:
        """Begin; on the main thread, to hear of signals."""
        self._signal.take()
        self._thread.start()

    def end(self, *, failed: bool) -> None:
        """Training is over, with something to be told if it has failed."""
        if failed:
            self._signal.end_soon()
        elif self._stop is None or not self._stop.agreed:
            # Torchrun ends the ranks that are left once one has stopped.
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

    def _end(self, reason: str, status: int = 1, wait_s: float = _GRACE_S) -> None:
        """End the process, unless the main thread does."""
        if self._over.wait(wait_s):
            return
        rank = "" if self._failures is None else f"rank {self._failures.rank}: "
        try:
            print_error(f"{rank}{reason}")
        finally:
            # Whoever read that may be gone as well.
            os._exit(status)

    def _wait_for_a_reason_to_end(self) -> None:
        """Returns once training is over."""
        while not self._over.is_set():
            number = self._signal.arrived(BEAT_S)
            if self._over.is_set():
                return
            if self._failures is not None:
                self._failures.beat()
                self._failures.raise_first()
            if number:
                self._hear(number)
            if self._stop is not None and self._stop.is_late:
                self._end(self._stop.late_words, 128 + self._stop.number, wait_s=0.0)

    def _hear(self, number: int) -> None:
        """End the process by a signal, or let the training write a checkpoint first."""
        stop, failures = self._stop, self._failures
        saves = stop is not None and stop.grace_s is not None
        if stop is not None and (stop.hear(number) or not saves):
            if not saves and (failures is None or failures.rank == 0):
                say(f"stopped by {signal.Signals(number).name}: {NO_FOLDER}", err=True)
            if number == signal.SIGINT or failures is None:
                os._exit(128 + number)
        if failures is None:
            return
        # Torchrun ends all ranks once one has ended, or because it was told to end.
        if not saves or failures.silent():
            failures.raise_lost("ended by SIGTERM", "was ended by SIGTERM")
