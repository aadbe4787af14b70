"""Where ranks and the coordinator meet: a store of torch, and the names of what lies in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from planner.errors import PipeplanError

REQUESTS = "requests"
REPORT = "report"
ABOUT = "about"
ENDED = "ended"
THERE = "there"
"""Lives of the pipelines that take part, by number, in the order in which they came, as JSON."""
COORDINATOR_BEATS = "beats of the coordinator"
BEAT_S = 0.1
"""From one sign of life to the next."""
FENCED = -(2**40)
"""Added to the beats of who is given up: it learns so from its own next one."""
AGAIN = b'{"kind": "again", "number": null}'
"""To whoever waits for an answer: the coordinator that was asked is no more."""
_FOREVER = timedelta(days=30)
"""Blocking calls end by an answer; torch logs a warning for each timeout."""


@dataclass(frozen=True)
class Meeting:
    """A store and the part of it that one training uses.

    Attributes:
        host, port: of the store.
        prefix: of its keys.
    """

    host: str
    port: int
    prefix: str = "pipeplan"

    @classmethod
    def parse(cls, text: str, prefix: str = "pipeplan") -> Meeting:
        """Read ``HOST:PORT``.

        Raises:
            PipeplanError: if it is none.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise PipeplanError(f"coordinator: {text!r} is not HOST:PORT, such as node1:29600")
        return cls(host, int(port), prefix)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def connect(self, timeout_s: float = 10.0) -> Store:
        """A connection; each thread needs one of its own.

        Raises:
            PipeplanError: if nobody listens there.
        """
        try:
            store = TCPStore(
                self.host,
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ConnectionError) as error:
            raise PipeplanError(
                f"coordinator: nobody answers at {self} ({str(error).splitlines()[0]}); start it "
                "first, with python -m executor.coordinator PLAN --listen HOST:PORT"
            ) from None
        store.set_timeout(_FOREVER)
        return PrefixStore(self.prefix, store)


def beats_of(pipeline: int, place: int, nonce: str) -> str:
    """The key at which a rank gives signs of life."""
    return f"beats/{pipeline}.{place}.{nonce}"


def address_of(pipeline: int, place: int, life: int) -> str:
    """The key of where a rank serves tensors."""
    return f"address/{pipeline}.{place}.{life}"
