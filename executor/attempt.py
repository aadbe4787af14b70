"""Keys of their own for each time that a job's ranks are started, in one store.

Torchrun starts all ranks of a job again when one fails, and lets them meet at the same store. What
the ranks before left there would be taken for the others': addresses of processes that are no
more, and the note of the failure. Torchrun's count of restarts is no name for an attempt, as it
differs between hosts. So the ranks agree on one: each leaves a word drawn at random, the first
gathers them, and all say that they have read their own among those gathered.
"""

from __future__ import annotations

import json
import secrets
import time

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executor.failure import absent

_LOOK_S = 0.05


def store_of_attempt(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of a store that the ranks which were started together share.

    Args:
        store: of all attempts.
        rank: this one.
        world_size: number of ranks.
        timeout_s: to wait for the others.

    Raises:
        LostRankError: naming those who did not come.
    """
    mine = secrets.token_hex(8)
    store.set(_word(rank), mine)
    end_s = time.monotonic() + timeout_s
    while True:
        if rank == 0:
            _gather(store, world_size)
        words = json.loads(store.get(_GATHERED)) if store.check([_GATHERED]) else []
        if len(words) == world_size and words[rank] == mine:
            name = "-".join(words)
            store.set(_read(name, rank), "")
            if store.check([_read(name, other) for other in range(world_size)]):
                return PrefixStore(f"attempt {name}", store)
        if time.monotonic() > end_s:
            raise absent(_missing(store, words, world_size), timeout_s)
        time.sleep(_LOOK_S)


_GATHERED = "words"


def _gather(store: Store, world_size: int) -> None:
    keys = [_word(rank) for rank in range(world_size)]
    if store.check(keys):
        store.set(_GATHERED, json.dumps([store.get(key).decode() for key in keys]))


def _missing(store: Store, words: list[str], world_size: int) -> list[int]:
    """Ranks that have left no word; else those that have not read all words."""
    name = "-".join(words)
    wordless = [r for r in range(world_size) if not store.check([_word(r)])]
    return wordless or [r for r in range(world_size) if not store.check([_read(name, r)])]


def _word(rank: int) -> str:
    return f"word of {rank}"


def _read(name: str, rank: int) -> str:
    return f"read {name}/{rank}"
