"""The walk over whole plans: starts, then walks from the best of them, on one or two threads.

Time is wall-clock time or the number of tasks replayed, by which plans are the same anywhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np

from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.plan.problem import Problem
from planner.program.layout import Layout
from planner.search.clock import TASKS_PER_S, Part
from planner.search.walk.freedoms import freedoms_of
from planner.search.walk.judge import NEAR
from planner.search.walk.starts import Needs, Start, needs_of, singles, starts
from planner.search.walk.walker import Candidate, Walker

LOG = logging.getLogger(__name__)


class Phase(NamedTuple):
    """Walks from the best layouts so far.

    Attributes:
        until: share of all time at its end.
        walks: number of layouts that it goes on from, with unlike numbers of stages.
        hottest, coolest: heats at its begin and end, see
            :func:`planner.search.walk.steps.walk_on`.
    """

    until: float
    walks: int
    hottest: float
    coolest: float


STARTS_UNTIL = 0.15
"""Share of the time in which starts are judged."""
FEW_STARTS, FEW_UNTIL = 100, 0.4
"""Where no more than so many were, they are judged up to that share; a quarter of it is for finding
them, another one for their bounds."""
WORST_START = 2.0
"""Starts that take so many times as long as the best are left out."""
MOST_STARTS = 3000
"""Starts of which the likeliest are judged."""
PHASES = (
    Phase(0.25, 12, 1e-4, 1e-4),
    Phase(0.45, 4, 0.03, 0.001),
    Phase(0.65, 2, 0.015, 0.0005),
    Phase(0.8, 1, 0.005, 0.0002),
)
POLISH = Phase(1.0, 3, 0.003, 3e-5)
"""Annealing over the orders of the best layouts."""
LAYOUTS_A_WALK = 50
"""The fewest that a walk is to judge; where there is time for fewer, less walks are made."""
ONE_START, LOOK = 0.005, 0.02
"""Shares of the time for one start, and for all schedules of a walk's best layout."""
TRIES = 50
"""The most changes of orders between two looks at the clock."""
CHUNKS = 400
"""Parts of a time limit after which the clock is read."""


class Found(NamedTuple):
    """A layout with its time."""

    seconds: float
    layout: Layout


@dataclass
class WalkResult:
    """What a walk has found.

    Attributes:
        found: the best layouts, the fastest first; empty if none fits.
        layouts: number of layouts judged.
    """

    found: list[Found]
    layouts: int = 0


Told = Callable[[Found], None]
T = TypeVar("T")


