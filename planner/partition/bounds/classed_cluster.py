"""A bound on every plan where many devices can be exchanged, with all links as they are.

As ``relaxed_cluster``, but only devices that can be exchanged count as alike: a state says how many
devices of each class are used and which of them hold the last stage. So every transfer has its own
links, and a stage's work is spread with regard to what each replica's links carry. Whether a time
can be reached is decided by dynamic programming over the cuts, for every state the least sum of the
next stage's head and of its way back to the end of the iteration. One stage a device, any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from planner.artifacts.link_table import LinkTable
from planner.partition.bisection import narrowed_s
from planner.partition.bounds.classed_figures import ClassedFigures, StageOption
from planner.partition.chain import Chain, FloatArray, IntArray, Partition, StageChoice
from planner.partition.intervals import MAX_CUTS
from planner.partition.symmetry import MOST_DEVICES

ROUNDING = 1 + 1e-9
GROWTH = 1.25
"""By how much a limit that cannot be kept is raised."""
MAX_WORK = 3e8
"""Steps of the program for one limit, beyond which it takes too long."""


@dataclass(frozen=True)
class _Before:
    """How a stage can be reached at a cut.

    Attributes:
        used: vectors used before it.
        last: of each, the vector of the stage before that is left the earliest.
        arrival_s: head and way back of the stage.
        left_s: those of the stage before, without any transfer.
    """

    used: IntArray
    last: IntArray
    arrival_s: FloatArray
    left_s: FloatArray


class ClassedCluster:
    """The relaxation of one problem.

    Args:
        chain: the layers.
        links: of the cluster.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self._figures = ClassedFigures(chain, links)

    @property
    def is_tractable(self) -> bool:
        """Whether the program is small enough to be run."""
        chain = self._figures.chain
        if len(chain.problem.cluster.devices) > MOST_DEVICES:
            return False
        classes = self._figures.classes
        options = classes.count if chain.problem.job.replication else len(classes.sizes)
        return classes.count**2 * options * min(chain.length, MAX_CUTS) <= MAX_WORK

    def bound_s(
        self,
        low_s: float,
        guess_s: float,
        longest_s: float,
        tolerance: float = 1e-3,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """No plan is faster.

        Args:
            low_s: no plan is faster than this either.
            guess_s: a limit to try first.
            longest_s: what some plan keeps, or any valid time limit; not more is returned.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step of it.
        """
        high_s = min(max(guess_s, low_s), longest_s)
        while may_go_on():
            if self._is_reachable(high_s):
                return narrowed_s(self._is_reachable, low_s, high_s, tolerance, may_go_on)[0]
            low_s = max(low_s, high_s)
            if high_s >= longest_s:
                break
            high_s = min(GROWTH * high_s, longest_s)
        return low_s

    def partition(self, limit_s: float) -> Partition | None:
        """Stages that keep a limit on the relaxed cluster; None if there are none."""
        program = _Program(self._figures, limit_s * ROUNDING)
        program.run()
        return program.partition()

    def _is_reachable(self, limit_s: float) -> bool:
        program = _Program(self._figures, limit_s * ROUNDING)
        program.run()
        return program.is_reached


class _Program:
    """The dynamic program for one limit.

    Args:
        figures: of stages and what passes between them.
        limit_s: to keep.
    """

    def __init__(self, figures: ClassedFigures, limit_s: float) -> None:
        self._figures = figures
        self._limit_s = limit_s
        self._table = figures.intervals
        chain, count = figures.chain, figures.classes.count
        self._head_s = self._table.before(chain.least_forward_s)
        self._rest_s = self._table.behind(chain.least_work_s)
        shape = (self._table.count + 1, count, count)
        self._reached = np.full(shape, np.inf)
        """Head and way back by cut, vector used and vector of the last stage."""
        self._came_from = np.zeros(shape, dtype=np.int64)
        """Cut, vector used and vector of the last stage before, as one number."""
        self._reached[0, 0, 0] = 0.0

    @property
    def is_reached(self) -> bool:
        """Whether all layers are in stages."""
        return bool((self._reached[-1] <= self._limit_s).any())

    def run(self) -> None:
        """Extend all states by a stage, cut after cut."""
        for cut in range(self._table.count):
            row = self._reached[cut]
            row = np.where(row <= self._limit_s - self._rest_s[cut], row, np.inf)
            used = np.flatnonzero(np.isfinite(row).any(axis=1))
            last = np.flatnonzero(np.isfinite(row).any(axis=0))
            if len(used):
                block = row[np.ix_(used, last)]
                for option in self._figures.options:
                    self._extend(cut, option, self._before(cut, option, block, used, last))

    def _before(
        self, cut: int, option: StageOption, block: FloatArray, used: IntArray, last: IntArray
    ) -> _Before:
        figures = self._figures
        there, back, channel = self._transfers(cut, option.number, last)
        good = (block + channel <= self._limit_s) & figures.are_apart[last, option.number]
        arrival = np.where(good, block + there + back, np.inf)
        left = np.where(good, block, np.inf)
        vectors, own = figures.classes.vectors, figures.classes.vectors[option.number]
        room = (vectors[used] + own <= figures.classes.sizes).all(axis=1)
        first = arrival.argmin(axis=1)
        room &= np.isfinite(arrival[np.arange(len(used)), first])
        return _Before(
            used[room],
            last[first[room]],
            arrival[room, first[room]],
            left.min(axis=1)[room],
        )

    def _transfers(
        self, cut: int, number: int, last: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """There and back for a microbatch, and all of them until the last one's way back begins."""
        figures, count = self._figures, self._table.microbatches
        sent, received = (bytes_[cut] for bytes_ in self._table.crossing_bytes)
        none = np.zeros(len(last))
        if cut == 0:
            return none, none, none
        there = figures.latency_s[last, number] + sent * figures.s_per_byte[last, number]
        back = figures.latency_s[number, last] + received * figures.s_per_byte[number, last]
        there, back = (there if sent else none), (back if received else none)
        all_there = count * sent * figures.flow_s_per_byte[last, number]
        all_back = count * received * figures.flow_s_per_byte[number, last]
        channel = np.maximum(all_there + back, all_back + there)
        if figures.links.is_exclusive and figures.classes.vectors[number].sum() == 1:
            single = figures.classes.vectors[last].sum(axis=1) == 1
            busy = count * np.maximum(there, back) + np.minimum(there, back)
            channel = np.where(single, np.maximum(channel, busy), channel)
        return there, back, channel + self._rest_s[cut]

    def _extend(self, cut: int, option: StageOption, before: _Before) -> None:
        if not len(before.used):
            return
        spare_s = self._limit_s - before.arrival_s.min()
        kept = np.flatnonzero(option.load_s[cut, cut + 1 :] <= spare_s)
        if not len(kept):
            return
        ends = slice(cut + 1, cut + 2 + int(kept[-1]))
        classes = self._figures.classes
        target = classes.numbers(classes.vectors[before.used] + classes.vectors[option.number])
        home = self._head_s[cut] + option.end_s[cut, ends]
        spent = np.maximum(before.arrival_s[:, None], home)
        keeps = spent + option.load_s[cut, ends] <= self._limit_s
        keeps &= before.left_s[:, None] + option.busy_s[cut, ends] <= self._limit_s
        new = np.where(keeps, spent + option.path_s[cut, ends], np.inf).T
        old = self._reached[ends, target, option.number]
        is_better = new < old
        self._reached[ends, target, option.number] = np.where(is_better, new, old)
        came = (cut * classes.count + before.used) * classes.count + before.last
        was = self._came_from[ends, target, option.number]
        self._came_from[ends, target, option.number] = np.where(is_better, came, was)

    def partition(self) -> Partition | None:
        """The stages with the least head and way back."""
        if not self.is_reached:
            return None
        stages = [*self._stages()][::-1]
        classes, cuts = self._figures.classes, self._table.cuts
        used = np.zeros(len(classes.sizes), dtype=np.int64)
        chosen = []
        for begin, end, number in stages:
            vector = classes.vectors[number]
            devices = classes.devices(vector, used)
            chosen.append(StageChoice(int(cuts[begin]), int(cuts[end]), devices))
            used = used + vector
        return tuple(chosen)

    def _stages(self) -> Iterator[tuple[int, int, int]]:
        """Begin, end and vector of the stages, the last first."""
        count = self._figures.classes.count
        used, last = divmod(int(self._reached[-1].argmin()), count)
        end = self._table.count
        while end > 0:
            came = int(self._came_from[end, used, last])
            begin, came = divmod(came, count * count)
            yield begin, end, last
            end, (used, last) = begin, divmod(came, count)
