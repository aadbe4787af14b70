"""Calls that carry tensors: bad frames end one connection, and the next caller is answered."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor

from executor.elastic.tensor_calls import (
    CallError,
    Header,
    OpenCalls,
    RefusedError,
    TensorClient,
    TensorServer,
    greet,
)
from planner.errors import PipeplanError

TIMEOUT_S = 10.0
KEY = b"the key of a training"
MOST_BYTES = 2**27
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")


@pytest.fixture
def server() -> Iterator[TensorServer]:
    found = TensorServer("127.0.0.1", KEY, most_callers=8)

    def twice(header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
        return {"said": header.get("say")}, [tensor + tensor for tensor in tensors]

    def wrong(header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
        raise PipeplanError("that is wrong")

    def odd(header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
        return {}, [torch.zeros(1, dtype=torch.complex64)]

    found.handle("twice", twice, MOST_BYTES)
    found.handle("wrong", wrong)
    found.handle("odd", odd)
    yield found
    found.close()


def client(server: TensorServer) -> TensorClient:
    return TensorClient(server.address, KEY, TIMEOUT_S)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)])
def test_tensors_arrive_as_they_were(
    server: TensorServer, dtype: str, shape: tuple[int, ...]
) -> None:
    sent = torch.ones(shape, dtype=getattr(torch, dtype))
    answer, (found,) = client(server).call("twice", {"say": "ü"}, [sent])
    assert answer["said"] == "ü"
    assert found.dtype == sent.dtype
    assert torch.equal(found, sent + sent)


def test_parts_of_others_and_large_ones_arrive_too(server: TensorServer) -> None:
    sent = [torch.arange(12.0).reshape(3, 4).t(), torch.rand(3_000_000)[::2]]
    _, found = client(server).call("twice", {}, sent)
    assert all(torch.equal(a, b + b) for a, b in zip(found, sent, strict=True))


def test_a_refusal_says_why_and_the_connection_goes_on(server: TensorServer) -> None:
    caller = client(server)
    with pytest.raises(RefusedError, match=r"wrong at 127.0.0.1:\d+: that is wrong"):
        caller.call("wrong")
    with pytest.raises(RefusedError, match="no call 'other' here"):
        caller.call("other")
    assert caller.call("twice", {"say": 1})[0]["said"] == 1


def test_a_type_that_cannot_be_sent_is_named_at_both_ends(server: TensorServer) -> None:
    with pytest.raises(CallError, match="complex64 cannot be sent"):
        client(server).call("twice", {}, [torch.zeros(1, dtype=torch.complex64)])
    with pytest.raises(RefusedError, match="complex64 cannot be sent"):
        client(server).call("odd")


def called(server: TensorServer) -> socket.socket:
    """A connection to a server without a word on it."""
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def frame(header: object) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("!Q", len(data)) + data


def form(*forms: object) -> bytes:
    return frame({"call": "twice", "tensors": list(forms)})


BAD = {
    "a huge header": (struct.pack("!Q", 2**40), "a header of 1099511627776 bytes; at most"),
    "no JSON": (frame(b"\xff{"), "a header that is no JSON"),
    "deep JSON": (frame(b"[" * 100_000), "a header that is no JSON"),
    "a list": (frame([1]), "a header without a list of tensors"),
    "no tensors": (frame({"call": "twice"}), "a header without a list of tensors"),
    "tensors that are none": (
        frame({"call": "twice", "tensors": 3}),
        "a header without a list of tensors",
    ),
    "a wrong type": (form(["complex64", [1]]), "a tensor of the form"),
    "a type that is code": (form(["__class__", [1]]), "a tensor of the form"),
    "a negative shape": (form(["float32", [-1]]), "a tensor of the form"),
    "a huge shape": (form(["float32", [2**40, 2**40]]), f"tensors of {2**82} bytes; at most"),
    "a huge shape of nothing": (form(["float32", [0, 2**70]]), "a tensor of the form"),
    "a shape of words": (form(["float32", ["2"]]), "a tensor of the form"),
    "a shape of truths": (form(["float32", [True]]), "a tensor of the form"),
    "a shape of fractions": (form(["float32", [1.5]]), "a tensor of the form"),
    "no form": (form(7), "a tensor of the form"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_frame_is_told_and_the_next_caller_is_answered(
    server: TensorServer, name: str
) -> None:
    sent, told = BAD[name]
    with called(server) as raw:
        greet(raw, KEY)
        raw.sendall(sent)
        received = b""
        while piece := raw.recv(65536):
            received += piece
    assert told in json.loads(received[8:])["error"]
    assert client(server).call("twice", {"say": 1})[0]["said"] == 1


@pytest.mark.parametrize("sent", [b"", b"abc", frame({"tensors": []})[:-1], form(["uint8", [9]])])
def test_a_connection_that_ends_early_disturbs_nobody(server: TensorServer, sent: bytes) -> None:
    with called(server) as raw:
        greet(raw, KEY)
        raw.sendall(sent)
    assert client(server).call("twice", {"say": 1})[0]["said"] == 1


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 10**6])
def test_who_does_not_have_the_key_is_not_answered(server: TensorServer, sent: bytes) -> None:
    with called(server) as raw, suppress(OSError):
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        assert len(raw.recv(4096)) == 32  # The challenge.
        assert raw.recv(4096) == b""
    with pytest.raises(CallError, match="does not have this training's key"):
        TensorClient(server.address, b"another", TIMEOUT_S)
    assert client(server).call("twice", {"say": 1})[0]["said"] == 1


def test_an_answer_to_one_challenge_is_none_to_another(server: TensorServer) -> None:
    """What was overheard cannot be sent again."""
    with called(server) as raw:
        overheard = Overheard(raw)
        greet(overheard, KEY)  # type: ignore[arg-type]
    with called(server) as raw:
        assert len(raw.recv(32)) == 32
        raw.sendall(overheard.sent)
        assert raw.recv(4096) == b""


class Overheard:
    """A connection, and what was sent on it."""

    def __init__(self, connection: socket.socket) -> None:
        self.recv_into = connection.recv_into
        self.connection = connection
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self.connection.sendall(data)


def test_half_open_connections_hold_few_threads_and_no_other_caller(server: TensorServer) -> None:
    before = threading.active_count()
    held = [called(server) for _ in range(200)]
    assert client(server).call("twice", {"say": 1})[0]["said"] == 1
    assert threading.active_count() - before < 40
    for raw in held:
        raw.close()


def test_callers_beyond_the_most_are_refused(server: TensorServer) -> None:
    callers = [client(server) for _ in range(8)]
    for caller in callers:
        caller.call("twice")
    with pytest.raises(CallError):
        client(server).call("twice")
    callers.pop().close()
    while True:
        with suppress(CallError):
            client(server).call("twice")
            return


def test_tensors_beyond_what_a_call_may_carry_are_refused_unread(server: TensorServer) -> None:
    with called(server) as raw:
        greet(raw, KEY)
        raw.sendall(form(["uint8", [MOST_BYTES]], ["uint8", [1]]))
        (length,) = struct.unpack("!Q", raw.recv(8))
        told = json.loads(raw.recv(length))["error"]
    assert told == f"tensors of {MOST_BYTES + 1} bytes; at most {MOST_BYTES} are read here"


def test_a_server_that_is_gone_or_silent_fails_the_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CallError, match=f"could not call {address}: timed out"):
            TensorClient(address, KEY, 0.2)
    with pytest.raises(CallError, match=f"could not call {address}"):
        TensorClient(address, KEY, 0.2)
    with pytest.raises(CallError, match="could not call nowhere"):
        TensorClient("nowhere", KEY, 0.2)


@pytest.mark.parametrize("greets", [False, True])
def test_calls_to_a_lost_pipeline_fail_at_once_and_others_go_on(
    server: TensorServer, greets: bool
) -> None:
    """A process that was stopped takes connections: only the coordinator knows that it is lost."""
    calls, asked = OpenCalls(), threading.Event()
    let_go = threading.Event()

    def silent(header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
        asked.set()
        let_go.wait()
        return {}, []

    server.handle("silent", silent)
    stopped = socket.create_server(("127.0.0.1", 0))
    address = server.address if greets else f"127.0.0.1:{stopped.getsockname()[1]}"
    failed: list[str] = []

    def call() -> None:
        try:
            TensorClient(address, KEY, 300.0, partial(calls.to, 1, 5)).call("silent")
        except CallError as error:
            failed.append(str(error))

    waiting = threading.Thread(target=call)
    waiting.start()
    while not (asked.is_set() if greets else calls):
        pass
    calls.end_all_but({0: 1, 1: 5})
    assert waiting.is_alive()
    calls.end_all_but({0: 1, 1: 6})
    waiting.join()
    assert len(failed) == 1
    assert not calls
    let_go.set()
    stopped.close()
    other = TensorClient(server.address, KEY, TIMEOUT_S, partial(calls.to, 0, 1))
    calls.end_all_but({})
    assert other.call("twice", {"say": 1})[0]["said"] == 1


def test_a_server_without_the_key_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as strange:
        threading.Thread(target=lambda: strange.accept()[0].sendall(bytes(64))).start()
        with pytest.raises(CallError, match="does not have this training's key"):
            TensorClient(f"127.0.0.1:{strange.getsockname()[1]}", KEY, TIMEOUT_S)


def test_an_answer_that_is_none_fails_the_call(server: TensorServer) -> None:
    caller = client(server)
    caller._connection = Nonsense()  # type: ignore[assignment]
    with pytest.raises(CallError, match="a header that is no JSON"):
        caller.call("push")


class Nonsense:
    """A connection at whose other end is no server of ours."""

    def __init__(self) -> None:
        self.data = frame(b"nonsense")

    def sendall(self, data: bytes) -> None:
        """Take anything."""

    def recv_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self.data))
        buffer[:count], self.data = self.data[:count], self.data[count:]
        return count

    def close(self) -> None:
        """Nothing is open."""


def test_a_closed_server_ends_its_threads_and_who_calls_is_told() -> None:
    """Each thread would keep the whole training: strategy, weights, process groups."""
    before = set(threading.enumerate())
    closing = TensorServer("127.0.0.1", KEY, most_callers=8)
    closing.handle("same", lambda header, tensors: ({}, tensors), MOST_BYTES)
    callers = [client(closing) for _ in range(3)]
    for caller in callers:
        caller.call("same", {}, [torch.ones(2)])
    closing.close()
    with pytest.raises(CallError):
        callers[0].call("same")
    with pytest.raises(CallError):
        client(closing)
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
