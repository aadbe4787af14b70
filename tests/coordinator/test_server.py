"""No sequence of messages ends a coordinator, its log brings it back, and the silent are lost."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_coordinator import STRATEGIES, coordinator

from executor.coordinator.client import Client
from executor.coordinator.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Beat,
    Hello,
    Lost,
    Message,
    read_message,
)
from executor.coordinator.server import Server
from executor.coordinator.state import Coordinator
from executor.coordinator.wire import BEAT_S, SECRET_VARIABLE, Endpoint, frame
from planner.errors import PipeplanError

PIPELINES, PLACES = 2, 2
FACTS = {"kind": "training", "token": "00", "work": {}, "store_port": None}
IDS = st.sampled_from(["a", "b", "c", "d"])


def server_of(log: Path, strategy: str = "ad_psgd", silent_s: float = 1.0) -> Server:
    made = coordinator(strategy, PIPELINES, PLACES, 6)
    return Server(made, FACTS, silent_s, log=log)


def served(strategy: str, data: list[bytes], log: Path) -> Server:
    """A server that has handled all that are messages."""

    async def serve() -> Server:
        server = server_of(log, strategy)
        for one in data:
            try:
                server.handle(read_message(one))
            except PipeplanError:
                continue
        return server

    return asyncio.run(serve())


def message(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# Pipelines, places and steps that there are, that there are not, and that no integer holds.
NUMBERS = st.sampled_from([0, 0, 0, 1, 1, 1, 2, 2**62, 2**64, -1])
STEPS = st.sampled_from([1, 1, 2, 2, 3, 4, 7, 2**62, 0])
RANK = {"pipeline": NUMBERS, "place": NUMBERS, "incarnation_id": IDS}
HELLOS = st.builds(message, kind=st.just("hello"), **RANK)
QUESTIONS = st.builds(
    message, kind=st.sampled_from(["take", "ask"]), **RANK, step=STEPS, reduced=st.booleans()
)
NOTES = st.one_of(
    st.builds(message, kind=st.just("loss"), **RANK, step=STEPS, loss=st.floats()),
    st.builds(message, kind=st.just("write"), **RANK, step=STEPS),
    st.builds(message, kind=st.just("wrote"), **RANK, step=STEPS, done=st.booleans()),
    st.builds(message, kind=st.just("fault"), **RANK, word=st.text(max_size=9)),
    st.builds(message, kind=st.sampled_from(["bye", "beat"]), **RANK),
)
FINDINGS = st.builds(message, kind=st.just("lost"), pipeline=NUMBERS, incarnation_id=IDS)
GARBAGE = st.one_of(
    st.binary(max_size=30),
    st.just(b"[" * MAX_MESSAGE_BYTES),
    st.just(b" " * (MAX_MESSAGE_BYTES + 1)),
    st.builds(message, kind=st.text(max_size=4), pipeline=st.none() | st.integers()),
)
LATE = st.just(message(kind="late"))
MESSAGES = st.one_of(HELLOS, QUESTIONS, QUESTIONS, NOTES, FINDINGS, LATE, GARBAGE)


@given(strategy=st.sampled_from(STRATEGIES), data=st.lists(MESSAGES, max_size=60))
def test_no_sequence_of_messages_ends_a_coordinator_and_its_log_brings_it_back(
    tmp_path_factory: pytest.TempPathFactory, strategy: str, data: list[bytes]
) -> None:
    log = tmp_path_factory.mktemp("log") / "messages.jsonl"
    first = served(strategy, data, log).coordinator
    again = coordinator(strategy, PIPELINES, PLACES, 6)
    for at_s, text in map(json.loads, log.read_text().splitlines()):
        with suppress(Exception):
            again.handle(read_message(text.encode()), at_s)
    assert again.report() == first.report()
    assert again.watched() == first.watched()
    ranks = [(n, place, f"new{n}") for n in range(PIPELINES) for place in range(PLACES)]
    for n, place, name in ranks:
        again.handle(Hello(pipeline=n, place=place, incarnation_id=name), 1e9)
    assert again.watched() == ranks


def test_what_names_no_place_of_the_plan_is_not_logged(tmp_path: Path) -> None:
    data = [
        message(kind="lost", pipeline=PIPELINES, incarnation_id="a"),
        message(kind="hello", pipeline=PIPELINES, place=0, incarnation_id="a"),
        message(kind="hello", pipeline=0, place=PLACES, incarnation_id="a"),
    ]
    served("ad_psgd", data, tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == b""


def test_a_message_that_cannot_be_handled_is_named_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Coordinator.handle

    def broken(self: Coordinator, taken: Message, now_s: float) -> list[Answer]:
        if isinstance(taken, Hello) and taken.incarnation_id == "bad":
            raise ZeroDivisionError("a mistake")
        return handle(self, taken, now_s)

    monkeypatch.setattr(Coordinator, "handle", broken)
    hellos = [
        message(kind="hello", pipeline=0, place=0, incarnation_id=name) for name in ("bad", "good")
    ]
    server = served("ad_psgd", hellos, tmp_path / "log")
    assert server.coordinator.watched() == [(0, 0, "good")]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "bad" in line
    assert "is skipped: 'ZeroDivisionError: a mistake'" in line


def test_a_greeting_that_comes_again_does_not_end_a_later_incarnation(tmp_path: Path) -> None:
    hellos = [
        message(kind="hello", pipeline=0, place=place, incarnation_id=name)
        for name in ("old", "new", "old")
        for place in range(PLACES)
    ]
    made = served("ad_psgd", hellos, tmp_path / "log").coordinator
    assert made.watched() == [(0, 0, "new"), (0, 1, "new")]
    (answer,) = made.handle(Hello(pipeline=0, place=0, incarnation_id="old"), 1.0)
    assert answer.body["kind"] == "fenced"


# --- silence ------------------------------------------------------------------------------------


class Looks:
    """Two pipelines of two places with a connection each, and the server's looks at them."""

    def __init__(self, folder: Path) -> None:
        hellos = [
            message(kind="hello", pipeline=n, place=p, incarnation_id="ab"[n])
            for n in (0, 1)
            for p in (0, 1)
        ]
        self.server = served("ad_psgd", hellos, folder / "log")
        self.ranks = self.server.coordinator.watched()
        self.server._writers = dict.fromkeys(self.ranks)  # type: ignore[arg-type]

    def look(self, *silent: tuple[int, int]) -> list[Lost]:
        for number, place, name in self.ranks:
            if (number, place) not in silent:
                beat = Beat(pipeline=number, place=place, incarnation_id=name)
                self.server._receive(beat)
        return self.server.silent(BEAT_S)