class WalkSearch:
    """A search by walks.

    Args:
        problem: the model, cluster and job; what only needs to be done if nothing fits without
            (``if_needed``) counts as it is said: not done.
        table: what stages cost.
        clock: the limit.
        needs: what intervals of layers take; None: it is computed.
        seed: of random numbers.
        threads: walks at a time.
        told: called with each layout that is better than all before.
    """

    def __init__(
        self,
        problem: Problem,
        table: StageTable,
        clock: Part,
        *,
        needs: Needs | None = None,
        seed: int = 0,
        threads: int = 1,
        told: Told = lambda found: None,
    ) -> None:
        self.freedoms = freedoms_of(problem)
        self._network = NetworkTable.of(problem.cluster)
        self._walkers = [
            Walker(problem, table, self._network, self.freedoms, seed * threads + n + 1)
            for n in range(threads)
        ]
        self._needs = needs or needs_of(self._walkers[0].memory, table, self.freedoms)
        self._clock, self._told, self._lock = clock, told, Lock()
        self._may_reorder = problem.job.order != "1f1b"
        self._found: list[Found] = []
        self._given: frozenset[Start] = frozenset()
        self._tasks_per_call, self._tasks_told = 20_000, 0
        if clock.deterministic:
            self._tasks_per_call = max(1, int(clock.left_s() * TASKS_PER_S) // CHUNKS)

    def run(self, more: Iterable[Start] = ()) -> WalkResult:
        """Search until the limit.

        Args:
            more: layouts to start from besides the search's own.
        """
        begun = self._judged(more)
        for phase in PHASES if begun else ():
            begun = self._walk_each(begun, phase)
        if begun and self._may_reorder:
            self._in_threads(self._polish, begun[: POLISH.walks])
        return WalkResult(
            sorted(self._found, key=lambda row: row.seconds),
            sum(walker.layouts_judged for walker in self._walkers),
        )

    @property
    def _share(self) -> float:
        """The part of the time that is used; 1 once it is, or the search was stopped."""
        if self._clock.deterministic:
            tasks = sum(walker.tasks_done for walker in self._walkers)
            self._clock.spend((tasks - self._tasks_told) / TASKS_PER_S)
            self._tasks_told = tasks
        return self._clock.share

    def _tasks_until(self, share: float) -> float:
        """Return how many tasks can be replayed before a share of the time is used."""
        rate = TASKS_PER_S
        if not self._clock.deterministic and self._clock.used_s > 0:
            tasks = sum(walker.tasks_done for walker in self._walkers)
            rate = min(rate, max(1.0, tasks) / self._clock.used_s)
        return rate * self._clock.left_s(share) / len(self._walkers)

    # --- starts -------------------------------------------------------------------------------

    def _judged(self, more: Iterable[Start]) -> list[Candidate]:
        """Return the starts that fit, the fastest first."""
        rows = [*more]
        self._given = frozenset(rows)
        for row in islice(starts(self._network, self.freedoms, self._needs), MOST_STARTS):
            rows.append(row)
            if self._share > FEW_UNTIL / 4:
                break
        found = self._in_threads(lambda walker, own: self._judge(walker, own), rows)
        if not found:
            found = self._judge(self._walkers[0], [*singles(self.freedoms, self._needs)])
        return sorted(found, key=lambda row: row.seconds)

    def _judge(self, walker: Walker, rows: Sequence[Start]) -> list[Candidate]:
        """Judge layouts by few schedules, and the fastest by many, as far as there is time.

        The next one is that with the least expected time: its lower bound times the least ratio of
        time to bound that layouts of its kind had, which have as many stages, and stages of several
        classes of devices or of one each. Those that the caller gave come first.
        """
        found: list[Candidate] = []
        kinds, rest = self._by_kind(walker, rows)
        ratios: dict[tuple[int, bool], float] = {}
        best_s, judged = math.inf, 0
        while kinds and not (found and self._is_over(judged)):
            judged += 1
            kind = min(kinds, key=lambda kind: kinds[kind][-1][0] * ratios.get(kind, 1.0))
            bound_s, _, row = kinds[kind].pop()
            tasks = self._tasks_until(self._share + ONE_START)
            candidate = walker.start(row, 0.0, WORST_START * best_s, tasks)
            if candidate is not None:
                found.append(candidate)
                best_s = min(best_s, candidate.seconds)
                ratio = candidate.seconds / max(bound_s, 1e-12)
                ratios[kind] = min(ratios.get(kind, math.inf), ratio)
                self._note(walker, candidate)
            if not kinds[kind]:
                del kinds[kind]
        for row in () if found else rest:
            candidate = walker.start(row, 0.0)
            if candidate is not None:
                found.append(candidate)
                self._note(walker, candidate)
                break
        found.sort(key=lambda row: row.seconds)
        closely, until = [], self._share + STARTS_UNTIL / 2
        for candidate in found:
            if self._share > until or candidate.seconds > NEAR * found[0].seconds:
                break
            closely.append(walker.looked_at(candidate, self._tasks_until(until)))
            self._note(walker, closely[-1])
        return [*closely, *found[len(closely) :]]

    def _is_over(self, judged: int) -> bool:
        """Return whether enough of the time is used for starts, more if few could be judged."""
        return self._share > (STARTS_UNTIL / 2 if judged > FEW_STARTS else FEW_UNTIL)

    def _by_kind(
        self, walker: Walker, rows: Sequence[Start]
    ) -> tuple[dict[tuple[int, bool], list[tuple[float, int, Start]]], Sequence[Start]]:
        """Return layouts by kind, the least bound last, and those for which there is no time."""
        kinds: dict[tuple[int, bool], list[tuple[float, int, Start]]] = {}
        class_of, until = self.freedoms.class_of, FEW_UNTIL / 2
        looked_at = len(rows)
        for number, row in enumerate(rows):
            if kinds and self._share > until:
                looked_at = number
                break
            bound_s = walker.bound_s(row)
            if bound_s < math.inf:
                mixes = any(len(np.unique(class_of[list(part)])) > 1 for part in row.devices)
                kind, rank = (len(row.ends), mixes), (bound_s, -number, row)
                if row in self._given:
                    kind, rank = (0, False), (0.0, number, row)
                kinds.setdefault(kind, []).append(rank)
        for of_kind in kinds.values():
            of_kind.sort(reverse=True)
        return kinds, rows[looked_at:]

    def _in_threads(
        self, work: Callable[[Walker, Sequence[T]], list[Candidate]], rows: Sequence[T]
    ) -> list[Candidate]:
        count = len(self._walkers)
        with ThreadPoolExecutor(count) as pool:
            done = [
                pool.submit(work, walker, rows[n::count]) for n, walker in enumerate(self._walkers)
            ]
            return [candidate for row in done for candidate in row.result()]

    # --- walks --------------------------------------------------------------------------------

    def _walk_each(self, begun: Sequence[Candidate], phase: Phase) -> list[Candidate]:
        """Walk from the best layouts of unlike shapes; return all, the fastest first."""
        chosen = _unlike(begun, self._affordable(phase))
        while len(chosen) < len(self._walkers):
            chosen.append(chosen[0])
        found = self._in_threads(lambda walker, own: self._walk_from(walker, own, phase), chosen)
        return sorted([*found, *begun], key=lambda row: row.seconds)

    def _affordable(self, phase: Phase) -> int:
        """Return how many walks have time for some layouts each."""
        share = self._share
        judged = sum(walker.layouts_judged for walker in self._walkers)
        most = (phase.until - share) * judged / max(share, 1e-9)
        return max(1, min(phase.walks, int(most / LAYOUTS_A_WALK)))

    def _walk_from(
        self, walker: Walker, chosen: Sequence[Candidate], phase: Phase
    ) -> list[Candidate]:
        found, begin = [], self._share
        for number, candidate in enumerate(chosen):
            end = begin + (phase.until - begin) * (number + 1) / len(chosen)
            walker.stand_at(candidate)
            self._walk_until(walker, phase, end)
            found.append(walker.looked_at(walker.best, self._tasks_until(self._share + LOOK)))
            self._note(walker, found[-1])
        return found

    def _walk_until(self, walker: Walker, phase: Phase, end: float) -> None:
        begin = now = self._share
        best_s = walker.best.seconds
        while now < end:
            part = (now - begin) / (end - begin)
            heat = phase.hottest * (phase.coolest / phase.hottest) ** part
            walker.walk(heat, self._tasks_per_call)
            then, now = now, self._share
            if not self._clock.deterministic and now - then < 1 / CHUNKS:
                self._tasks_per_call = int(self._tasks_per_call * 1.5)
            elif not self._clock.deterministic and now - then > 3 / CHUNKS:
                self._tasks_per_call = max(1000, self._tasks_per_call // 2)
            if walker.best.seconds < best_s:
                best_s = walker.best.seconds
                self._note(walker, walker.best)

    # --- orders -------------------------------------------------------------------------------

    def _polish(self, walker: Walker, rows: Sequence[Candidate]) -> list[Candidate]:
        """Anneal the orders of layouts, each with an equal share of the time that is left."""
        begin = self._share
        for number, candidate in enumerate(rows):
            end = begin + (POLISH.until - begin) * (number + 1) / len(rows)
            walker.layout(candidate)
            best_s, tries, from_share = candidate.seconds, 1, self._share
            share = from_share
            while share < end:
                part = (share - from_share) / (end - from_share)
                heat = POLISH.hottest * (POLISH.coolest / POLISH.hottest) ** part
                before = walker.tasks_done
                now_s = walker.polish(heat, tries)
                done = max(1, walker.tasks_done - before)
                tries = max(1, min(TRIES, self._tasks_per_call * tries // done))
                share = self._share
                if now_s < best_s:
                    best_s = now_s
                    self._keep(Found(now_s, walker.polished_layout()))
        return []

    def _keep(self, found: Found) -> None:
        with self._lock:
            if not self._found or found.seconds < self._found[-1].seconds:
                self._found.append(found)
                self._told(found)

    def _note(self, walker: Walker, candidate: Candidate) -> None:
        """Keep a layout that is better than all before, and tell of it."""
        with self._lock:
            if self._found and candidate.seconds >= self._found[-1].seconds:
                return
            found = Found(*walker.layout(candidate))
            if found.seconds > candidate.seconds * (1 + 1e-9):
                told = "a layout of %.6g s takes %.6g s when it is scheduled again"
                LOG.warning(told, candidate.seconds, found.seconds)
                return
            self._found.append(found)
            self._told(found)


def _unlike(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the best of each number of stages, and then others, so many at most."""
    first: dict[int, Candidate] = {}
    for row in candidates:
        first.setdefault(row.shape[0], row)
    chosen = list(first.values())[:count]
    rest = [row for row in candidates if not any(row is other for other in chosen)]
    return [*chosen, *rest[: count - len(chosen)]]
