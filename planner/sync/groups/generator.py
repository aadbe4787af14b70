"""Which groups Ripples' Group Generator draws: at random, all at once, within and across nodes.

Luo et al. 2019, "Heterogeneity-Aware Asynchronous Decentralized Training"; Prague, ASPLOS 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from planner.sync.groups.levels import Levels
from planner.sync.groups.nodes import Nodes, node_by_worker


class RandomGroups:
    """One group at a time, of the initiator and whom it draws.

    Args:
        group_size: of a group; smaller if there are not so many to draw.
        slowdown_filter: the initiator leaves out those so many iterations behind it or more.
        takes_promised: draw those too that have a group already, which is then their next but one;
            Ripples' conflicts. Otherwise only those without are drawn.
        random: draws.
    """

    def __init__(
        self, group_size: int, slowdown_filter: int | None, takes_promised: bool, random: Random
    ) -> None:
        self.takes_promised = takes_promised
        self._others = group_size - 1
        self._slowdown_filter = slowdown_filter
        self._random = random

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> list[list[int]]:
        """The one group."""
        lowest = lowest_level(iteration, self._slowdown_filter)
        return [[initiator, *eligible.sample(self._others, lowest, self._random)]]


class Division:
    """Disjoint groups of all who have none, at once.

    The slowdown filter does more than in Ripples. There, it is the initiator's: a slow one would
    divide all, and so tie others that are as slow to fast ones. Here those that are drawn are first
    parted into bands whose members are fewer iterations apart than the filter's threshold, and each
    band is divided by itself. The initiator, who waits already and keeps nobody waiting, goes into
    any band, so the slow and the fast still meet. If all are about as far there is one band, and
    all is as in Ripples.

    Args:
        group_size: of a group; the last of a band may be smaller. One who is left over alone, and
            is not the initiator, is not drawn.
        slowdown_filter: leaves out those so many iterations or more behind the initiator, and is
            the width of the bands; None: nobody is left out, and there is one band.
        random: draws.
    """

    takes_promised = False

    def __init__(self, group_size: int, slowdown_filter: int | None, random: Random) -> None:
        self._group_size = group_size
        self._slowdown_filter = slowdown_filter
        self._random = random

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> Iterator[Sequence[int]]:
        """The groups of all bands."""
        for band in drawn_bands(
            initiator, iteration, eligible, self._slowdown_filter, self._random
        ):
            for first in range(0, len(band), self._group_size):
                group = band[first : first + self._group_size]
                if len(group) > 1 or group == [initiator]:
                    yield group


class InterIntra:
    """Groups in two phases, of all who have none, at once: Ripples' inter-intra scheduling.

    First one worker of each node are a group across nodes and the rest of each node is a group,
    then all of a node are a group.

    Args:
        nodes: the workers of each.
        slowdown_filter: as of :class:`Division`.
        random: draws.
    """

    takes_promised = False

    def __init__(self, nodes: Nodes, slowdown_filter: int | None, random: Random) -> None:
        self._node = node_by_worker(nodes)
        self._slowdown_filter = slowdown_filter
        self._random = random

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> Iterator[Sequence[int]]:
        """The groups of both phases, of all bands."""
        for band in drawn_bands(
            initiator, iteration, eligible, self._slowdown_filter, self._random
        ):
            if len(band) > 1 or band == [initiator]:
                yield from self._phases(band)

    def _phases(self, band: list[int]) -> list[list[int]]:
        # A band is shuffled, so the first of a node is a random one.
        nodes: dict[int, list[int]] = {}
        for worker in band:
            nodes.setdefault(self._node[worker], []).append(worker)
        heads = [node[0] for node in nodes.values()]
        rests = [node[1:] for node in nodes.values() if len(node) > 1]
        return [heads, *rests, *(node for node in nodes.values() if len(node) > 1)]


def lowest_level(iteration: int, slowdown_filter: int | None) -> int:
    """How far one must be for a worker that asks for ``iteration`` to draw it."""
    return -1 if slowdown_filter is None else iteration - slowdown_filter + 1


def drawn_bands(
    initiator: int,
    iteration: int,
    eligible: Levels,
    slowdown_filter: int | None,
    random: Random,
) -> list[list[int]]:
    """All whom an initiator may draw, by how far they are, each band in random order.

    Args:
        initiator: is put into one of them, likelier into a larger one.
        iteration: that it asks for.
        eligible: those that have no group.
        slowdown_filter: how many iterations apart two of a band are not; None: one band.
        random: draws.
    """
    bands: list[list[int]] = []
    end = 0
    for level, workers in eligible.from_above(lowest_level(iteration, slowdown_filter)):
        if not bands or level < end:
            bands.append([])
            end = -1 if slowdown_filter is None else level - slowdown_filter + 1
        bands[-1] += workers
    if not bands:
        return [[initiator]]
    random.choices(bands, [len(band) for band in bands])[0].append(initiator)
    for band in bands:
        random.shuffle(band)
    return bands
