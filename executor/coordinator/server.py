"""The coordinator at work: connections of ranks, and time around the state machine.

Everything runs in one thread. It needs no torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from executor.coordinator.messages import (
    MAX_MESSAGE_BYTES,
    Address,
    Answer,
    Beat,
    Late,
    Lost,
    Message,
    read_message,
    write_message,
)
from executor.coordinator.state import Coordinator, fenced
from executor.coordinator.wire import (
    BEAT_S,
    GREETING,
    LENGTH_BYTES,
    MAC_BYTES,
    frame,
    new_challenge,
    proof_for,
    secret,
)
from executor.coordinator.work import CoordinatorWork, coordinator_for
from planner.errors import PipeplanError, shorten

logger = logging.getLogger(__name__)

_GREETING_S = 5.0
"""A caller has so long to prove that it has the secret."""
_GONE_S = 1.5
"""A rank whose connection has ended is lost after this time, or ``silent_s`` if that is less."""
_MOST_BEATS = 2
"""Between two looks a rank is silent for so many heartbeats at most: time in which this process or
the machine stood still is no rank's silence."""
_STRANDED_WAIT_S = 5.0
"""Pipelines that come back late are refused with the reason for so long."""


class Server:
    """Runs a coordinator.

    Args:
        coordinator: at its beginning.
        facts: told every rank that connects.
        silent_s: a rank that gives no sign of life for so long is lost.
        last_wait_s: once all is done, lost pipelines that may be on their way back are waited for
            so long.
        log: file to which all messages are written with their times; None: none.

    Attributes:
        report: of the coordinator, once it has ended by itself.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        facts: Mapping[str, Any],
        silent_s: float,
        last_wait_s: float = 0.0,
        log: Path | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.report: dict[str, Any] | None = None
        self._facts = facts
        self._silent_s = silent_s
        self._last_wait_s = last_wait_s
        self._log = None if log is None else log.open("ab")
        self._writers: dict[Address, StreamWriter] = {}
        self._silence_s: dict[Address, float] = {}
        self._there: dict[str, int] = {}
        self._deadline: tuple[float, asyncio.TimerHandle] | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serve until all is done and all ranks have said goodbye, or all pipelines are lost.

        Args:
            listener: bound to the coordinator's address.
        """
        server = await asyncio.start_server(self._serve, sock=listener)
        async with server:
            await self._keep_time()

    # --- connections ---------------------------------------------------------------------------

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        rank: list[Address] = []
        try:
            if await self._is_of_training(reader, writer):
                writer.write(frame(self._facts))
                async for message in _messages(reader):
                    self._meet(message, writer, rank)
                    self._receive(message)
        except (OSError, EOFError, TimeoutError):
            pass  # The rank is gone, or no rank.
        finally:
            writer.close()
            if rank and self._writers.get(rank[0]) is writer:
                del self._writers[rank[0]]

    async def _is_of_training(self, reader: StreamReader, writer: StreamWriter) -> bool:
        challenge = new_challenge()
        writer.write(GREETING + challenge)
        answer = await asyncio.wait_for(reader.readexactly(2 * MAC_BYTES), _GREETING_S)
        proof = proof_for(secret(), challenge, answer)
        # Who has another secret is answered what no key gives, and tells its user.
        writer.write(proof or bytes(MAC_BYTES))
        return proof is not None

    def _meet(self, message: Message, writer: StreamWriter, known: list[Address]) -> None:
        """Note whose connection it is; tell a rank that is new here who takes part."""
        if isinstance(message, Lost | Late):
            raise EOFError("a finding of the coordinator's own, from outside")
        rank = message.sender
        if known == [rank]:
            return
        for before in known:
            self._writers.pop(before, None)
        known[:] = [rank]
        self._writers[rank] = writer
        self._send(rank, self._there_body(rank))

    def _send(self, rank: Address, body: Mapping[str, Any]) -> None:
        writer = self._writers.get(rank)
        if writer is not None and not writer.is_closing():
            writer.write(frame(body))

    # --- messages ------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        assert not isinstance(message, Lost | Late)
        rank = message.sender
        self._silence_s[rank] = 0.0
        if not isinstance(message, Beat):
            self.handle(message)
        elif self.coordinator.has_place_of(message) and self.coordinator.is_given_up(rank):
            self._send(rank, fenced(rank).body)

    def handle(self, message: Message) -> None:
        """Log a message, take it in, and send what follows."""
        now_s = time.monotonic()
        if self._log is not None and self.coordinator.has_place_of(message):
            line = json.dumps([now_s, write_message(message).decode()])
            self._log.write(line.encode() + b"\n")
            self._log.flush()
        before = self.coordinator.watched()
        answers = self._take_in(message, now_s)
        self._note_change()
        for answer in answers:
            self._send(answer.to, answer.body)
        for rank in before if isinstance(message, Lost) else ():
            if self.coordinator.is_given_up(rank):
                # It may wait for a rank of its own pipeline and ask for nothing.
                self._send(rank, fenced(rank).body)

    def _take_in(self, message: Message, at_s: float) -> list[Answer]:
        """Handle a message; one that cannot be handled is named, and ends nothing."""
        try:
            return self.coordinator.handle(message, at_s)
        except Exception as error:
            logger.warning(
                "coordinator: message %s is skipped: %s",
                shorten(write_message(message).decode(), 200),
                shorten(f"{type(error).__name__}: {error}", 300),
            )
            return []

    def _note_change(self) -> None:
        """Tell ranks who takes part, before any answer that names a pipeline; set the deadline."""
        if self.coordinator.there != self._there:
            self._there = dict(self.coordinator.there)
            for rank in self._writers:
                self._send(rank, self._there_body(rank))
        deadline_s = self.coordinator.deadline_s
        if self._deadline is not None and self._deadline[0] != deadline_s:
            self._deadline[1].cancel()
            self._deadline = None
        if deadline_s is not None and self._deadline is None:
            # The loop's clock is time.monotonic().
            loop = asyncio.get_running_loop()
            self._deadline = deadline_s, loop.call_at(deadline_s, self.handle, Late())

    def _there_body(self, rank: Address) -> dict[str, Any]:
        return {"kind": "there", "rows": self.coordinator.addresses(rank[1])}

    # --- time ----------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        """Look for silent ranks until the end."""
        ended_s, looked_s = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            passed_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            for lost in self.silent(min(passed_s, _MOST_BEATS * BEAT_S)):
                self.handle(lost)
            is_stranded = self.coordinator.is_stranded
            ended_s = ended_s + passed_s if is_stranded or self.coordinator.is_over else 0.0
            wait_s = self._last_wait_s if self.coordinator.has_lost else 0.0
            # Who has said goodbye closes the connection once it has the report.
            is_busy = bool(self.coordinator.watched() or self._writers)
            if is_stranded and ended_s < _STRANDED_WAIT_S:
                continue
            if is_stranded or (ended_s > wait_s and not is_busy):
                self.report = json.loads(json.dumps(self.coordinator.report()))  # As ranks get it.
                return

    def silent(self, passed_s: float) -> list[Lost]:
        """Return the incarnations that have been silent for too long.

        Args:
            passed_s: since the last look.
        """
        watched = self.coordinator.watched()
        self._silence_s = {rank: self._silence_s.get(rank, 0.0) + passed_s for rank in watched}
        gone_s, found = min(self._silent_s, _GONE_S), self._silence_s
        limits_s = {r: self._silent_s if r in self._writers else gone_s for r in watched}
        lost = [rank for rank in watched if found[rank] > limits_s[rank]]
        pairs = dict.fromkeys((number, incarnation_id) for number, _, incarnation_id in lost)
        return [Lost(pipeline=n, incarnation_id=incarnation_id) for n, incarnation_id in pairs]