def test_a_pipeline_is_lost_when_one_of_its_places_is_silent_for_too_long(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    assert not any(looks.look() for _ in range(100))
    for _ in range(10):  # One sign of life is enough to begin anew.
        assert not any(looks.look((0, 0)) for _ in range(8))
        assert not looks.look()
    found = [looks.look((1, 0)) for _ in range(12)]
    assert [] in found
    assert found[-1] == [Lost(pipeline=1, incarnation_id="b")]


def test_a_rank_that_has_said_goodbye_may_be_silent(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    for place in (0, 1):
        looks.server.handle(
            read_message(message(kind="bye", pipeline=1, place=place, incarnation_id="b"))
        )
    looks.ranks = looks.ranks[:2]
    assert not any(looks.look() for _ in range(20))


# --- connections --------------------------------------------------------------------------------


@contextmanager
def running(log: Path, silent_s: float = 1000.0) -> Iterator[Endpoint]:
    """A server on a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = Endpoint(*listener.getsockname())
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[int]]] = []

    async def serve() -> None:
        task = asyncio.create_task(server_of(log, silent_s=silent_s).run(listener))
        begun.append((asyncio.get_running_loop(), task))
        with suppress(asyncio.CancelledError):
            await task

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield endpoint
    finally:
        loop, task = begun[0]
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def clients(endpoint: Endpoint) -> list[Client]:
    """One for each place of each pipeline, all welcome."""
    found = [Client(endpoint, n, place) for n in range(PIPELINES) for place in range(PLACES)]
    for client in found:
        client.begin(f"n{client.pipeline}")
    threads = [Thread(target=client.hello, args=("127.0.0.1:9",)) for client in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_rank_that_waits_is_told_that_the_coordinator_is_gone(tmp_path: Path) -> None:
    with running(tmp_path / "log") as endpoint:
        found = clients(endpoint)
        assert all(client.there == {0: 1, 1: 1} for client in found)
        units = [client.take(1, reduced=True) for client in found]
        assert sorted({unit.number for unit in units if unit is not None}) == [0, 1]
    with pytest.raises(PipeplanError, match=f"listened at {endpoint}.* is gone .*--resume FOLDER"):
        found[0].take(2, reduced=True)
    for client in found:
        client.close()


def test_a_rank_whose_process_ends_is_lost_and_the_others_are_told(tmp_path: Path) -> None:
    with running(tmp_path / "log") as endpoint:
        found = clients(endpoint)
        found[3].close()
        while 1 in found[0].there:
            pass
        assert found[0].there == {0: 1}
        for client in found:
            client.close()


def test_messages_of_nobody_change_nothing(tmp_path: Path) -> None:
    hello = message(kind="hello", pipeline=0, place=0, incarnation_id="a")
    with running(tmp_path / "log") as endpoint:
        for data in (b"", frame(hello), bytes(64) + frame(hello), b"GET / HTTP/1.1\r\n\r\n" * 99):
            with socket.create_connection((endpoint.host, endpoint.port)) as raw:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
    assert (tmp_path / "log").read_bytes() == b""


def test_a_rank_with_another_secret_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes its secret as a caller comes: here both are one process."""
    monkeypatch.setenv(SECRET_VARIABLE, "a long one")
    monkeypatch.setattr("executor.coordinator.client.secret", lambda: b"another")
    with running(tmp_path / "log") as endpoint:
        with pytest.raises(PipeplanError, match="PIPEPLAN_SECRET: another value than that of the"):
            Client(endpoint, 0, 0)
        monkeypatch.setattr("executor.coordinator.client.secret", lambda: b"")
        with pytest.raises(PipeplanError, match="PIPEPLAN_SECRET: no value"):
            Client(endpoint, 0, 0)
        monkeypatch.setattr("executor.coordinator.client.secret", lambda: b"a long one")
        Client(endpoint, 0, 0).close()
