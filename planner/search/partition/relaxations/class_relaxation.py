"""A bound on every plan where many devices can be exchanged, with all links as they are.

As the type relaxation, but only devices that can be exchanged count as alike: a state says how many
devices of each class are used and which of them hold the last stage. So every transfer has its own
links, and a stage's work is spread with regard to what each replica's links carry. Whether a time
can be reached is decided by dynamic programming over the cuts, for every state the least sum of the
next stage's head and tail. One stage a device, any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.cluster.link_table import LinkTable
from planner.search.partition.chain import Chain, FloatArray, IntArray, Partition, StageChoice
from planner.search.partition.dynamic_programs.core import (
    ROUNDING,
    least_limit_s,
    programs,
    stages_within_limit,
)
from planner.search.partition.intervals import MAX_CUTS
from planner.search.partition.relaxations.class_figures import ClassFigures, StageOption
from planner.search.partition.relaxations.tied_stages import (
    Support,
    options_with,
    supports,
)
from planner.search.partition.symmetry import MOST_DEVICES

GROWTH = 1.25
"""By how much a limit that cannot be kept is raised."""
MAX_WORK = 3e8
"""Steps of the program for one limit, beyond which it takes too long."""


Stage = tuple[int, int, int]
"""Cuts at which a stage begins and ends, and the number of its vector."""


@dataclass(frozen=True)
class _Frontier:
    """The states reached at a cut that may still keep the limit.

    Attributes:
        cut: where the next stage begins.
        used: vectors used up to there.
        last: vectors of the stage that ends there.
        spent_s: least head and tail of the next stage, without any transfer; used x last.
    """

    cut: int
    used: IntArray
    last: IntArray
    spent_s: FloatArray


@dataclass(frozen=True)
class _Before:
    """How a stage can be reached at a cut.

    Attributes:
        used: vectors used before it.
        last: of each, the vector of the stage before that is left the earliest.
        arrival_s: head and tail of the stage.
        left_s: those of the stage before, without any transfer.
    """

    used: IntArray
    last: IntArray
    arrival_s: FloatArray
    left_s: FloatArray


class ClassRelaxation:
    """The relaxation of one problem.

    Args:
        chain: the layers.
        links: of the cluster.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self._all_figures = [ClassFigures(chain, links, program) for program in programs(chain)]
        self._figures = self._all_figures[0]
        self._support: Support | None = None

    @property
    def is_tractable(self) -> bool:
        """Whether the program holds for the chain and is small enough to be run.

        Chains in cells are left to other relaxations: a stage inside of a cell is not seen, and its
        devices may join two others better than these are joined themselves.
        """
        chain = self._figures.chain
        if len(chain.problem.cluster.devices) > MOST_DEVICES or chain.length > MAX_CUTS:
            return False
        classes = self._figures.classes
        options = classes.count if chain.problem.job.replication else len(classes.sizes)
        return classes.count**2 * options * chain.length <= MAX_WORK

    def bound_s(
        self,
        low_s: float,
        guess_s: float,
        longest_s: float,
        tolerance: float = 1e-3,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """Return a time that no plan beats.

        Args:
            low_s: no plan is faster than this either.
            guess_s: a limit to try first.
            longest_s: what some plan keeps, or any valid time limit; not more is returned.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step of it.
        """
        bound_s = self._least_limit_s(None, low_s, guess_s, longest_s, tolerance, may_go_on)
        least_s = longest_s
        choices = supports(self._figures)
        for support in choices:
            # Each is of interest only below the others: the least of all holds for every plan.
            limit_s = self._least_limit_s(support, bound_s, guess_s, least_s, tolerance, may_go_on)
            if limit_s < least_s:
                least_s, self._support = limit_s, support
            if least_s <= bound_s:
                break
        return max(bound_s, least_s) if choices else bound_s

    def _least_limit_s(
        self,
        support: Support | None,
        low_s: float,
        guess_s: float,
        longest_s: float,
        tolerance: float,
        may_go_on: Callable[[], bool],
    ) -> float:
        """Return the largest limit found that cannot be kept, at least the lowest.

        Args:
            support: classes of the stage of the last tied layer, if it is known.
            low_s: no plan is faster.
            guess_s: a limit to try first.
            longest_s: limits beyond are of no interest.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step of it.
        """
        high_s = min(max(guess_s, low_s), longest_s)
        spaces = [
            partial(_states, figures, options_with(figures, support))
            for figures in self._all_figures
        ]
        while may_go_on():
            found = least_limit_s(spaces, low_s, high_s, tolerance, may_go_on)
            if found is not None:
                return found[0]
            low_s = max(low_s, high_s)
            if high_s >= longest_s:
                break
            high_s = min(GROWTH * high_s, longest_s)
        return low_s

    def partition(self, limit_s: float) -> Partition | None:
        """Return stages that keep a limit on the relaxed cluster; None if there are none."""
        options = options_with(self._figures, self._support)
        stages = stages_within_limit(_states(self._figures, options, limit_s))
        return None if stages is None else self._placed(stages)

    def _placed(self, stages: Sequence[Stage]) -> Partition:
        classes, cuts = self._figures.classes, self._figures.intervals.cuts
        used = np.zeros(len(classes.sizes), dtype=np.int64)
        chosen = []
        for begin, end, number in stages:
            vector = classes.vectors[number]
            devices = classes.devices(vector, used)
            chosen.append(StageChoice(int(cuts[begin]), int(cuts[end]), devices))
            used = used + vector
        return tuple(chosen)


def _states(figures: ClassFigures, options: Sequence[StageOption], limit_s: float) -> _ClassStates:
    return _ClassStates(figures, options, limit_s * ROUNDING)


class _ClassStates:
    """The states by the vector of devices used and the vector of the last stage.

    Args:
        figures: of what passes between stages.
        options: the stages.
        limit_s: to keep.
    """

    def __init__(
        self, figures: ClassFigures, options: Sequence[StageOption], limit_s: float
    ) -> None:
        self.limit_s = limit_s
        self._figures = figures
        self._options = options
        self._intervals = figures.intervals
        self._head_s, self._rest_s = self._intervals.head_s, self._intervals.rest_s

    def first_table(self) -> FloatArray:
        """Return a table by cut, vector used and last vector in which the start is reached."""
        count = self._figures.classes.count
        table = np.full((self._intervals.count + 1, count, count), np.inf)
        table[0, 0, 0] = 0.0
        return table

    def passes(self) -> Iterator[tuple[int, Sequence[StageOption]]]:
        """Yield every cut with all options."""
        for cut in range(self._intervals.count):
            yield cut, self._options

    def least_s(self, table: FloatArray) -> float:
        """Return the least value of all layers in stages."""
        return float(table[-1].min())

    def frontier(self, table: FloatArray, step: int) -> _Frontier | None:
        """Return the states that leave room for the work after a cut."""
        row = table[step]
        row = np.where(row <= self.limit_s - self._intervals.beyond_s[step], row, np.inf)
        used = np.flatnonzero(np.isfinite(row).any(axis=1))
        last = np.flatnonzero(np.isfinite(row).any(axis=0))
        return _Frontier(step, used, last, row[np.ix_(used, last)]) if len(used) else None

    def _before(self, frontier: _Frontier, option: StageOption) -> _Before:
        block, used, last = frontier.spent_s, frontier.used, frontier.last
        figures = self._figures
        there, back, channel = self._transfers(frontier.cut, option.number, last)
        good = (block + channel <= self.limit_s) & figures.are_apart[last, option.number]
        back = back if figures.program == "through" else np.zeros_like(back)
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
        """Return seconds there and back, and of all microbatches up to the last one's tail."""
        figures, count = self._figures, self._intervals.microbatches
        sent, received = (bytes_[cut] for bytes_ in self._intervals.crossing_bytes)
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

    def extend(self, table: FloatArray, frontier: _Frontier, option: StageOption) -> None:
        """Add a stage to every state that has the devices for it."""
        before, cut = self._before(frontier, option), frontier.cut
        if not len(before.used):
            return
        spare_s = self.limit_s - before.arrival_s.min()
        fits = option.load_s[cut, cut + 1 :] <= spare_s
        fits &= self._head_s[cut] + option.own_s[cut, cut + 1 :] <= self.limit_s
        kept = np.flatnonzero(fits)
        if not len(kept):
            return
        ends = slice(cut + 1, cut + 2 + int(kept[-1]))
        classes = self._figures.classes
        target = classes.numbers(classes.vectors[before.used] + classes.vectors[option.number])
        new = self._after(before, option, cut, ends)
        table[ends, target, option.number] = np.minimum(table[ends, target, option.number], new)

    def _after(self, before: _Before, option: StageOption, cut: int, ends: slice) -> FloatArray:
        """Return the values after a stage, by its end and the state before it."""
        tail = self._head_s[cut] + option.end_s[cut, ends]
        spent = np.maximum(before.arrival_s[:, None], tail)
        keeps = spent + option.load_s[cut, ends] <= self.limit_s
        keeps &= before.left_s[:, None] + option.busy_s[cut, ends] <= self.limit_s
        keeps &= self._head_s[cut] + option.own_s[cut, ends] <= self.limit_s
        return np.where(keeps, spent + option.path_s[cut, ends], np.inf).T

    # --- reconstruction ----------------------------------------------------------------------

    def best(self, table: FloatArray) -> Stage:
        """Return the last cut, the vector used and the last vector of the least value."""
        used, last = divmod(int(table[-1].argmin()), self._figures.classes.count)
        return self._intervals.count, used, last

    def is_start(self, state: Stage) -> bool:
        """Return whether no layer is in a stage."""
        return state[0] == 0

    def passes_to(self, state: Stage) -> Iterator[tuple[int, list[StageOption]]]:
        """Yield the cuts before, with the stage on the last vector."""
        end, _, last = state
        options = [option for option in self._options if option.number == last]
        for cut in range(end):
            yield cut, options

    def last_stage(
        self, table: FloatArray, frontier: _Frontier, option: StageOption, state: Stage
    ) -> tuple[Stage, Stage] | None:
        """Return the stage that begins at the frontier's cut, if it led to the state."""
        end, used, last = state
        before, cut = self._before(frontier, option), frontier.cut
        if not len(before.used):
            return None
        classes = self._figures.classes
        target = classes.numbers(classes.vectors[before.used] + classes.vectors[last])
        new = self._after(before, option, cut, slice(end, end + 1))[0]
        found = np.flatnonzero((target == used) & (new == table[end, used, last]))
        if not len(found):
            return None
        place = int(found[0])
        return (cut, end, last), (cut, int(before.used[place]), int(before.last[place]))
