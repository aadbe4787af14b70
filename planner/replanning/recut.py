"""Stages cut again among given groups of devices: less time for more bytes to move.

The groups keep their order. For a limit on every group's load, the cuts that move the fewest bytes
are found by a dynamic program over cuts; several limits give several compromises. Loads are of
computation alone: a schedule decides what the result is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from planner.replanning.state import IntArray, State
from planner.search.walk.starts import Needs, Start

Groups = tuple[tuple[int, ...], ...]
"""The devices of each stage, by number."""
LOAD_FACTORS = (1.2, 1.1, 1.05, 1.02, 1.0)
"""Limits on the load of a group, as multiples of the least that cuts can reach."""
ROUNDING = 1 + 1e-9
Floats = NDArray[np.float64]


class Recut:
    """The cuts of one problem that may be chosen.

    Args:
        needs: seconds of all intervals of layers; infinite where they do not fit.
        may_cut: N + 1; whether a stage may begin or end there.
        state: what devices hold.
        microbatches: of an iteration.
    """

    def __init__(
        self, needs: Needs, may_cut: NDArray[np.bool_], state: State, microbatches: int
    ) -> None:
        self._needs, self._state, self._microbatches = needs, state, microbatches
        self._cuts: IntArray = np.flatnonzero(may_cut)
        # What layers share counts for each of them.
        uses = np.diff(state.used, axis=0)
        self._lacking = (uses * state.bytes) @ ~state.held.T
        self._load = cache(self._load_of)
        self._moved = cache(self._moved_by)

    def starts(self, groups: Groups) -> Iterator[tuple[float, Start]]:
        """Yield stages that move few bytes, within lower and lower limits, each with its load."""
        if len(groups) >= len(self._cuts):
            return
        types = [tuple(sorted(self._needs.type_of[list(group)].tolist())) for group in groups]
        loads = [self._load(row, len(groups) - s) for s, row in enumerate(types)]
        moved = [self._moved(group) for group in groups]
        least_s = _least_limit(loads)
        if not np.isfinite(least_s):
            return
        known: set[tuple[int, ...]] = set()
        for limit_s in (np.finfo(float).max, *(least_s * f * ROUNDING for f in LOAD_FACTORS)):
            ends = _fewest_bytes(loads, moved, limit_s)
            if ends not in known:
                known.add(ends)
                begins = (0, *ends[:-1])
                longest = max(x[a, b] for x, a, b in zip(loads, begins, ends, strict=True))
                yield float(longest), Start(tuple(self._cuts[[*ends]].tolist()), groups)

    def _load_of(self, types: tuple[int, ...], after: int) -> Floats:
        """Return seconds an iteration of the busiest replica; infinite where it does not fit.

        Args:
            types: of the devices of a group.
            after: number of stages from this one to the last, its microbatches in flight.
        """
        of_position = self._needs.seconds[min(after, len(self._needs.seconds)) - 1]
        spans = of_position[:, self._cuts][:, :, self._cuts]
        return _shared(spans, np.bincount(types, minlength=len(spans)), self._microbatches)

    def _moved_by(self, group: tuple[int, ...]) -> Floats:
        """Return bytes that a group lacks for each interval."""
        each = self._lacking[:, list(group)].sum(axis=1)
        sums = np.concatenate([[0.0], np.cumsum(each.astype(float))])[self._cuts]
        return np.asarray(sums[None, :] - sums[:, None])


def _shared(spans: Floats, counts: IntArray, microbatches: int) -> Floats:
    """Return seconds of the busiest replica: whole microbatches on equal ones.

    Replicas of several types divide the microbatches by their speed.
    """
    used = np.flatnonzero(counts)
    if len(used) == 1:
        return np.asarray(spans[used[0]] * -(-microbatches // counts[used[0]]))
    speed = (counts[used][:, None, None] / np.maximum(spans[used], 1e-15)).sum(axis=0)
    misfit = np.isinf(spans[used]).any(axis=0)
    return np.where(misfit, np.inf, microbatches / np.maximum(speed, 1e-15))


def _least_limit(loads: Sequence[Floats]) -> float:
    """Return the least largest load."""
    best = np.full(len(loads[0]), np.inf)
    best[0] = 0.0
    for load in loads:
        best = np.maximum(best[:, None], load).min(axis=0)
    return float(best[-1])


def _fewest_bytes(
    loads: Sequence[Floats], moved: Sequence[Floats], limit_s: float
) -> tuple[int, ...]:
    """Return the end of each group that moves the fewest bytes within a limit on loads."""
    best = np.full(len(loads[0]), np.inf)
    best[0] = 0.0
    choices = []
    for load, bytes_ in zip(loads, moved, strict=True):
        costs = np.where(load <= limit_s, best[:, None] + bytes_, np.inf)
        choices.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    ends = [len(best) - 1]
    for choice in reversed(choices[1:]):
        ends.append(int(choice[ends[-1]]))
    return tuple(reversed(ends))
