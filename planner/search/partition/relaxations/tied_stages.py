"""Reductions of a parameter that two stages hold, by the classes of devices of the later one.

Alone, a stage does not tell among which devices it reduces such a parameter. So the class
relaxation asks of each set of classes whether the later stage may lie on it: it may then lie on no
others, and the earlier stage, behind the way home, is charged the reduction over its own
devices and one of each of these classes. The least of these bounds holds for every plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from planner.search.partition.chain import FloatArray, IntArray
from planner.search.partition.intervals import BoolArray
from planner.search.partition.relaxations.class_figures import ClassFigures, ClassStageFigures

MOST_SUPPORTS = 31
"""With more sets of classes to go through, the parameter is left to the other relaxations."""

Support = tuple[int, ...]
"""Classes of devices, by number."""


@dataclass(frozen=True)
class TiedPair:
    """A parameter of two layers, the only one that is tied.

    Attributes:
        first_alone, last_alone: intervals that hold one of the layers, by cut and end.
        bytes: of its gradient.
    """

    first_alone: BoolArray
    last_alone: BoolArray
    bytes: int


def tied_pair(figures: ClassFigures) -> TiedPair | None:
    """Return the tied parameter of a chain; None if there are others or it is not known where.

    None as well where it is not reduced among all stages that hold it at once.
    """
    table, groups = figures.intervals, figures.chain.tied_parameters
    if table.relaxed or len(groups) != 1 or figures.chain.reduces_tied_in_turn:
        return None
    ((layers, bytes_),) = groups.items()
    if len(layers) != 2:
        return None
    rows, columns = table.cuts[:-1, None], table.cuts[None, :]
    first, last = ((rows <= layer) & (layer < columns) for layer in layers)
    return TiedPair(first & ~last, last & ~first, bytes_)


class TiedStages:
    """The stages of a problem, by where that of the last tied layer alone lies.

    Args:
        figures: of all stages.
    """

    def __init__(self, figures: ClassFigures) -> None:
        self._figures = figures
        self._pair = tied_pair(figures)
        self._further_s: dict[Support, FloatArray] = {}

    @property
    def supports(self) -> tuple[Support, ...]:
        """The sets of classes to go through; none if that would not help or take too long."""
        classes = range(len(self._figures.classes.sizes))
        if self._pair is None or 2 ** len(classes) - 1 > MOST_SUPPORTS:
            return ()
        return tuple(sorted(chosen for n in classes for chosen in combinations(classes, n + 1)))

    def stages(self, among: tuple[Support, ...]) -> ClassStageFigures:
        """Return the stages if that one lies on exactly some of these classes.

        All stages as they are if it is not known where it lies.

        Args:
            among: the sets of classes; the first tied layer's stage is charged the least of them.
        """
        stages, pair = self._figures.stages, self._pair
        if not among or pair is None:
            return stages
        vectors = self._figures.classes.vectors
        further_s = np.min([self._of_vectors_s(pair, support) for support in among], axis=0)
        is_other = [tuple(np.flatnonzero(vector).tolist()) not in among for vector in vectors]
        more_s = further_s[:, None, None] * np.ones(pair.first_alone.shape)
        more_s = np.where(pair.first_alone, more_s, 0.0)
        more_s[np.array(is_other)[:, None, None] & pair.last_alone] = np.inf
        return replace(
            stages,
            own_s=stages.own_s + more_s,
            end_s=stages.end_s + more_s,
            after_s=stages.after_s + more_s,
        )

    def _of_vectors_s(self, pair: TiedPair, support: Support) -> FloatArray:
        """Return how much longer each vector's reduction takes; many sets ask for each support."""
        if support not in self._further_s:
            vectors = self._figures.classes.vectors
            rows = [_further_s(self._figures, pair, vector, support) for vector in vectors]
            self._further_s[support] = np.array(rows)
        return self._further_s[support]


def _further_s(figures: ClassFigures, pair: TiedPair, vector: IntArray, support: Support) -> float:
    """Return how much longer the reduction takes than it counts; infinite without devices for it.

    Of a class with two devices left two take part in the search for the best links: a device has
    no wider links in the real reduction, however many of its class are in it.
    """
    classes, numbers = figures.classes, figures.chain.problem.cluster.numbers
    left = classes.sizes - vector
    if any(left[k] == 0 for k in support):
        return math.inf
    others = np.array([min(2, left[k]) if k in support else 0 for k in range(len(left))])
    own = classes.devices(vector)
    if not own:
        return 0.0
    members = [numbers[name] for name in (*own, *classes.devices(others, vector))]
    bytes_ = np.array(float(pair.bytes))
    whole = max(
        float(figures.all_reduce_s(len(own) + len(support), bytes_, *step))
        for step in figures.links.reduction(sorted(members))
    )
    return max(0.0, whole - float(figures.tied_reduce_s([numbers[name] for name in own], bytes_)))
