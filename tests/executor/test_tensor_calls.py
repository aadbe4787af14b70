"""Calls that carry tensors: bad frames end one connection, and the next caller is answered."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from executor.elastic.tensor_calls import (
    CallError,
    Header,
    RefusedError,
    TensorClient,
    TensorServer,
)
from planner.errors import PipeplanError

TIMEOUT_S = 10.0
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")


@pytest.fixture
def server() -> Iterator[TensorServer]:
    found = TensorServer("127.0.0.1")

    def twice(header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
        return {"said": header.get("say")}, [tensor + tensor for tensor in tensors]

    def wrong(header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
        raise PipeplanError("that is wrong")

    def odd(header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
        return {}, [torch.zeros(1, dtype=torch.complex64)]

    found.handle("twice", twice)
    found.handle("wrong", wrong)
    found.handle("odd", odd)
    yield found
    found.close()


def client(server: TensorServer) -> TensorClient:
    return TensorClient(server.address, TIMEOUT_S)


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
    "a huge shape": (form(["float32", [2**40, 2**40]]), "a tensor of the form"),
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
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as raw:
        raw.sendall(sent)
        received = b""
        while piece := raw.recv(65536):
            received += piece
    assert told in json.loads(received[8:])["error"]
    assert client(server).call("twice", {"say": 1})[0]["said"] == 1


@pytest.mark.parametrize("sent", [b"", b"abc", frame({"tensors": []})[:-1], form(["uint8", [9]])])
def test_a_connection_that_ends_early_disturbs_nobody(server: TensorServer, sent: bytes) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as raw:
        raw.sendall(sent)
    assert client(server).call("twice", {"say": 1})[0]["said"] == 1


def test_a_server_that_is_gone_or_silent_fails_the_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CallError, match=f"push at {address}: timed out"):
            TensorClient(address, 0.2).call("push")
    with pytest.raises(CallError, match=f"could not call {address}"):
        TensorClient(address, 0.2)
    with pytest.raises(CallError, match="could not call nowhere"):
        TensorClient("nowhere", 0.2)


def test_an_answer_that_is_none_fails_the_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as strange:
        caller = TensorClient(f"127.0.0.1:{strange.getsockname()[1]}", TIMEOUT_S)
        connection, _ = strange.accept()
        connection.sendall(frame(b"nonsense"))
        with pytest.raises(CallError, match="a header that is no JSON"):
            caller.call("push")
        connection.close()


def test_a_closed_server_ends_its_threads_and_who_calls_is_told() -> None:
    """Each thread would keep the whole training: strategy, weights, process groups."""
    before = set(threading.enumerate())
    closing = TensorServer("127.0.0.1")
    closing.handle("same", lambda header, tensors: ({}, tensors))
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
