"""The secret of one training, by which its coordinator and ranks know each other.

Each has a key of 32 bytes, from the launcher's environment (``PIPEPLAN_SECRET``) and a challenge
that whoever comes first leaves in the store where all meet: of torchrun's rendezvous, or of the
coordinator. Without the variable the store is the only secret. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import os
import secrets

from torch.distributed import Store  # type: ignore[attr-defined]

from planner.errors import PipeplanError

SECRET_VARIABLE = "PIPEPLAN_SECRET"
MAC_BYTES = 32
_CHALLENGE = "challenge"


def key_of(store: Store) -> bytes:
    """Return the key of the training whose ranks meet in a store.

    Raises:
        PipeplanError: if this process has another secret than who came first.
    """
    fresh = secrets.token_hex(MAC_BYTES)
    told = store.compare_set(_CHALLENGE, "", f"{fresh} {_proof(_key(fresh))}").decode()
    challenge, _, proof = told.partition(" ")
    key = _key(challenge)
    if not hmac.compare_digest(proof, _proof(key)):
        found = "another value" if os.environ.get(SECRET_VARIABLE) else "no value"
        raise PipeplanError(
            f"{SECRET_VARIABLE}: {found} than that of the coordinator; give all processes of a "
            "training the same, or none"
        )
    return key


def mac(key: bytes, *parts: bytes | bytearray) -> bytes:
    """Return the HMAC-SHA256 of parts of known lengths, but for the last one."""
    return hmac.digest(key, b"".join(parts), "sha256")


def sealed(key: bytes, queue: str, data: bytes) -> bytes:
    """Return a message for a queue, which only who has the key can have made."""
    return mac(key, _named(queue), data) + data


def unsealed(key: bytes, queue: str, data: bytes) -> bytes:
    """Return a message from a queue.

    Raises:
        PipeplanError: if it is not of this training, or for another queue.
    """
    seal, message = data[:MAC_BYTES], data[MAC_BYTES:]
    if not hmac.compare_digest(seal, mac(key, _named(queue), message)):
        raise PipeplanError(
            f"a message of {len(data)} bytes that nobody of this training has sent is ignored"
        )
    return message


def _named(queue: str) -> bytes:
    return len(queue).to_bytes(4) + queue.encode()


def _key(challenge: str) -> bytes:
    return mac(os.environ.get(SECRET_VARIABLE, "").encode(), challenge.encode())


def _proof(key: bytes) -> str:
    return mac(key, b"proof").hex()
