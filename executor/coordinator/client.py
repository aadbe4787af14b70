"""A rank's side of the coordinator: asks, waits for answers, and gives signs of life."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from executor.coordinator.messages import (
    Ask,
    Beat,
    Bye,
    Fault,
    Hello,
    Loss,
    Question,
    Take,
    Write,
    Wrote,
    write_message,
)
from executor.coordinator.pipelines import Incarnations
from executor.coordinator.wire import (
    BEAT_S,
    GREETING,
    LENGTH_BYTES,
    MAC_BYTES,
    MOST_ANSWER_BYTES,
    SECRET_VARIABLE,
    Endpoint,
    answer_to,
    frame,
    is_proof,
    mac,
    new_challenge,
    receive,
    secret,
)
from executor.launch.console import print_error
from planner.errors import PipeplanError

_FENCED_GRACE_S = 3.0
"""A rank that is given up has so long to find it out and report it by itself."""
_TRY_AGAIN_S = 0.2


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
    """The coordinator's answer to a rank that begins.

    Attributes:
        step: its pipeline's first.
        donor: pipeline and incarnation whose weights before that step it copies; None: it has
            its own.
    """

    step: int
    donor: tuple[int, int] | None


@dataclass(frozen=True)
class WorkUnit:
    """The work unit that a step trains on.

    Attributes:
        number: of the unit; None: the work is over.
        there: incarnations of the pipelines that take part, by number.
        snapshot: put the weights aside for a pipeline that comes back first.
    """

    number: int | None
    there: dict[int, int]
    snapshot: bool


@dataclass(frozen=True)
class GroupAssignment:
    """Whom to average with.

    Attributes:
        number: in the global order; None: with nobody.
        members: pipelines with their incarnations, this one among them.
        generation: of their process group.
    """

    number: int | None
    members: Incarnations
    generation: int


class Client:
    """One rank's connection to the coordinator.

    Threads may ask at the same time, each another kind of question.

    Args:
        endpoint: where the coordinator listens.
        pipeline, place: of this rank.
        connect_s: so long is a coordinator waited for that is about to start.

    Attributes:
        facts: of the training, that the coordinator tells everybody.
        key: of the training, for calls between ranks.
        incarnation_id: of the pipeline's incarnation, the same on all its places; set by
            :meth:`begin` .
        there: incarnations of the pipelines that take part, by number, in the order they came.
        addresses: at which the ranks at this place serve tensors, by pipeline and incarnation.

    Raises:
        PipeplanError: if nobody answers, or the other processes have another secret.
    """

    def __init__(
        self, endpoint: Endpoint, pipeline: int, place: int, connect_s: float = 10.0
    ) -> None:
        self.endpoint = endpoint
        self.pipeline = pipeline
        self.place = place
        self.incarnation_id = ""
        self.there: Mapping[int, int] = {}
        self.addresses: Mapping[tuple[int, int], str] = {}
        self._watchers: list[Callable[[Mapping[int, int]], None]] = []
        self._changed = threading.Condition()
        self._inbox: list[dict[str, Any]] = []
        self._failure: PipeplanError | None = None
        self._over = threading.Event()
        self._sending = threading.Lock()
        self._connection, self.facts = _connected(endpoint, connect_s)
        self.key = mac(secret(), bytes.fromhex(self.facts["token"]))

    # --- questions -----------------------------------------------------------------------------

    def begin(self, incarnation_id: str) -> None:
        """Be this incarnation of the pipeline from now on."""
        is_first = not self.incarnation_id
        with self._changed:
            self.incarnation_id = incarnation_id
            self._inbox.clear()
        if is_first:
            threading.Thread(target=self._run, name="pipeplan-client", daemon=True).start()

    def hello(self, address: str) -> Welcome:
        """Say that this rank is ready, and wait until all are.

        Args:
            address: at which it serves tensors.

        Raises:
            NothingLeftError: if there is nothing to take part in.
        """
        body = self._asked(Hello(**self._from(), address=address), "welcome")
        donor = None if body["donor"] is None else (body["donor"][0], body["donor"][1])
        return Welcome(body["step"], donor)

    def take(self, step: int, reduced: bool) -> WorkUnit | None:
        """Ask for the work unit of a step.

        Args:
            step: of this pipeline, from 1.
            reduced: whether the reductions of the step before succeeded.

        Returns:
            The unit; None: put the weights aside for a pipeline that comes back, and ask again.

        Raises:
            FencedError: if the others go on without this pipeline.
        """
        message = Take(**self._from(), step=step, reduced=reduced)
        body = self._asked(message, "share", "snapshot")
        if body["kind"] == "snapshot":
            return None
        there = {int(number): incarnation for number, incarnation in body["there"].items()}
        return WorkUnit(body["share"], there, body["snapshot"])

    def ask(self, step: int, reduced: bool = True) -> GroupAssignment:
        """Ask whom to average with.

        Args:
            step: that this rank has done.
            reduced: whether the average before succeeded, if :meth:`take` does not say it.

        Raises:
            FencedError: if the others go on without this pipeline.
        """
        body = self._asked(Ask(**self._from(), step=step, reduced=reduced), "group")
        members = tuple((number, incarnation) for number, incarnation in body["members"])
        return GroupAssignment(body["number"], members, body["generation"])

    def mean_loss(self, step: int, loss: float) -> float:
        """Tell the pipeline's loss of a step; return the mean of the pipelines' last losses."""
        told = loss if math.isfinite(loss) else None
        body = self._asked(Loss(**self._from(), step=step, loss=told), "loss")
        return loss if body["mean"] is None or told is None else float(body["mean"])

    def may_write(self, step: int, wait_s: float) -> bool:
        """Ask for the turn to write the checkpoint of a step of the whole training.

        Args:
            step: of the checkpoint.
            wait_s: for a pipeline that is writing; otherwise the step is left to it.
        """
        until_s = time.monotonic() + wait_s
        while True:
            body = self._asked(Write(**self._from(), step=step), "turn")
            if body["writes"] or not body["is_due"] or time.monotonic() >= until_s:
                return bool(body["writes"])
            time.sleep(_TRY_AGAIN_S)

    def has_written(self, step: int, *, done: bool) -> None:
        """End this pipeline's turn to write; ``done`` if the checkpoint is written."""
        self._send(Wrote(**self._from(), step=step, done=done))

    def note_fault(self, word: str) -> None:
        """Tell that an injected fault is about to happen, and wait until it is noted."""
        self._asked(Fault(**self._from(), word=word), "noted")

    def bye(self) -> dict[str, Any]:
        """Say that this rank has done all; return the report on the whole training."""
        return dict(self._asked(Bye(**self._from()), "report")["report"])

    def at_change(self, call: Callable[[Mapping[int, int]], None]) -> None:
        """Have something called at each change and heartbeat, on the client's thread."""
        self._watchers.append(call)

    def close(self) -> None:
        """Give no more signs of life."""
        self._over.set()
        self._connection.close()

    def _from(self) -> dict[str, Any]:
        names = {"pipeline": self.pipeline, "place": self.place}
        return {**names, "incarnation_id": self.incarnation_id}

    def _asked(self, message: Question, *kinds: str) -> dict[str, Any]:
        """Send a question and wait for its answer."""
        self._send(message)
        step = getattr(message, "step", None)
        with self._changed:
            while True:
                for body in self._inbox:
                    if body["kind"] in kinds and step in (None, body.get("step")):
                        self._inbox.remove(body)
                        return body
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()

    def _send(self, message: Question | Beat) -> None:
        # The client's thread finds out where the connection has ended.
        with suppress(OSError), self._sending:
            self._connection.sendall(frame(write_message(message)))

    # --- the client's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._listen()
        except (OSError, ValueError) as error:
            if not self._over.is_set():
                self._fail(PipeplanError(gone(self.endpoint, str(error))))

    def _listen(self) -> None:
        """Give signs of life and take in what comes, until the connection ends."""
        next_beat_s = 0.0
        while not self._over.is_set():
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                next_beat_s = now_s + BEAT_S
                self._send(Beat(**self._from()))
                self._tell_watchers()  # Of waits that have begun since the last change, too.
            if select.select([self._connection], [], [], max(0.0, next_beat_s - now_s))[0]:
                self._take_in(_received(self._connection))

    def _take_in(self, body: dict[str, Any]) -> None:
        match body["kind"]:
            case "there":
                rows = body["rows"]
                self.addresses = {**self.addresses, **{(n, i): a for n, i, a in rows}}
                self.there = {number: incarnation for number, incarnation, _ in rows}
                self._tell_watchers()
            case "fenced" if body["incarnation_id"] != self.incarnation_id:
                return  # The pipeline has begun anew by itself.
            case "fenced":
                self._fail(FencedError(fenced(self.pipeline)))
                threading.Thread(target=self._end_if_it_does_not, daemon=True).start()
            case "refused":
                why = f"pipeline {self.pipeline}: {body['why']}"
                self._fail(NothingLeftError(why, is_done=body.get("is_done", False)))
            case _:
                with self._changed:
                    self._inbox = [b for b in self._inbox if b["kind"] != body["kind"]] + [body]
                    self._changed.notify_all()

    def _tell_watchers(self) -> None:
        for call in self._watchers if self.there else ():
            call(self.there)

    def _fail(self, error: PipeplanError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _end_if_it_does_not(self) -> None:
        """It may wait for another rank of its pipeline, which has been stopped, say, for long."""
        if self._over.wait(_FENCED_GRACE_S):
            return
        try:
            print_error(fenced(self.pipeline))
        finally:
            # Whoever read that may be gone as well.
            os._exit(1)


def fenced(pipeline: int) -> str:
    """Return the message for a pipeline that was given up."""
    return (
        f"pipeline {pipeline} was silent for too long, and the others go on without it; "
        "start it again to come back"
    )


def gone(endpoint: Endpoint, why: str) -> str:
    """Return the message of a coordinator that is gone for good."""
    return (
        f"coordinator: the process that listened at {endpoint}, python -m executor.coordinator or "
        f"the first rank, is gone ({why}); start it again, and all pipelines with --resume FOLDER "
        "of the last checkpoint"
    )


def _received(connection: socket.socket) -> dict[str, Any]:
    """Read a message of the coordinator.

    Raises:
        ValueError: if what comes is none.
        OSError: if the connection ends.
    """
    length = int.from_bytes(receive(connection, LENGTH_BYTES))
    if length > MOST_ANSWER_BYTES:
        raise ValueError(f"a message of {length} bytes")
    body = json.loads(receive(connection, length))
    if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
        raise ValueError("a message without a kind")
    return body


def _connected(endpoint: Endpoint, timeout_s: float) -> tuple[socket.socket, dict[str, Any]]:
    """Connect, prove the secret, and return the connection and the training's facts.

    Args:
        endpoint: where the coordinator listens.
        timeout_s: for one that is about to start.

    Raises:
        PipeplanError: if nobody answers there, or no coordinator, or one with another secret.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(_TRY_AGAIN_S, until_s - time.monotonic())
            connection = socket.create_connection((endpoint.host, endpoint.port), left_s)
        except OSError as error:
            if time.monotonic() + _TRY_AGAIN_S > until_s:
                raise PipeplanError(
                    f"coordinator: nobody answers at {endpoint} ({error.strerror or error}); start "
                    "it first, with python -m executor.coordinator PLAN --listen HOST:PORT"
                ) from None
            time.sleep(_TRY_AGAIN_S)
            continue
        try:
            return connection, _greeted(connection, endpoint, max(timeout_s, left_s))
        except (OSError, ValueError) as error:
            connection.close()
            # The process that was to answer may have ended meanwhile, and another one starts.
            if time.monotonic() + _TRY_AGAIN_S > until_s:
                raise PipeplanError(
                    f"coordinator: what listens at {endpoint} does not answer as a coordinator "
                    f"({error or type(error).__name__}); give the HOST:PORT that python -m "
                    "executor.coordinator has as --listen, and a port that is no other program's"
                ) from None
            time.sleep(_TRY_AGAIN_S)


def _greeted(connection: socket.socket, endpoint: Endpoint, timeout_s: float) -> dict[str, Any]:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if receive(connection, len(GREETING)) != GREETING:
        raise ValueError("it greets otherwise")
    challenge, nonce = receive(connection, MAC_BYTES), new_challenge()
    connection.sendall(answer_to(secret(), challenge, nonce))
    if not is_proof(secret(), challenge, nonce, receive(connection, MAC_BYTES)):
        found = "another value" if secret() else "no value"
        raise PipeplanError(
            f"{SECRET_VARIABLE}: {found} than that of the coordinator at {endpoint}; give all "
            "processes of a training the same, or none"
        )
    facts = _received(connection)
    connection.settimeout(None)
    return facts
