"""Where the coordinator is met, as people write it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest
from torch.distributed import TCPStore

from executor.coordinator.store import Meeting
from planner.errors import PipeplanError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node1:29600", "node1", 29600),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("::1:65535", "::1", 65535),
        ("[::1]:29778", "::1", 29778),
        ("[fe80::1%eth0]:29778", "fe80::1%eth0", 29778),
    ],
)
def test_host_and_port_are_read(text: str, host: str, port: int) -> None:
    meeting = Meeting.parse(text)
    assert (meeting.host, meeting.port) == (host, port)
    assert Meeting.parse(str(meeting)) == meeting


@pytest.mark.parametrize(
    "text",
    ["", "node1", ":29600", "node1:", "node1:x", "node1:0", "node1:65536", "node1:-1", "[]:1"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PipeplanError, match="is not HOST:PORT, such as node1:29600"):
        Meeting.parse(text)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_where_nobody_listens_one_is_told_to_start_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PipeplanError, match=r"nobody answers at 127.0.0.1:1 .*start it first"):
        Meeting.parse("127.0.0.1:1").connect(timeout_s=0.2)
    assert capfd.readouterr().err == ""


def leave_open(connection: socket.socket) -> socket.socket:
    """Keep a connection until the process ends.

    A greeting that gets no answer goes on waiting inside torch, on a thread that cannot be ended;
    were the connection closed meanwhile, torch would log its C++ frames among other tests.
    """
    socket.socket(fileno=os.dup(connection.fileno())).detach()
    return connection


@pytest.fixture
def mute() -> int:
    """The port of a program that listens and says nothing, as many do to what they do not know."""
    listener = leave_open(socket.create_server(("127.0.0.1", 0)))
    return int(listener.getsockname()[1])


def test_who_listens_and_says_nothing_is_named(mute: int) -> None:
    with pytest.raises(PipeplanError, match=f"127.0.0.1:{mute} does not answer as a coordinator"):
        Meeting("127.0.0.1", mute).connect(timeout_s=0.5)


def test_a_coordinator_that_is_about_to_start_is_waited_for() -> None:
    port, servers = free_port(), []

    def start() -> None:
        servers.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    timer = threading.Timer(1.0, start)
    timer.start()
    try:
        store = Meeting("127.0.0.1", port).connect()
        assert store.add("a", 1) == 1
    finally:
        timer.join()


class Deaf:
    """Hands connections on to a store, but for those at which it is deaf.

    Args:
        port: of the store.
        deaf: numbers of connections, in the order in which they come.
    """

    def __init__(self, port: int, deaf: frozenset[int]) -> None:
        self._target = ("127.0.0.1", port)
        self._deaf = deaf
        self._listener = leave_open(socket.create_server(("127.0.0.1", 0)))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                here = leave_open(self._listener.accept()[0])
                if number not in self._deaf:
                    there = leave_open(socket.create_connection(self._target))
                    for pair in ((here, there), (there, here)):
                        threading.Thread(target=self._hand_on, args=pair, daemon=True).start()
                number += 1

    @staticmethod
    def _hand_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)


def test_a_greeting_without_an_answer_is_repeated_on_a_new_connection() -> None:
    """The first connection only asks whether somebody listens."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deaf = Deaf(server.port, frozenset({1}))
    store = Meeting("127.0.0.1", deaf.port).connect()
    assert store.add("a", 1) == 1
