"""The turns in which ranks talk, the same list on every rank.

First every pair, alone; then flows at the same time, which show what pairs share; then all-reduces.

One turn after another, and what each found, by way of the store that the ranks met at.

Who waits for a turn asks the store once and is told when it comes: nothing is sent meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any, Literal

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from executor.distributed.failure import talking_to

Kind = Literal["pair", "together", "all-reduce"]
Flow = tuple[int, int]
"""Source and target, by rank."""
MOST_DENSE = 8
"""Up to so many ranks every size of a group is measured, of more the powers of two."""


@dataclass(frozen=True)
class Turn:
    """The measurements that run at a time.

    Attributes:
        kind: ``pair`` (each of the flows and its reverse, one after the other; those of different
            pairs at the same time), ``together`` (all flows at the same time) or ``all-reduce``.
        flows: of messages.
        group: ranks of an all-reduce.
        shows: what it is to show.
    """

    kind: Kind
    flows: tuple[Flow, ...] = ()
    group: tuple[int, ...] = ()
    shows: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, sorted."""
        return tuple(sorted({*self.group, *(rank for flow in self.flows for rank in flow)}))


def all_turns(
    hosts: Sequence[str], *, at_once: bool, together: bool, reductions: bool
) -> tuple[Turn, ...]:
    """Every turn of a measurement.

    Args:
        hosts: of each rank.
        at_once: whether pairs that share no rank are measured at the same time.
        together: whether to measure flows at the same time.
        reductions: whether to measure all-reduces.
    """
    count = len(hosts)
    turns = list(rounds(count) if at_once else pairs_alone(count))
    if together:
        turns += flows_together(hosts)
    if reductions:
        turns += [Turn("all-reduce", group=group) for group in groups(hosts)]
    return tuple(turns)


def pairs_alone(count: int) -> Iterator[Turn]:
    """Every pair in a turn of its own."""
    for first, second in combinations(range(count), 2):
        yield Turn("pair", ((first, second),))


def rounds(count: int) -> Iterator[Turn]:
    """A round-robin tournament: every pair once, each rank in one pair a round at most.

    The circle method (Kirkman 1847): one rank stays, the others move on by a place a round.
    """
    seats = list(range(count)) + ([-1] if count % 2 else [])
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        matches = zip(seats[:half], reversed(seats[half:]), strict=True)
        flows = tuple(sorted((min(pair), max(pair)) for pair in matches if -1 not in pair))
        yield Turn("pair", flows)
        seats = [seats[0], seats[-1], *seats[1:-1]]


def flows_together(hosts: Sequence[str]) -> Iterator[Turn]:
    """Flows that share a device, a way or the links of a host, if anything is shared.

    Their number grows as that of ranks.
    """
    count = len(hosts)
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    for rank in range(count if count > 2 else 1):
        other = (rank + 1) % count
        yield Turn("together", ((rank, other), (other, rank)), shows="both ways")
    for rank, host in enumerate(hosts):
        near = [other for other in members[host] if other != rank]
        far = [other for other in range(count) if hosts[other] != host]
        for others, where in ((near, "in its host"), (far, "in other hosts")):
            if len(others) > 1:
                flows = ((rank, others[0]), (rank, others[-1]))
                yield Turn("together", flows, shows=f"one to two {where}")
    yield from _disjoint(members)


def _disjoint(members: dict[str, list[int]]) -> Iterator[Turn]:
    """Pairs that share no device: inside a host, and from each host to the next."""
    for inside in members.values():
        if len(inside) > 3:
            flows = tuple(zip(inside[::2], inside[1::2], strict=False))
            yield Turn("together", flows, shows="pairs of a host")
    names = list(members)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        flows = tuple(zip(members[name], members[following], strict=False))
        if name != following and len(flows) > 1:
            yield Turn("together", flows, shows="from host to host")


def groups(hosts: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Ranks of the all-reduces that plans may need: the replicas of a stage.

    The first ranks by number, for every size up to 8 and then powers of two; one rank a host;
    all.
    """
    count = len(hosts)
    sizes = {size for size in range(2, count + 1) if size <= MOST_DENSE or not size & (size - 1)}
    found = [tuple(range(size)) for size in sorted({*sizes, count})]
    one_each = tuple({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    found.append(tuple(sorted(one_each)))
    yield from (group for group in dict.fromkeys(found) if len(group) > 1)


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
        """Return each rank's facts about itself, by rank; plain JSON values."""
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
        """Return a rank's results of a turn, once it has them."""
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
