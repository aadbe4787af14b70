"""The torch store at which ranks and the coordinator meet, and its keys."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from planner.errors import PipeplanError

REQUESTS = "requests"
REPORT = "report"
STRANDED = "stranded"
"""Key of the report, once work is left and no pipeline has the weights."""
DONE = "done"
"""The number of work units."""
ABOUT = "about"
ENDED = "ended"
THERE = "there"
"""Incarnations of the pipelines that take part, by number, in the order they came; as JSON."""
COORDINATOR_BEATS = "beats of the coordinator"
BEAT_S = 0.1
"""Seconds between two signs of life."""
FENCED = -(2**40)
"""Added to the beats of who is given up: it learns so from its own next one."""
AGAIN = b'{"kind": "again", "number": null}'
"""Sent to whoever waits for an answer from a coordinator that has ended."""
_FOREVER = timedelta(days=30)
"""Blocking calls end by an answer; torch logs a warning for each timeout."""
_TRY_AGAIN_S = 0.2
_LEAST_GREETING_S = 2.0
"""For the store's own greeting, however late somebody has listened at last."""
_GREETING_S = 3.0
"""Then on a new connection: of many ranks that greet at once, one may stay without an answer."""
_listened: set[tuple[str, int]] = set()
"""Addresses where somebody listened: torch's store looks up who connects, so each is tried once."""


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
    def parse(cls, text: str, prefix: str = "pipeplan", *, field: str = "coordinator") -> Meeting:
        """Read ``HOST:PORT``; an IPv6 address may be in brackets.

        Args:
            text: to read.
            prefix: of the keys.
            field: that a refusal names.

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
        return cls(host, int(port), prefix)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, timeout_s: float = 10.0) -> Store:
        """A connection; each thread needs one of its own.

        Args:
            timeout_s: for somebody to listen there, who may be about to start, and to answer.

        Raises:
            PipeplanError: if nobody does.
        """
        until_s = time.monotonic() + timeout_s
        self._await_listener(until_s)
        until_s = max(until_s, time.monotonic() + _LEAST_GREETING_S)
        while (store := self._greeted(until_s)) is None:
            if time.monotonic() >= until_s:
                raise self._silent(f"no answer for {timeout_s:.0f} s")
        store.set_timeout(_FOREVER)
        return PrefixStore(self.prefix, store)

    def _await_listener(self, until_s: float) -> None:
        """Torch's store would wait as well, and log its C++ frames for each time it fails."""
        while (self.host, self.port) not in _listened:
            try:
                left_s = max(_TRY_AGAIN_S, until_s - time.monotonic())
                socket.create_connection((self.host, self.port), left_s).close()
            except OSError as error:
                if time.monotonic() + _TRY_AGAIN_S > until_s:
                    raise PipeplanError(
                        f"coordinator: nobody answers at {self} ({error.strerror or error}); start "
                        "it first, with python -m executor.coordinator PLAN --listen HOST:PORT"
                    ) from None
                time.sleep(_TRY_AGAIN_S)
            else:
                _listened.add((self.host, self.port))

    def _greeted(self, until_s: float) -> TCPStore | None:
        """Connect on a thread: torch waits for ever where who listens says nothing."""
        found: list[TCPStore | str] = []
        left_s = max(_TRY_AGAIN_S, until_s - time.monotonic())

        def greet() -> None:
            try:
                store = TCPStore(
                    self.host,
                    self.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=left_s),
                )
            except (RuntimeError, ConnectionError) as error:
                found.append(str(error).splitlines()[0])
            else:
                found.append(store)

        thread = threading.Thread(target=greet, name="pipeplan-greeting", daemon=True)
        thread.start()
        thread.join(min(_GREETING_S, left_s))
        store = found[0] if found else None
        if isinstance(store, str):
            raise self._silent(store)
        return store

    def _silent(self, why: str) -> PipeplanError:
        _listened.discard((self.host, self.port))
        return PipeplanError(
            f"coordinator: what listens at {self} does not answer as a coordinator ({why}); give "
            "the HOST:PORT that python -m executor.coordinator has as --listen, and a port that is "
            "no other program's"
        )


def incarnations_there(store: Store) -> dict[int, int]:
    """Return the incarnations of the pipelines that take part now, in the order they came."""
    found = json.loads(store.get(THERE))
    return {int(number): incarnation for number, incarnation in found.items()}


def beats_of(pipeline: int, place: int, incarnation_id: str) -> str:
    """The key at which a rank gives signs of life."""
    return f"beats/{pipeline}.{place}.{incarnation_id}"


def address_of(pipeline: int, place: int, incarnation: int) -> str:
    """The key of where a rank serves tensors."""
    return f"address/{pipeline}.{place}.{incarnation}"


def store_is_gone(where: str) -> str:
    """Return the message for users of a store that is gone."""
    return (
        f"coordinator: the store at {where} is gone: the process that holds it, python -m "
        "executor.coordinator or torchrun, has ended; start it again, and all pipelines with "
        "--resume FOLDER of the last checkpoint"
    )
