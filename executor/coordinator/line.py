"""One thread of a rank and the coordinator: a question, and the queue of its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from executor.coordinator.messages import Ask, Hello, Take, read_answer, write_message
from executor.coordinator.secret import sealed, unsealed
from executor.coordinator.store import COORDINATOR_BEATS, REQUESTS, store_is_gone
from planner.errors import PipeplanError

ASK_AGAIN_S = 1.0
IsAnswer = Callable[[Mapping[str, Any]], bool]
"""Returns whether a body answers the question asked, and not an earlier one."""


class FencedError(PipeplanError):
    """The others go on without this pipeline, which has to come back as a new one."""


class NothingLeftError(PipeplanError):
    """There is nothing to take part in.

    Attributes:
        is_done: whether that is because all is done.
    """

    def __init__(self, why: str, *, is_done: bool) -> None:
        super().__init__(why)
        self.is_done = is_done


def fenced(pipeline: int) -> str:
    """Return the message for a pipeline that was given up."""
    return (
        f"pipeline {pipeline} was silent for too long, and the others go on without it; "
        "start it again to come back"
    )


class Channel:
    """A thread's connection to the coordinator: its questions, and the queue of the answers.

    Args:
        store: a connection of its own.
        queue: of the answers.
        where: the store is.
        key: of the training.

    Attributes:
        waits: the number of what is asked for, and since when; None: nothing is.
        last_again_s: when the thread was last told to ask again.
    """

    def __init__(self, store: Store, queue: str, where: str, key: bytes) -> None:
        self.store = store
        self._key = key
        self.queue = queue
        self.where = where
        self.waits: tuple[int, float] | None = None
        self.last_again_s = 0.0
        self._number = 0

    def listen_to(self, queue: str) -> None:
        """Take answers from another queue from now on."""
        self.queue = queue

    def asked(self, message: Hello | Take | Ask, is_answer: IsAnswer) -> dict[str, Any]:
        """Send until there is an answer.

        Args:
            message: what is asked.
            is_answer: what it waits for.

        Returns:
            The answer; of kind ``away``: the coordinator has not stirred, and a group is no reason
            to wait for it.

        Raises:
            FencedError: if the others go on without this pipeline.
            NothingLeftError: if there is nothing to take part in.
            PipeplanError: if the store is gone.
        """
        try:
            return self._asked(message, is_answer)
        except DistError:
            raise PipeplanError(store_is_gone(self.where)) from None

    def _asked(self, message: Hello | Take | Ask, is_answer: IsAnswer) -> dict[str, Any]:
        can_do_without = message.kind == "ask"
        self._send(message)
        beats = self._coordinator_beats() if can_do_without else 0
        self._number += 1
        self.waits = self._number, time.monotonic()
        try:
            while True:
                body = self._next_answer()
                if body["kind"] == "again":
                    if body["number"] is None:
                        self._send(message)
                    elif body["number"] == self._number:
                        now = self._coordinator_beats()
                        if can_do_without and now == beats:
                            return {"kind": "away"}
                        beats = now
                        self._send(message)
                elif body["kind"] == "fenced":
                    raise FencedError(fenced(message.pipeline))
                elif body["kind"] == "refused":
                    why = f"pipeline {message.pipeline}: {body['why']}"
                    raise NothingLeftError(why, is_done=body.get("is_done", False))
                elif is_answer(body):
                    return body
        finally:
            self.waits = None

    def _next_answer(self) -> dict[str, Any]:
        """Wait for an answer; what nobody of this training has sent is passed over."""
        while True:
            data = self.store.queue_pop(self.queue)
            with suppress(PipeplanError):
                return read_answer(unsealed(self._key, self.queue, data))

    def remind(self, store: Store, now_s: float) -> None:
        """Let the thread ask again if it has waited for long; called by another thread."""
        waits = self.waits
        if waits is not None and now_s - max(waits[1], self.last_again_s) > ASK_AGAIN_S:
            self.last_again_s = now_s
            again = {"kind": "again", "number": waits[0]}
            store.queue_push(self.queue, sealed(self._key, self.queue, json.dumps(again).encode()))

    def _send(self, message: Hello | Take | Ask) -> None:
        self.store.queue_push(REQUESTS, sealed(self._key, REQUESTS, write_message(message)))

    def _coordinator_beats(self) -> int:
        return int(self.store.add(COORDINATOR_BEATS, 0))
