"""Where the coordinator is met, as people write it, and what else may listen there."""

from __future__ import annotations

import socket
from threading import Thread

import pytest

from executor.coordinator.client import Client
from executor.coordinator.wire import Endpoint
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
    endpoint = Endpoint.parse(text)
    assert (endpoint.host, endpoint.port) == (host, port)
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text",
    ["", "node1", ":29600", "node1:", "node1:x", "node1:0", "node1:65536", "node1:-1", "[]:1"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PipeplanError, match="is not HOST:PORT, such as node1:29600"):
        Endpoint.parse(text)


def test_where_nobody_listens_one_is_told_to_start_it() -> None:
    with pytest.raises(PipeplanError, match=r"nobody answers at 127.0.0.1:1 .*start it first"):
        Client(Endpoint("127.0.0.1", 1), 0, 0, connect_s=0.2)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"])
def test_a_program_that_is_no_coordinator_is_named(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = Endpoint(*other.getsockname())

        def answer() -> None:
            for connection in iter(lambda: other.accept()[0], None):
                connection.sendall(says)

        Thread(target=answer, daemon=True).start()
        with pytest.raises(PipeplanError, match=f"{endpoint} does not answer as a coordinator"):
            Client(endpoint, 0, 0, connect_s=0.5)
