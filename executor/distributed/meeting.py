"""The ranks of a run meet at a store, and tell each other what they run on.

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
from dataclasses import asdict

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executor.distributed.failure import absent
from executor.distributed.machines import Machine

_LOOK_S = 0.05
_GATHERED = "words"


def meet(
    store: Store, rank: int, world_size: int, mine: Machine, timeout_s: float
) -> tuple[Store, list[Machine]]:
    """Wait for all ranks, and return the part of a store that they share, and their machines.

    Args:
        store: of all attempts to start the ranks.
        rank: this one.
        world_size: number of ranks.
        mine: what this rank runs on.
        timeout_s: to wait for the others.

    Raises:
        LostRankError: naming those who did not come.
    """
    word = json.dumps([secrets.token_hex(8), asdict(mine)])
    store.set(_word(rank), word)
    end_s = time.monotonic() + timeout_s
    everybody = range(world_size)
    while True:
        if rank == 0 and store.check([_word(other) for other in everybody]):
            there = [store.get(_word(other)).decode() for other in everybody]
            store.set(_GATHERED, json.dumps(there))
        words = json.loads(store.get(_GATHERED)) if store.check([_GATHERED]) else []
        rows = [json.loads(text) for text in words]
        name = "-".join(drawn for drawn, _ in rows)
        if len(words) == world_size and words[rank] == word:
            store.set(_read(name, rank), "")
            if store.check([_read(name, other) for other in everybody]):
                machines = [Machine(**fields) for _, fields in rows]
                return PrefixStore(f"attempt {name}", store), machines
        if time.monotonic() > end_s:
            wordless = [other for other in everybody if not store.check([_word(other)])]
            unread = [other for other in everybody if not store.check([_read(name, other)])]
            raise absent(wordless or unread, timeout_s)
        time.sleep(_LOOK_S)


def _word(rank: int) -> str:
    return f"word of {rank}"


def _read(name: str, rank: int) -> str:
    return f"read {name}/{rank}"