async def _messages(reader: StreamReader) -> AsyncIterator[Message]:
    """Yield the valid messages of a connection; one that is none is named and passed over."""
    while True:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
        if length > MAX_MESSAGE_BYTES:
            raise EOFError("what comes is no message")
        data = await reader.readexactly(length)
        try:
            yield read_message(data)
        except PipeplanError as error:
            logger.warning("coordinator: %s", error)


@dataclass(frozen=True)
class Serving:
    """How a coordinator serves.

    Attributes:
        work: as of :meth:`~executor.coordinator.work.CoordinatorWork.facts`.
        silent_s: a rank that gives no sign of life for so long is lost.
        store_port: of a torch store on this host at which pipelines make process groups; None: the
            store of torchrun.
        last_wait_s: as of :class:`Server`.
    """

    work: Mapping[str, Any]
    silent_s: float
    store_port: int | None = None
    last_wait_s: float = 0.0


class ServerThread:
    """A coordinator that serves on a thread of this process until it ends by itself.

    Args:
        listener: bound to the coordinator's address.
        serving: how it serves.
        log: as of :class:`Server`.
    """

    def __init__(self, listener: socket.socket, serving: Serving, log: Path | None = None) -> None:
        facts = {
            "kind": "training",
            "work": dict(serving.work),
            "token": new_challenge().hex(),
            "store_port": serving.store_port,
        }
        made = coordinator_for(CoordinatorWork.of_facts(serving.work))
        self._server = Server(made, facts, serving.silent_s, serving.last_wait_s, log)
        serve = partial(asyncio.run, self._server.run(listener))
        self._thread = threading.Thread(target=serve, name="pipeplan-coordinator", daemon=True)
        self._thread.start()

    @property
    def done(self) -> int:
        """The count of work units that are done."""
        return self._server.coordinator.ledger.committed

    @property
    def report(self) -> dict[str, Any] | None:
        """The coordinator's report, once it has ended."""
        return self._server.report

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended, within some seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
