"""Calls between two ranks of different pipelines that carry tensors, over TCP.

For what one rank may want of another at any time: weights of a donor, a push to a parameter
server, an average with a partner. Frames are a length, a header in JSON, and raw bytes; nothing in
them can run code. Both ends prove first that they have the training's key. Nothing is encrypted:
use a private network.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.coordinator.wire import (
    MAC_BYTES,
    answer_to,
    is_proof,
    new_challenge,
    proof_for,
)
from planner.errors import PipeplanError, shorten

Header = dict[str, Any]
Handler = Callable[[Header, list[Tensor]], tuple[Header, Sequence[Tensor]]]
_LENGTH = struct.Struct("!Q")
_MAX_CALL_HEADER_BYTES = 2**20
_MAX_ANSWER_HEADER_BYTES = 2**24
"""An answer has the names of all tensors of a rank's state."""
_MAX_TENSOR_BYTES = 2**40
_GREETING_S = 5.0
"""So long may a caller take to prove that it has the key."""
_STALLED_S = 60.0
"""So long may a caller that is in a call send or take nothing."""
_IDLE_S = 3600.0
"""So long may a caller make no call."""
_MOST_GREETING = 16
"""Connections that may be about to prove themselves; one more ends the oldest of them."""
_WRONG_KEY = (
    "what listens there does not have this training's key; start all pipelines with one "
    "PIPEPLAN_SECRET"
)
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


@dataclass(frozen=True)
class _Service:
    """A call that is answered, and the most bytes of tensors that it may carry."""

    handler: Handler
    most_bytes: int


class TensorServer:
    """Answers calls of other ranks, each connection on a thread of its own.

    Args:
        host: address to listen on.
        key: of the training; who does not have it is not answered.
        most_callers: connections at once of those who have it.

    Attributes:
        address: ``host:port`` to call.
    """

    def __init__(self, host: str, key: bytes, most_callers: int) -> None:
        self._key = key
        self._most_callers = most_callers
        self._services: dict[str, _Service] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._greeting: dict[socket.socket, None] = {}
        """Connections of callers that have not proved themselves, oldest first."""
        self._callers: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="pipeplan-calls", daemon=True).start()

    def handle(self, name: str, handler: Handler, most_bytes: int = 0) -> None:
        """Answer calls of this name; handlers run on many threads at once.

        Args:
            name: of the call.
            handler: gives the answer.
            most_bytes: of the tensors that a call may carry; larger ones are refused unread.
        """
        self._services[name] = _Service(handler, most_bytes)

    def close(self) -> None:
        """Take no more connections, and end those that there are with their threads."""
        with self._lock:
            self._closed = True
            for connection in (self._listener, *self._greeting, *self._callers):
                _end(connection)
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
                if len(self._greeting) == _MOST_GREETING:
                    oldest = next(iter(self._greeting))
                    del self._greeting[oldest]
                    _end(oldest)
                self._greeting[connection] = None
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # Whoever called is gone, or sent what is no call: that ends its connection alone.
            with connection, suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_GREETING_S)
                if _is_of_training(connection, self._key) and self._admits(connection):
                    self._answer_all(connection)
        finally:
            with self._lock:
                self._greeting.pop(connection, None)
                self._callers.discard(connection)

    def _admits(self, connection: socket.socket) -> bool:
        with self._lock:
            if connection not in self._greeting or len(self._callers) == self._most_callers:
                return False
            del self._greeting[connection]
            self._callers.add(connection)
            return True

    def _answer_all(self, connection: socket.socket) -> None:
        try:
            while True:
                connection.settimeout(_IDLE_S)
                header_bytes = _header_bytes(connection, _MAX_CALL_HEADER_BYTES)
                connection.settimeout(_STALLED_S)
                header, tensors = _receive(connection, header_bytes, self._allowed_bytes)
                _send(connection, *self._answer(header, tensors))
        except CallError as error:
            _send(connection, {"error": str(error)}, ())

    def _allowed_bytes(self, header: Header) -> int:
        service = self._services.get(str(header.get("call")))
        return 0 if service is None else service.most_bytes

    def _answer(self, header: Header, tensors: list[Tensor]) -> tuple[Header, Sequence[Tensor]]:
        service = self._services.get(str(header.get("call")))
        if service is None:
            return {"error": f"no call {shorten(header.get('call'))} here"}, ()
        try:
            return service.handler(header, tensors)
        except PipeplanError as error:
            return {"error": "; ".join(error.problems)}, ()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            return {"error": shorten(f"{type(error).__name__}: {error}", 300)}, ()


