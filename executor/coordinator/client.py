"""A rank's side of the coordinator: asks, waits, asks again, and gives signs of life."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from executor.coordinator.generations import Lives
from executor.coordinator.messages import (
    Ask,
    Hello,
    Message,
    Take,
    answers_of,
    read_answer,
    write_message,
)
from executor.coordinator.store import (
    BEAT_S,
    COORDINATOR_BEATS,
    REQUESTS,
    Meeting,
    beats_of,
)
from planner.errors import PipeplanError

ASK_AGAIN_S = 1.0
_FENCED_GRACE_S = 3.0
"""What a rank that is given up has to find it out by itself, and to tell."""


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


@dataclass(frozen=True)
class Welcome:
    """How a rank begins.

    Attributes:
        life: of its pipeline.
        step: its first.
        donor: pipeline and life whose weights before that step it copies; None: it has its own.
    """

    life: int
    step: int
    donor: tuple[int, int] | None


@dataclass(frozen=True)
class Share:
    """What a step trains on.

    Attributes:
        number: of the share; None: the work is over.
        there: lives of the pipelines that take part, by number.
        snapshot: put the weights aside for somebody first.
    """

    number: int | None
    there: dict[int, int]
    snapshot: bool


@dataclass(frozen=True)
class AGroup:
    """Whom to average with.

    Attributes:
        number: in the global order; None: with nobody.
        members: pipelines with their lives, this one among them.
        generation: of their process group.
    """

    number: int | None
    members: Lives
    generation: int


class Client:
    """One rank's connection to the coordinator.

    Args:
        meeting: where it is met.
        pipeline, place: of this rank.
        nonce: of its pipeline's life, the same on all its places.
    """

    def __init__(self, meeting: Meeting, pipeline: int, place: int, nonce: str) -> None:
        self.meeting = meeting
        self.pipeline = pipeline
        self.place = place
        self.nonce = nonce
        self.store = meeting.connect()
        self._queue = answers_of(pipeline, place, nonce)
        self._number = 0
        self._waits: tuple[int, float] | None = None
        """The number of what is asked for, and since when; None: nothing is."""
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="pipeplan-beat", daemon=True).start()

    def begin_anew(self, nonce: str) -> None:
        """Go on as a new life of the pipeline."""
        self.nonce = nonce
        self._queue = answers_of(self.pipeline, self.place, nonce)

    def close(self) -> None:
        """Give no more signs of life."""
        self._over.set()

    def hello(self) -> Welcome:
        """Say that this rank is ready, and wait until all are.

        Raises:
            NothingLeftError: if there is nothing to take part in.
        """
        body = self._asked(Hello(**self._from()), "welcome", None)
        donor = None if body["donor"] is None else (body["donor"][0], body["donor"][1])
        return Welcome(body["life"], body["step"], donor)

    def take(self, step: int, reduced: bool) -> Share | None:
        """Ask for the share of a step.

        Args:
            step: of this pipeline, from 1.
            reduced: whether the reductions of the step before succeeded.

        Returns:
            The share; None: put the weights aside for somebody, and ask again.

        Raises:
            FencedError: if the others go on without this pipeline.
        """
        body = self._asked(Take(**self._from(), step=step, reduced=reduced), "share", step)
        if body["kind"] == "snapshot":
            return None
        there = {int(number): life for number, life in body["there"].items()}
        return Share(body["share"], there, body["snapshot"])

    def ask(self, step: int) -> AGroup:
        """Ask whom to average with; nobody, while the coordinator is away.

        Raises:
            FencedError: if the others go on without this pipeline.
        """
        body = self._asked(Ask(**self._from(), step=step), "group", step)
        if body["kind"] == "away":
            return AGroup(None, (), 0)
        members = tuple((number, life) for number, life in body["members"])
        return AGroup(body["number"], members, body["generation"])

    def _from(self) -> dict[str, Any]:
        return {"pipeline": self.pipeline, "place": self.place, "nonce": self.nonce}

    def _asked(self, message: Message, kind: str, step: int | None) -> dict[str, Any]:
        """Send until there is an answer."""
        self._push(REQUESTS, write_message(message))
        beats = self._coordinator_beats() if kind == "group" else 0
        self._number += 1
        self._waits = self._number, time.monotonic()
        try:
            while True:
                body = read_answer(self.store.queue_pop(self._queue))
                if body["kind"] == "again":
                    if body["number"] is None:
                        self._push(REQUESTS, write_message(message))
                    elif body["number"] == self._number:
                        now = self._coordinator_beats()
                        if kind == "group" and now == beats:
                            return {"kind": "away"}
                        beats = now
                        self._push(REQUESTS, write_message(message))
                elif body["kind"] == "fenced":
                    raise FencedError(self._fenced())
                elif body["kind"] == "refused":
                    why = f"pipeline {self.pipeline}: {body['why']}"
                    raise NothingLeftError(why, is_done=body.get("is_done", False))
                elif (body["kind"] == "snapshot" and kind == "share") or (
                    body["kind"] == kind and body["step"] == (step or body["step"])
                ):
                    return body
        finally:
            self._waits = None

    def _fenced(self) -> str:
        return (
            f"pipeline {self.pipeline} was silent for too long, and the others go on without it; "
            "start it again to come back"
        )

    def _push(self, queue: str, data: bytes) -> None:
        self.store.queue_push(queue, data)

    def _coordinator_beats(self) -> int:
        return int(self.store.add(COORDINATOR_BEATS, 0))

    def _beat(self) -> None:
        store = self.meeting.connect()
        again_s = 0.0
        while not self._over.is_set():
            try:
                nonce = self.nonce
                beats = store.add(beats_of(self.pipeline, self.place, nonce), 1)
                waits, now_s = self._waits, time.monotonic()
                if waits is not None and now_s - max(waits[1], again_s) > ASK_AGAIN_S:
                    again_s = now_s
                    again = {"kind": "again", "number": waits[0]}
                    store.queue_push(self._queue, json.dumps(again).encode())
            except (RuntimeError, ConnectionError):
                return  # The store is gone, and the rank finds out by itself.
            if beats < 0 and nonce == self.nonce:
                self._end_if_it_does_not()
                return
            self._over.wait(BEAT_S)

    def _end_if_it_does_not(self) -> None:
        """It may wait for another rank of its pipeline, which has been stopped, say, for long."""
        if self._over.wait(_FENCED_GRACE_S):
            return
        try:
            print(f"error: {self._fenced()}\n", end="", file=sys.stderr, flush=True)
        finally:
            # Whoever read that may be gone as well.
            os._exit(1)
