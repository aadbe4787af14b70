"""One turn after another, and what each found, by way of the store that the ranks met at.

Who waits for a turn asks the store once and is told when it comes: nothing is sent meanwhile.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from executor.failure import talking_to

_ENDED = "turns that ended"


class TurnTaking:
    """Turns by their numbers, from 0 on.

    Args:
        store: of these ranks alone.
        rank: this one.
        world_size: number of ranks.
        timeout_s: to wait while no turn ends; a rank may have to wait for those of all others.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)

    def gather(self, said: Any) -> list[Any]:
        """What every rank says of itself, by rank; plain JSON values."""
        self._store.set(f"about/{self._rank}", json.dumps(said))
        return [self._read(f"about/{rank}", f"rank {rank}") for rank in range(self._world_size)]

    def await_turn(self, number: int) -> None:
        """Until the turns before are done."""
        if number:
            self._wait(f"turn/{number}", "the ranks whose turn it is")

    def done(self, number: int, ranks: int, found: Any) -> None:
        """This rank's part is done; the last of the turn's ranks lets the next one begin."""
        self._store.set(f"found/{number}/{self._rank}", json.dumps(found))
        if self._store.add(f"done/{number}", 1) == ranks:
            self._store.add(_ENDED, 1)
            self._store.set(f"turn/{number + 1}", "")

    def found(self, number: int, rank: int) -> Any:
        """What a rank found in a turn, once it has."""
        return self._read(f"found/{number}/{rank}", f"rank {rank}, whose turn it is")

    def _wait(self, key: str, whom: str) -> None:
        with talking_to(whom):
            ended, before = self._store.add(_ENDED, 0), -1
            while ended != before:
                try:
                    return self._store.wait([key], self._timeout)
                except DistStoreError:
                    ended, before = self._store.add(_ENDED, 0), ended
            raise RuntimeError(f"no turn ended within {self._timeout.total_seconds():g} s")

    def _read(self, key: str, whom: str) -> Any:
        self._wait(key, whom)
        return json.loads(self._store.get(key))
