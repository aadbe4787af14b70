"""Devices that can be exchanged form classes; a stage's devices are a number of each class."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from planner.artifacts.cluster import Cluster
from planner.artifacts.link_table import FloatArray, IntArray
from planner.partition.symmetry import interchangeable_devices

Vector = tuple[int, ...]
"""A number of devices of each class."""


class DeviceClasses:
    """The classes of one cluster.

    Args:
        cluster: the devices.

    Attributes:
        members: device names of each class.
        sizes: their numbers.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        groups = interchangeable_devices(cluster)
        held = {device for group in groups for device in group}
        alone = [[device] for device in cluster.device_names if device not in held]
        self.members = [*groups, *alone]
        self.sizes = np.array([len(group) for group in self.members])

    @property
    def count(self) -> int:
        """How many vectors there are."""
        return prod(int(size) + 1 for size in self.sizes)

    @cached_property
    def vectors(self) -> IntArray:
        """All vectors, a row each, ascending; the first is empty."""
        return np.array(list(product(*(range(size + 1) for size in self.sizes))))

    @cached_property
    def _strides(self) -> IntArray:
        sizes = [int(size) + 1 for size in self.sizes]
        return np.array([prod(sizes[k + 1 :]) for k in range(len(sizes))])

    def numbers(self, vectors: IntArray) -> IntArray:
        """Which rows of ``vectors`` these are."""
        return np.asarray(vectors @ self._strides)

    def devices(self, vector: Iterable[int], used: Iterable[int] | None = None) -> tuple[str, ...]:
        """So many devices of each class, in the cluster's order; the first that are not used.

        Args:
            vector: numbers by class.
            used: numbers that others have, by class; none if not given.
        """
        before = used if used is not None else [0] * len(self.sizes)
        chosen = [
            name
            for group, start, count in zip(self.members, before, vector, strict=True)
            for name in group[start : start + count]
        ]
        return tuple(sorted(chosen, key=self._cluster.numbers.__getitem__))

    def pair_figures(self, table: FloatArray) -> FloatArray:
        """The least entry of a matrix over devices, by the vectors at both ends.

        Args:
            table: infinite or 0 from a device to itself.

        Returns:
            A row for each vector that sends, a column for each that receives; infinite for empty
            ones.
        """
        table = np.where(np.eye(len(table), dtype=bool), np.inf, table)
        numbers = [[self._cluster.numbers[name] for name in group] for group in self.members]
        held = self.vectors > 0
        least = np.full((self.count, self.count), np.inf)
        for a, senders in enumerate(numbers):
            for b, receivers in enumerate(numbers):
                entry = table[np.ix_(senders, receivers)].min()
                ends = held[:, a][:, None] & held[:, b][None, :]
                np.minimum(least, entry, out=least, where=ends)
        return least
