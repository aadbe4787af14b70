"""Which generation of a process group all its members use.

A rank keeps the process groups of the last sets of members it was in. Whoever meets a set again
has to know whether all others have kept theirs too: the coordinator, which tells every rank its
groups in order, works out what each has kept.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

KEPT = 32
"""Process groups that a rank keeps: each has connections to all its members, and a thread."""
Lives = tuple[tuple[int, int], ...]


class Generations:
    """Counts up for a set of members when one of them has dropped its process group."""

    def __init__(self) -> None:
        self._generation: dict[tuple[int, Lives], int] = defaultdict(int)
        self._kept: dict[tuple[int, int], OrderedDict[Lives, None]] = defaultdict(OrderedDict)

    def of(self, place: int, members: Lives) -> int:
        """The generation to use now by all of them.

        Args:
            place: of the pipelines.
            members: pipelines with their lives.
        """
        if len(members) < 2:
            return 0
        for number, _ in members:
            for dropped in keep(self._kept[number, place], members):
                self._generation[place, dropped] += 1
        return self._generation[place, members]

    def raise_(self, place: int, members: Lives) -> None:
        """A reduction of theirs failed: all make a new process group the next time."""
        self._generation[place, members] += 1


def keep(kept: OrderedDict[Lives, None], members: Lives) -> list[Lives]:
    """Note that a set is used; returns those that are dropped for it, the least recently used."""
    kept[members] = None
    kept.move_to_end(members)
    return [kept.popitem(last=False)[0] for _ in range(max(0, len(kept) - KEPT))]
