"""What two processes of a training say first, and how a message lies on a connection.

Both ends prove that they have the same key before either reads anything else: challenge, answer
and proof are 32 bytes each, HMAC-SHA256. Then come frames: the length as four bytes, and JSON.
Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import PipeplanError

SECRET_VARIABLE = "PIPEPLAN_SECRET"
GREETING = b"pipeplan coordinator 1\n"
"""What a coordinator says first."""
MAC_BYTES = 32
BEAT_S = 0.1
"""Seconds between two heartbeats of a rank."""
MOST_ANSWER_BYTES = 2**28
LENGTH_BYTES = 4


def secret() -> bytes:
    """Return the secret that all processes of a training share; empty if none is set."""
    return os.environ.get(SECRET_VARIABLE, "").encode()


def mac(key: bytes, *parts: bytes | bytearray) -> bytes:
    """Return the HMAC-SHA256 of parts, of which all but the last have a fixed length."""
    return hmac.digest(key, b"".join(parts), "sha256")


def answer_to(key: bytes, challenge: bytes | bytearray, nonce: bytes) -> bytes:
    """Return a caller's answer to a challenge: its nonce, and that it has the key."""
    return nonce + mac(key, b"caller", challenge, nonce)


def proof_for(key: bytes, challenge: bytes, answer: bytes | bytearray) -> bytes | None:
    """Return the listener's proof that it has the key too; None if the caller does not have it."""
    nonce = bytes(answer[:MAC_BYTES])
    if not hmac.compare_digest(answer_to(key, challenge, nonce), bytes(answer)):
        return None
    return mac(key, b"server", challenge, nonce)


def new_challenge() -> bytes:
    """Return 32 random bytes."""
    return secrets.token_bytes(MAC_BYTES)


def is_proof(key: bytes, challenge: bytes | bytearray, nonce: bytes, proof: bytes) -> bool:
    """Return whether a listener has proved that it has the key."""
    return hmac.compare_digest(proof, mac(key, b"server", challenge, nonce))


def frame(body: Mapping[str, Any] | bytes) -> bytes:
    """Return a message as it is sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return len(data).to_bytes(LENGTH_BYTES) + data


def receive(connection: socket.socket, count: int) -> bytes:
    """Read exactly so many bytes.

    Raises:
        ConnectionError: if the connection is closed first.
    """
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)


@dataclass(frozen=True)
class Endpoint:
    """An address at which a process listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str = "coordinator") -> Endpoint:
        """Read ``HOST:PORT``; an IPv6 address may be in brackets.

        Args:
            text: to read.
            field: that the error names.

        Raises:
            PipeplanError: if it is none.
        """
        host, colon, port = text.rpartition(":")
        host = host[1:-1] if host[:1] + host[-1:] == "[]" else host
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise PipeplanError(
                f"{field}: {text!r} is not HOST:PORT, such as node1:29600, with a port from 1 to "
                "65535"
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
