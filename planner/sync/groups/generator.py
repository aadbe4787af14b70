"""Ripples' Group Generator: groups drawn at random, all at once, or within and across nodes.

Luo et al. 2019, "Heterogeneity-Aware Asynchronous Decentralized Training"; Prague, ASPLOS 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from planner.sync.groups.levels import Levels, Nodes, node_by_worker


@dataclass(frozen=True)
class SlowdownFilter:
    """Who is left out of a division, and who is kept apart in it.

    In Ripples the filter is the initiator's alone: a slow initiator divides all workers and so ties
    other slow ones to fast ones. Unless there is to be one band, the drawn workers are split into
    bands first whose members are fewer iterations apart than the threshold, and each band is
    divided separately. The initiator, who waits already and delays nobody, goes into any band, so
    slow and fast workers still meet. If all have about the same progress there is one band anyhow.

    Attributes:
        behind: leaves out workers this many iterations or more behind the initiator, and is the
            width of the bands; None: nobody is left out, and there is one band.
        one_band: whether only the initiator filters, as in Ripples.
    """

    behind: int | None
    one_band: bool = False


class RandomGroups:
    """Draws one group at a time, of the initiator and random others.

    Args:
        group_size: size of a group; smaller if there are not enough workers to draw.
        slowdown_filter: the initiator leaves out workers this many iterations behind it or more.
        takes_promised: whether to draw workers that already have a group and then queue (Ripples'
            conflicts).
        random: random number generator.
    """

    def __init__(
        self, group_size: int, slowdown_filter: int | None, takes_promised: bool, random: Random
    ) -> None:
        self.takes_promised = takes_promised
        self._others = group_size - 1
        self._slowdown_filter = slowdown_filter
        self._random = random

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> list[list[int]]:
        """Return the one group."""
        lowest = lowest_level(iteration, self._slowdown_filter)
        return [[initiator, *eligible.sample(self._others, lowest, self._random)]]


class GroupDivision:
    """Divides all workers without a group into disjoint groups at once.

    Args:
        group_size: size of a group; the last of a band may be smaller. A single worker that is left
            over, and is not the initiator, is not drawn.
        slowdown_filter: who is left out, and kept apart.
        random: random number generator.
    """

    takes_promised = False

    def __init__(self, group_size: int, slowdown_filter: SlowdownFilter, random: Random) -> None:
        self._group_size = group_size
        self._slowdown_filter = slowdown_filter
        self._random = random

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> Iterator[Sequence[int]]:
        """Return the groups of all bands."""
        for band in drawn_bands(
            initiator, iteration, eligible, self._slowdown_filter, self._random
        ):
            for first in range(0, len(band), self._group_size):
                group = band[first : first + self._group_size]
                if len(group) > 1 or group == [initiator]:
                    yield group


class InterIntra:
    """Divides all workers without a group in two phases: Ripples' inter-intra scheduling.

    First one worker of each node form a group across nodes and the rest of each node forms a group;
    then all of a node form a group.

    Args:
        nodes: the workers of each node.
        slowdown_filter: as in :class:`GroupDivision`.
        random: random number generator.
    """

    takes_promised = False

    def __init__(self, nodes: Nodes, slowdown_filter: SlowdownFilter, random: Random) -> None:
        self._node = node_by_worker(nodes)
        self._slowdown_filter = slowdown_filter
        self._random = random

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> Iterator[Sequence[int]]:
        """Return the groups of both phases, of all bands."""
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
    """Return the least progress of a worker that can be drawn by one asking for ``iteration``."""
    return -1 if slowdown_filter is None else iteration - slowdown_filter + 1


def drawn_bands(
    initiator: int,
    iteration: int,
    eligible: Levels,
    slowdown_filter: SlowdownFilter,
    random: Random,
) -> list[list[int]]:
    """Return all workers that an initiator may draw, by progress, each band in random order.

    Args:
        initiator: the worker that asked; it is put into one band, more likely a larger one.
        iteration: its requested iteration.
        eligible: workers without a group.
        slowdown_filter: two workers of a band are fewer iterations apart.
        random: random number generator.
    """
    bands: list[list[int]] = []
    end = 0
    width = None if slowdown_filter.one_band else slowdown_filter.behind
    for level, workers in eligible.from_above(lowest_level(iteration, slowdown_filter.behind)):
        if not bands or level < end:
            bands.append([])
            end = -1 if width is None else level - width + 1
        bands[-1] += workers
    if not bands:
        return [[initiator]]
    random.choices(bands, [len(band) for band in bands])[0].append(initiator)
    for band in bands:
        random.shuffle(band)
    return bands
