"""Ripples' Group Generator: groups drawn at random, all at once, or within and across nodes.

Luo et al. 2019, "Heterogeneity-Aware Asynchronous Decentralized Training"; Prague, ASPLOS 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Protocol

from planner.sync.groups.levels import Levels, Nodes

Split = Callable[[list[int], int], Iterable[Sequence[int]]]
"""Divides workers, in random order, into groups; its second argument is the initiator."""


class Drawer(Protocol):
    """Draws groups when a worker needs one.

    Attributes:
        takes_promised: whether it draws workers that already have a group; the new group then
            queues behind that one (Ripples' conflicts).
    """

    takes_promised: bool

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> Iterable[Sequence[int]]:
        """Return groups in their order; the initiator is in one or more of them.

        Args:
            initiator: the worker that asked and has no group.
            iteration: its requested iteration.
            eligible: other workers that may be drawn, by their last requested iteration.
        """


class RandomGroups:
    """Draws one group at a time, of the initiator and random others.

    Args:
        group_size: size of a group; smaller if there are not enough workers to draw.
        slowdown_filter: the initiator leaves out workers this many iterations behind it or more.
        takes_promised: as in :class:`Drawer`.
        random: random number generator.
    """

    def __init__(
        self, group_size: int, slowdown_filter: int | None, takes_promised: bool, random: Random
    ) -> None:
        self.takes_promised = takes_promised
        self._others, self._random = group_size - 1, random
        self._slowdown_filter = slowdown_filter

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> list[list[int]]:
        """Return the one group."""
        lowest = _lowest_level(iteration, self._slowdown_filter)
        return [[initiator, *eligible.sample(self._others, lowest, self._random)]]


class Division:
    """Divides all workers without a group at once.

    In Ripples the slowdown filter is the initiator's alone: a slow initiator divides all workers
    and so ties other slow ones to fast ones. Unless there is to be one band, the drawn workers are
    split into bands first whose members are fewer iterations apart than the threshold, and each
    band is divided separately. The initiator, who waits already and delays nobody, goes into any
    band, so slow and fast workers still meet. If all have about the same progress there is one band
    anyhow. A band of one worker that is not the initiator is left out.

    Args:
        split: divides a band.
        slowdown_filter: leaves out workers this many iterations or more behind the initiator, and
            is the width of the bands; None: nobody is left out, and there is one band.
        one_band: whether only the initiator filters, as in Ripples.
        random: random number generator.
    """

    takes_promised = False

    def __init__(
        self, split: Split, slowdown_filter: int | None, one_band: bool, random: Random
    ) -> None:
        self._split, self._random = split, random
        self._behind = slowdown_filter
        self._width = None if one_band else slowdown_filter

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> Iterator[Sequence[int]]:
        """Return the groups of all bands."""
        bands = self._bands(iteration, eligible)
        if bands:
            self._random.choices(bands, [len(band) for band in bands])[0].append(initiator)
        for band in bands:
            self._random.shuffle(band)
        for band in bands or [[initiator]]:
            if len(band) > 1 or band == [initiator]:
                yield from self._split(band, initiator)

    def _bands(self, iteration: int, eligible: Levels) -> list[list[int]]:
        """Return all workers that may be drawn, by progress."""
        bands: list[list[int]] = []
        end = 0
        for level, workers in eligible.from_above(_lowest_level(iteration, self._behind)):
            if not bands or level < end:
                bands.append([])
                end = -1 if self._width is None else level - self._width + 1
            bands[-1] += workers
        return bands


def equal_groups(group_size: int) -> Split:
    """Return what makes groups of a size; the last of a band may be smaller.

    A single worker that is left over, and is not the initiator, is not drawn.
    """

    def split(band: list[int], initiator: int) -> Iterator[list[int]]:
        for first in range(0, len(band), group_size):
            group = band[first : first + group_size]
            if len(group) > 1 or group == [initiator]:
                yield group

    return split


def inter_intra(nodes: Nodes) -> Split:
    """Return Ripples' inter-intra scheduling, in two phases.

    First one worker of each node form a group across nodes and the rest of each node forms a group;
    then all of a node form a group.
    """
    node_of = {worker: number for number, node in enumerate(nodes) for worker in node}

    def split(band: list[int], initiator: int) -> list[list[int]]:
        # A band is shuffled, so the first of a node is a random one.
        found: dict[int, list[int]] = {}
        for worker in band:
            found.setdefault(node_of[worker], []).append(worker)
        large = [node for node in found.values() if len(node) > 1]
        return [[node[0] for node in found.values()], *(node[1:] for node in large), *large]

    return split


def _lowest_level(iteration: int, slowdown_filter: int | None) -> int:
    """Return the least progress of a worker that can be drawn by one asking for ``iteration``."""
    return -1 if slowdown_filter is None else iteration - slowdown_filter + 1