class OpenCalls:
    """Connections at which threads wait for a pipeline, to end these waits once it is lost.

    A process that has been stopped takes connections and answers nothing: without this, whoever
    calls it waits for the whole timeout, though the coordinator gave it up long before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._called: dict[socket.socket, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._called)

    @contextmanager
    def to(self, pipeline: int, incarnation: int, connection: socket.socket) -> Iterator[None]:
        """Within this context the connection waits for a pipeline's incarnation."""
        with self._lock:
            self._called[connection] = pipeline, incarnation
        try:
            yield
        finally:
            with self._lock:
                del self._called[connection]

    def end_all_but(self, there: Mapping[int, int]) -> None:
        """Fail the calls to pipelines that are not there any more.

        Args:
            there: incarnations of those that are, by number.
        """
        with self._lock:
            for connection, (pipeline, incarnation) in self._called.items():
                if there.get(pipeline) != incarnation:
                    _end(connection)


class TensorClient:
    """Calls one rank; one call at a time.

    Args:
        address: ``host:port`` of its server.
        key: of the training.
        timeout_s: a call that takes longer has failed.
        during: entered with the connection while its answer is waited for.

    Raises:
        CallError: if nobody answers there who has the key.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        timeout_s: float,
        during: Callable[[socket.socket], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self._during = during
        try:
            self._connection = socket.create_connection((host, int(port)), timeout_s)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            raise CallError(f"could not call {address}: {error}") from None
        try:
            with during(self._connection):
                greet(self._connection, key)
        except (OSError, CallError) as error:
            self.close()
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
            with self._during(self._connection):
                _send(self._connection, {**(header or {}), "call": name}, tensors)
                bytes_ = _header_bytes(self._connection, _MAX_ANSWER_HEADER_BYTES)
                answer, found = _receive(self._connection, bytes_, lambda _: _MAX_TENSOR_BYTES)
        except OSError as error:
            self.close()
            raise CallError(f"{name} at {self.address}: {error}") from None
        if "error" in answer:
            raise RefusedError(f"{name} at {self.address}: {answer['error']}")
        return answer, found

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def greet(connection: socket.socket, key: bytes) -> None:
    """Prove to a server that this process has the training's key, and have it prove the same.

    Raises:
        CallError: if the server does not have it.
        OSError: if it ends the connection, as it does with who does not have it.
    """
    nonce = new_challenge()
    challenge = _piece(connection, MAC_BYTES)
    connection.sendall(answer_to(key, challenge, nonce))
    try:
        proof = _piece(connection, MAC_BYTES)
    except ConnectionError:
        raise CallError(_WRONG_KEY) from None
    if not is_proof(key, challenge, nonce, proof):
        raise CallError(_WRONG_KEY)


def _is_of_training(connection: socket.socket, key: bytes) -> bool:
    """Challenge who called, and return whether it has the key; the server's side of greet()."""
    challenge = new_challenge()
    connection.sendall(challenge)
    proof = proof_for(key, challenge, _piece(connection, 2 * MAC_BYTES))
    if proof is not None:
        connection.sendall(proof)
    return proof is not None


def _piece(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _fill(connection, memoryview(data))
    return bytes(data)


def _end(connection: socket.socket) -> None:
    """Wake the thread that waits at a connection; closing alone would not."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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


def _header_bytes(connection: socket.socket, most: int) -> int:
    """Wait for a frame, and return the length of its header."""
    length: int = _LENGTH.unpack(_piece(connection, _LENGTH.size))[0]
    if length > most:
        raise CallError(f"a header of {length} bytes; at most {most} are read")
    return length


def _receive(
    connection: socket.socket, header_bytes: int, allowed_bytes: Callable[[Header], int]
) -> tuple[Header, list[Tensor]]:
    """Read a frame; nothing is reserved for tensors beyond what its call may carry."""
    data = bytearray(header_bytes)
    _fill(connection, memoryview(data))
    header = _parsed(bytes(data))
    forms = [_form(row) for row in header.pop("tensors")]
    bytes_ = sum(math.prod(shape) * dtype.itemsize for dtype, shape in forms)
    if bytes_ > (most := allowed_bytes(header)):
        raise CallError(f"tensors of {bytes_} bytes; at most {most} are read here")
    tensors = [_empty(dtype, shape) for dtype, shape in forms]
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


def _form(row: Any) -> tuple[torch.dtype, list[int]]:
    match row:
        case [str(name), [*shape]] if name in _DTYPES and all(_is_extent(e) for e in shape):
            return _DTYPES[name], shape
    raise CallError(f"a tensor of the form {shorten(row)}")


def _empty(dtype: torch.dtype, shape: list[int]) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError, OverflowError, MemoryError):
        raise CallError(f"a tensor of the form {shorten([_name(dtype), shape])}") from None


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
