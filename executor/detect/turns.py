"""The turns in which ranks compute and talk, the same list on every rank.

First one rank of each host computes, then more and more of them; then every pair of ranks talks,
alone (of many ranks some of each kind); then one rank of each host computes while it talks; then
flows at the same time, which show what pairs share; then all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

Kind = Literal["compute", "pair", "beside", "together", "all-reduce"]
Flow = tuple[int, int]
"""Source and target, by rank."""
MOST_DENSE = 8
"""Up to so many ranks every size of a group is measured, of more the powers of two."""
MOST_PAIRED = 16
"""Up to so many ranks every pair is measured, of more some of each kind."""
WHOLE_HOSTS = 2
"""Hosts whose pairs are all measured where only some are; of others the first rank's."""


@dataclass(frozen=True)
class Turn:
    """The measurements that run at a time.

    Attributes:
        kind: ``compute``, ``pair`` (a flow, and then its reverse), ``beside`` (the group computes
            with and without the flow and its reverse), ``together`` (all flows at the same time)
            or ``all-reduce``.
        flows: of messages.
        group: ranks that compute, or of an all-reduce.
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
    hosts: Sequence[str],
    *,
    together: bool,
    reductions: bool,
    compute: bool = False,
    all_pairs: bool = True,
    share_cores: bool = True,
) -> tuple[Turn, ...]:
    """Every turn of a measurement.

    Args:
        hosts: of each rank.
        together: whether to measure flows at the same time.
        reductions: whether to measure all-reduces.
        compute: whether to measure computation.
        all_pairs: whether every pair is measured, however many there are.
        share_cores: whether ranks of a host may slow each other, as they do on a CPU.
    """
    count = len(hosts)
    turns = list(compute_turns(hosts, share_cores=share_cores)) if compute else []
    is_every = all_pairs or count <= MOST_PAIRED
    pairs = combinations(range(count), 2) if is_every else pairs_of_each_kind(hosts)
    turns += (Turn("pair", (pair,)) for pair in pairs)
    if compute:
        turns += computation_beside_messages(hosts)
    if together and count > 1:
        turns += flows_together(hosts)
    if reductions:
        turns += [Turn("all-reduce", group=group) for group in groups(hosts)]
    return tuple(turns)


def compute_turns(hosts: Sequence[str], *, share_cores: bool) -> Iterator[Turn]:
    """The first rank of each host alone, then its first two, three, … all at once.

    Of more than eight ranks the powers of two and all.
    """
    for ranks in members_of_hosts(hosts).values():
        for number in _sizes(len(ranks) if share_cores else 1):
            yield Turn("compute", group=tuple(ranks[:number]))


def computation_beside_messages(hosts: Sequence[str]) -> Iterator[Turn]:
    """The first rank of each host computes and exchanges messages with another, if there is one."""
    for host, ranks in members_of_hosts(hosts).items():
        others = [*ranks[1:], *(rank for rank, other in enumerate(hosts) if other != host)]
        if others:
            yield Turn("beside", ((ranks[0], others[0]),), (ranks[0],))


def _sizes(most: int) -> list[int]:
    """Return sizes of groups of so many ranks at most: a few, then powers of two, and all."""
    dense, powers = range(1, most + 1), (2**k for k in range(most.bit_length()))
    return sorted({*dense[:MOST_DENSE], *powers, most})


def pairs_of_each_kind(hosts: Sequence[str]) -> Iterator[Flow]:
    """Some pairs within hosts, and one between any two hosts, each by other ranks.

    All pairs within the first hosts; in others the first rank's.
    """
    members = members_of_hosts(hosts)
    for place, ranks in enumerate(members.values()):
        yield from (
            combinations(ranks, 2)
            if place < WHOLE_HOSTS
            else ((ranks[0], other) for other in ranks[1:])
        )
    for number, (first, second) in enumerate(combinations(members.values(), 2)):
        yield first[number % len(first)], second[number % len(second)]


def members_of_hosts(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each host."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return members


def flows_together(hosts: Sequence[str]) -> Iterator[Turn]:
    """Flows that share a device, a way or the links of a host, if anything is shared.

    Their number grows as that of ranks.
    """
    count = len(hosts)
    members = members_of_hosts(hosts)
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
    found = [tuple(range(size)) for size in _sizes(len(hosts))]
    one_each = tuple({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    found.append(tuple(sorted(one_each)))
    yield from (group for group in dict.fromkeys(found) if len(group) > 1)
