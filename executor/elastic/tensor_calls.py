"""Calls between two ranks of different pipelines that carry tensors, over TCP.

For what one rank may want of another at any time: weights of a donor, a push to a parameter
server, an average with a partner. Frames are a length, a header in JSON, and raw bytes; nothing in
them can run code. Like torch's own stores they carry no credentials: use a private network.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from planner.errors import PipeplanError, shorten

Header = dict[str, Any]
Handler = Callable[[Header, list[Tensor]], tuple[Header, Sequence[Tensor]]]
_LENGTH = struct.Struct("!Q")
_MAX_HEADER_BYTES = 2**24
_MAX_TENSOR_BYTES = 2**40
_PIECE_BYTES = 2**22
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


class CallError(PipeplanError):
    """The other rank could not be called."""


class RefusedError(PipeplanError):
    """The other rank says that the call is wrong."""


class TensorServer:
    """Answers calls of other ranks, each connection on a thread of its own.

    Args:
        host: address to listen on.

    Attributes:
        address: ``host:port`` to call.
    """

    def __init__(self, host: str) -> None:
        self._handlers: dict[str, Handler] = {}
        self._listener = socket.create_server((host, 0))
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="pipeplan-calls", daemon=True).start()

    def handle(self, name: str, handler: Handler) -> None:
        """Answer calls of this name; handlers run on many threads at once."""
        self._handlers[name] = handler

    def close(self) -> None:
        """Take no more connections, and end those that there are with their threads."""
        with self._lock:
            self._closed = True
            for connection in (self._listener, *self._connections):
                # Closing alone would not wake the thread that waits there.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer_all(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer_all(self, connection: socket.socket) -> None:
        # Whoever called is gone, or sent what is no call: that ends its connection alone.
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while True:
                    header, tensors = _receive(connection)
                    _send(connection, *self._answer(header, tensors))
            except CallError as error:
                _send(connection, {"error": str(error)}, ())

    def _answer(self, header: Header, tensors: list[Tensor]) -> tuple[Header, Sequence[Tensor]]:
        handler = self._handlers.get(str(header.get("call")))
        if handler is None:
            return {"error": f"no call {shorten(header.get('call'))} here"}, ()
        try:
            return handler(header, tensors)
        except PipeplanError as error:
            return {"error": "; ".join(error.problems)}, ()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            return {"error": shorten(f"{type(error).__name__}: {error}", 300)}, ()


class TensorClient:
    """Calls one rank; one call at a time.

    Args:
        address: ``host:port`` of its server.
        timeout_s: a call that takes longer has failed.

    Raises:
        CallError: if nobody answers there.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        try:
            self._connection = socket.create_connection((host, int(port)), timeout_s)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            raise CallError(f"could not call {address}: {error}") from None

    def call(
        self, name: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> tuple[Header, list[Tensor]]:
        """Call, and wait for the answer.

        Raises:
            CallError: if the connection is lost.
            RefusedError: if the call is wrong.
        """
        try:
            _send(self._connection, {**(header or {}), "call": name}, tensors)
            answer, found = _receive(self._connection)
        except OSError as error:
            self.close()
            raise CallError(f"{name} at {self.address}: {error}") from None
        if "error" in answer:
            raise RefusedError(f"{name} at {self.address}: {answer['error']}")
        return answer, found

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def _send(connection: socket.socket, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    forms = [[_name(tensor.dtype), list(tensor.shape)] for tensor in tensors]
    text = json.dumps({**header, "tensors": forms}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for tensor in tensors:
        if tensor.numel():
            data = _bytes_of(tensor.detach().cpu().contiguous())
            # A timeout is of each piece, so that a large tensor may take its time.
            for start in range(0, len(data), _PIECE_BYTES):
                connection.sendall(data[start : start + _PIECE_BYTES])


def _receive(connection: socket.socket) -> tuple[Header, list[Tensor]]:
    head = bytearray(_LENGTH.size)
    _fill(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_HEADER_BYTES:
        raise CallError(f"a header of {length} bytes; at most {_MAX_HEADER_BYTES} are read")
    data = bytearray(length)
    _fill(connection, memoryview(data))
    header = _parsed(bytes(data))
    tensors = [_empty(form) for form in header.pop("tensors")]
    for tensor in tensors:
        if tensor.numel():
            _fill(connection, _bytes_of(tensor))
    return header, tensors


def _parsed(data: bytes) -> Header:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        raise CallError("a header that is no JSON") from None
    if not isinstance(header, dict) or not isinstance(header.get("tensors"), list):
        raise CallError("a header without a list of tensors")
    return header


def _empty(form: Any) -> Tensor:
    match form:
        case [str(name), [*shape]] if name in _DTYPES and all(_is_extent(e) for e in shape):
            dtype = _DTYPES[name]
            if math.prod(shape) * dtype.itemsize <= _MAX_TENSOR_BYTES:
                with suppress(RuntimeError, TypeError, OverflowError, MemoryError):
                    return torch.empty(shape, dtype=dtype)
    raise CallError(f"a tensor of the form {shorten(form)}")


def _is_extent(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise CallError(f"tensors of type {name} cannot be sent between pipelines")
    return name


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            raise ConnectionError("the connection was closed")
        buffer = buffer[count:]
