"""The coordinator at work: messages from the store's queue, answers into it, and time.

The loop blocks in the queue. Time comes in by the same way: a second thread puts a message there
when a deadline has come or a rank has been silent for too long.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from executor.coordinator.log import MessageLog
from executor.coordinator.messages import (
    Answer,
    Late,
    Lost,
    Message,
    answers_of,
    groups_of,
    read_message,
    write_message,
)
from executor.coordinator.secret import key_of, sealed, unsealed
from executor.coordinator.state import Coordinator
from executor.coordinator.store import (
    AGAIN,
    BEAT_S,
    COORDINATOR_BEATS,
    DONE,
    FENCED,
    REPORT,
    REQUESTS,
    STRANDED,
    THERE,
    Meeting,
    beats_of,
)
from planner.errors import PipeplanError, shorten

_MOST_BEATS = 2
"""The most signs of life that count between two looks."""


class Stillness:
    """The time for which a count has stood still.

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


logger = logging.getLogger(__name__)

_Lives = tuple[tuple[int, str, frozenset[int]], ...]


class Service:
    """Runs a coordinator.

    Args:
        coordinator: at its beginning; it takes in the log.
        meeting: where ranks are met.
        log: of messages.
        silent_s: a rank that gives no sign of life for so long is lost.
    """

    def __init__(
        self, coordinator: Coordinator, meeting: Meeting, log: MessageLog, silent_s: float
    ) -> None:
        self.coordinator = coordinator
        self.log = log
        self.silent_s = silent_s
        self._meeting = meeting
        self._store = meeting.connect()
        self._key = key_of(self._store)
        self._changed = threading.Condition()
        self._deadline_s: float | None = None
        self._lives: _Lives = ()
        self._there = ""
        self._done = -1

    def follow(self) -> None:
        """Take in what is new in the log, which another one may write."""
        for message, at_s in self.log.new_messages():
            self._take_in(message, at_s)

    def run(self) -> None:
        """Serve for ever: whoever started the process ends it."""
        self.follow()
        self.log.open()
        self._note_change()
        for pipeline, incarnation_id, places in self._lives:
            for place in places:
                for queue_of in (answers_of, groups_of):
                    self._push(self._store, queue_of(pipeline, place, incarnation_id), AGAIN)
        threading.Thread(target=self._keep_time, name="pipeplan-time", daemon=True).start()
        while True:
            self._serve(self._store.queue_pop(REQUESTS))

    def _serve(self, data: bytes) -> None:
        try:
            message = read_message(unsealed(self._key, REQUESTS, data))
        except PipeplanError as error:
            logger.warning("coordinator: %s", error)
            return
        now_s = time.monotonic()
        if self.coordinator.has_place_of(message):
            self.log.append(message, now_s)
        for answer in self._take_in(message, now_s):
            self._tell(answer)
        self._note_change()

    def _take_in(self, message: Message, at_s: float) -> list[Answer]:
        """Handle a message; one that cannot be handled is named, and ends nothing.

        A log brings every later process to the same message.
        """
        try:
            return self.coordinator.handle(message, at_s)
        except Exception as error:
            logger.warning(
                "coordinator: message %s is skipped: %s",
                shorten(write_message(message).decode(), 200),
                shorten(f"{type(error).__name__}: {error}", 300),
            )
            return []

    def _tell(self, answer: Answer) -> None:
        self._push(self._store, answer.queue, json.dumps(answer.body).encode())

    def _push(self, store: Store, queue: str, data: bytes) -> None:
        store.queue_push(queue, sealed(self._key, queue, data))

    def _note_change(self) -> None:
        incarnations = tuple(self.coordinator.incarnations())
        self._fence(incarnations)
        with self._changed:
            self._lives = incarnations
            if self._deadline_s != self.coordinator.deadline_s:
                self._deadline_s = self.coordinator.deadline_s
                self._changed.notify()
        there = json.dumps(self.coordinator.there)
        if there != self._there:
            self._there = there
            self._store.set(THERE, there)
        done = self.coordinator.ledger.committed
        if done != self._done:
            self._done = done
            self._store.set(DONE, str(done))
        if self.coordinator.is_stranded:
            self._store.set(STRANDED, json.dumps(self.coordinator.report()))
        if self.coordinator.is_over:
            self._store.set(REPORT, json.dumps(self.coordinator.report()))

    def _fence(self, incarnations: _Lives) -> None:
        """Let those who are given up know, who may wait for a rank of their own pipeline."""
        incarnation_ids = {incarnation_id for _, incarnation_id, _ in incarnations}
        for pipeline, incarnation_id, places in self._lives:
            if incarnation_id not in incarnation_ids:
                for place in places:
                    self._store.add(beats_of(pipeline, place, incarnation_id), FENCED)

    # --- the other thread ----------------------------------------------------------------------

    def _keep_time(self) -> None:
        # Where the store is gone, the other thread finds it out and says so.
        with suppress(DistError):
            self._tell_time()

    def _tell_time(self) -> None:
        store = self._meeting.connect()
        silence = Silence(store, self.silent_s)
        told: float | None = None
        next_beat_s = 0.0
        while True:
            with self._changed:
                deadline_s = None if self._deadline_s == told else self._deadline_s
                until_s = next_beat_s if deadline_s is None else min(next_beat_s, deadline_s)
                self._changed.wait(max(0.0, until_s - time.monotonic()))
                deadline_s, incarnations = self._deadline_s, self._lives
            now_s = time.monotonic()
            if deadline_s is not None and deadline_s != told and deadline_s <= now_s:
                told = deadline_s
                self._push(store, REQUESTS, write_message(Late()))
            if now_s >= next_beat_s:
                next_beat_s = now_s + BEAT_S
                store.add(COORDINATOR_BEATS, 1)
                for lost in silence.found(incarnations, now_s):
                    self._push(store, REQUESTS, write_message(lost))


class Silence:
    """Finds ranks that have given no sign of life for too long.

    Args:
        store: a connection of its own.
        silent_s: for how long they may be silent.
    """

    def __init__(self, store: Store, silent_s: float) -> None:
        self._store = store
        self._silent_s = silent_s
        self._heard: dict[str, Stillness] = {}
        """The last sign of life of each rank, by its key in the store."""

    def found(self, incarnations: _Lives, now_s: float) -> list[Lost]:
        """The incarnations of pipelines that have lost a rank."""
        keys = {
            beats_of(n, place, incarnation_id): (n, incarnation_id)
            for n, incarnation_id, ps in incarnations
            for place in ps
        }
        counts = self._counts(list(keys))
        self._heard = {key: self._heard.get(key, Stillness()) for key in keys}
        lost = [
            keys[key]
            for key, count in counts.items()
            if self._heard[key].seconds(count, now_s) > self._silent_s
        ]
        return [
            Lost(pipeline=n, incarnation_id=incarnation_id)
            for n, incarnation_id in dict.fromkeys(lost)
        ]

    def _counts(self, keys: list[str]) -> dict[str, int]:
        """Read the counts, in one message for all whose keys are known to exist."""
        known = [key for key in keys if key in self._heard]
        found = self._store.multi_get(known) if known else []
        counts = {key: int(value) for key, value in zip(known, found, strict=True)}
        return {key: counts[key] if key in counts else self._store.add(key, 0) for key in keys}
