"""The largest time that no sequence of stages keeps, on classes of devices that count as alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np

from planner.bounds.class_pass import NUMBERS, refutes
from planner.bounds.class_tables import ClassArrays, ClassTables
from planner.bounds.devices import DeviceVectors
from planner.bounds.intervals import IntervalTable, TiedPair
from planner.bounds.layers import FAR, BoolArray, FloatArray, IntArray
from planner.bounds.links import ClassLinks
from planner.bounds.named import Stages, named_stages
from planner.errors import PipeplanError
from planner.plan.certificate import LikeDevices

MARGIN = 1 + 2e-9
"""A time is refuted only if one that is longer by this factor is: rounding refutes nothing."""
Classes = tuple[tuple[str, ...], ...]
"""All devices, in classes of one type each."""
MOST_CASES = 7
"""The most sets of classes; with more, nothing is known of the devices of the other tied stage."""
MOST_WORK = 6e7
"""Stages of all states, times classes, that are looked at for one time."""


@dataclass
class _Case:
    """Plans that are looked at together, and the times that are known of them.

    Attributes:
        fits: (O, N + 1, N + 1) whether a stage may lie there.
        joint_s: (O, N + 1, N + 1) all-reduces together with other stages.
        refuted_s, kept_s: the largest time that a pass refutes, and the least that it does not, by
            whether the pass counts both ways.
    """

    fits: BoolArray
    joint_s: FloatArray
    refuted_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    kept_s: dict[bool, float] = field(default_factory=lambda: {True: np.inf, False: np.inf})


class ClassProgram:
    """Whether no sequence of stages keeps a time, for one set of classes.

    Args:
        intervals: of the problem's layers.
        classes: all devices, in classes of one type each.

    Attributes:
        vectors: of devices by class.
        looked_at: stages that all passes have looked at so far.
        likely: partitions that a pass could not rule out, with the least time at which.

    Raises:
        PipeplanError: if there are too many combinations of devices.
    """

    def __init__(self, intervals: IntervalTable, classes: Classes) -> None:
        layers = intervals.layers
        self._intervals, self._replication = intervals, layers.space.replication
        sizes = [len(row) for row in classes]
        self.vectors = vectors = DeviceVectors(sizes, replication=self._replication)
        work = len(vectors.used) * intervals.cuts / 2 * len(classes) + len(vectors.way_before)
        if work * intervals.cuts > MOST_WORK:
            raise PipeplanError(
                f"bounds: {len(vectors.used)} stages by devices at each of {intervals.cuts} cuts "
                "are too many"
            )
        kinds = [layers.types.index(layers.cluster.type_of(row[0])) for row in classes]
        self._links = ClassLinks(layers.cluster, classes)
        self._tables = ClassTables(intervals, self._links, vectors, kinds)
        self._classes = classes
        self.looked_at = 0.0
        self.likely: dict[Stages, float] = {}

    @cached_property
    def arrays(self) -> ClassArrays:
        """Figures of all stages."""
        return self._tables.arrays()

    @cached_property
    def _all(self) -> _Case:
        return _Case(self.arrays.fits, self.arrays.joint_s)

    @cached_property
    def columns(self) -> int:
        """How many of NUMBERS count."""
        most = min(int(self.arrays.held.sum(axis=1).max()), self.arrays.microbatches)
        return int(np.searchsorted(NUMBERS, most, side="right"))

    def refute(self, time_s: float) -> LikeDevices | None:
        """Return the classes if no plan keeps a time, in all cases that plans may be in."""
        if not self._refutes(self._all, time_s):
            likeliest = sorted(self._cases, key=lambda case: max(case.kept_s.values()))
            if not likeliest or not all(self._refutes(case, time_s) for case in likeliest):
                return None
        return LikeDevices(classes=self._classes)

    def _refutes(self, case: _Case, time_s: float) -> bool:
        counted = (True, False) if self._intervals.layers.space.splits else (True,)
        # What has refuted most so far is likeliest to refute this.
        for both_ways in sorted(counted, key=lambda way: -case.refuted_s[way]):
            if case.refuted_s[both_ways] < time_s < case.kept_s[both_ways]:
                limit_s = time_s * MARGIN
                path, looked = refutes(
                    self.arrays, case.fits, case.joint_s, self.columns, limit_s, both_ways
                )
                (case.kept_s if len(path) else case.refuted_s)[both_ways] = time_s
                self.looked_at += looked
                if len(path):
                    stages = self.stages(path)
                    self.likely[stages] = min(time_s, self.likely.get(stages, np.inf))
            if time_s <= case.refuted_s[both_ways]:
                return True
        return False

    def stages(self, path: IntArray) -> Stages:
        """Return the stages of a sequence with devices.

        Args:
            path: (S, 2) of each stage, its pair and the layer behind it.
        """
        held = self.arrays.held[self.arrays.option[path[:, 0]]]
        return named_stages(self._intervals.layers.cluster, self._classes, path[:, 1], held)

    # --- parameters that two stages hold ----------------------------------------------------------

    @cached_property
    def _cases(self) -> list[_Case]:
        """Cases of which every plan is in one, by the devices of the later of two tied stages.

        A parameter of two stages is reduced over the devices of both. In each case the later stage
        lies on all of some classes and no others, with a number of devices from a range, and the
        earlier one takes part in a reduction over its own devices and at least as many of those.
        """
        pair = self._intervals.tied_pair
        later = list(self._later_stages()) if pair is not None else []
        if pair is None or len(later) < 2:
            return []
        shared = self._intervals.parameters.shared
        alone = np.where(pair.first_alone | pair.last_alone, pair.bytes, 0.0)
        others = self._tables.joint_reduce_s(shared - alone)
        return [self._case(pair, others, *devices) for devices in later]

    def _later_stages(self) -> Iterator[tuple[BoolArray, int, int]]:
        """Yield sets of classes and the least and the most devices that the later stage has."""
        classes = range(len(self._links.sizes))
        sets = [c for n in classes for c in combinations(classes, n + 1)]
        replicas = self._links.counts_by_width() if self._replication else [(1, 1)]
        if len(sets) * len(replicas) > MOST_CASES:
            replicas = [(1, int(self._links.sizes.sum()))]
        for chosen in sets if len(sets) <= MOST_CASES else ():
            for least, most in replicas:
                yield np.isin(classes, chosen), least, most

    def _case(
        self, pair: TiedPair, others: FloatArray, classes: BoolArray, least: int, most: int
    ) -> _Case:
        arrays, number = self.arrays, self.arrays.held.sum(axis=1)
        lies = ((arrays.held > 0) == classes).all(axis=1) & (least <= number) & (number <= most)
        both = np.array([self._both_s(row, classes, least, pair.bytes) for row in arrays.held])
        fits = arrays.fits & (lies[:, None, None] | ~pair.last_alone)
        fits &= (both < FAR)[:, None, None] | ~pair.first_alone
        joint_s = np.where(pair.first_alone, others + both[:, None, None], arrays.joint_s)
        return _Case(fits, joint_s)

    def _both_s(self, held: IntArray, classes: BoolArray, least: int, bytes_: float) -> float:
        """Return the least all-reduce over a stage's devices and those of the later one."""
        left = self._links.sizes - held
        least = max(int(classes.sum()), least)
        if (left[classes] == 0).any() or left[classes].sum() < least:
            return FAR
        # Of a class with two devices left both may be each other's neighbours.
        spread = held + np.where(classes, np.minimum(left, max(least, 2)), 0)
        count = int(held.sum()) + least
        return float(self._links.least_reduce_s(spread > 0, count, np.array(bytes_), spread))
