"""Which faults on purpose have happened: the store that all meet at says, as who died cannot."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.faults import Fault
from executor.pipelines.seat import Seat


def note_fault(store: Store, fault: Fault) -> None:
    """Say that one happens now."""
    store.set(_key(fault), "1")


def missed_faults(store: Store, faults: Iterable[Fault], seat: Seat) -> list[Fault]:
    """Those that never happened, of all that this process is to tell of.

    Args:
        store: that all meet at.
        faults: of all pipelines.
        seat: of this process.
    """
    mine = None if seat.hosts_coordinator else seat.pipeline
    return [
        fault
        for fault in faults
        if mine in (None, fault.pipeline) and not store.check([_key(fault)])
    ]


def _key(fault: Fault) -> str:
    return f"fault {fault.word}"
