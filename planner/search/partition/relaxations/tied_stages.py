"""Reductions of a parameter that two stages hold, by the classes of devices of the later one.

Alone, a stage does not tell among which devices it reduces such a parameter. So the class
relaxation is computed once for each set of classes that the later stage may lie on: it may then
lie on no others, and the earlier stage, behind the way home, is charged the reduction over its own
devices and one of each of these classes. The least of these bounds holds for every plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from planner.search.partition.chain import FloatArray, IntArray
from planner.search.partition.intervals import BoolArray
from planner.search.partition.relaxations.class_figures import ClassFigures, StageOption

MOST_SUPPORTS = 7
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
    """Return the tied parameter of a chain; None if there are others or it is not known where."""
    table, groups = figures.intervals, figures.chain.tied_parameters
    if table.relaxed or len(groups) != 1:
        return None
    ((layers, bytes_),) = groups.items()
    if len(layers) != 2:
        return None
    rows, columns = table.cuts[:-1, None], table.cuts[None, :]
    first, last = ((rows <= layer) & (layer < columns) for layer in layers)
    return TiedPair(first & ~last, last & ~first, bytes_)


def supports(figures: ClassFigures) -> list[Support]:
    """Return the sets of classes to go through; none if that would not help or take too long."""
    classes = range(len(figures.classes.sizes))
    if tied_pair(figures) is None or 2 ** len(classes) - 1 > MOST_SUPPORTS:
        return []
    return [chosen for n in classes for chosen in combinations(classes, n + 1)]


def options_with(figures: ClassFigures, support: Support | None) -> list[StageOption]:
    """Return the stages if that of the last tied layer alone lies on exactly these classes.

    All stages as they are if it is not known where that one lies.
    """
    pair = tied_pair(figures)
    if support is None or pair is None:
        return figures.options
    return list(_options_with(figures, pair, support))


def _options_with(figures: ClassFigures, pair: TiedPair, support: Support) -> Iterator[StageOption]:
    for option in figures.options:
        vector = figures.classes.vectors[option.number]
        never = np.zeros_like(pair.first_alone)
        if tuple(np.flatnonzero(vector)) != support:
            never = never | pair.last_alone
        more_s = _further_s(figures, pair, vector, support)
        if more_s is None:
            never, more_s = never | pair.first_alone, 0.0
        yield _raised(option, np.where(pair.first_alone, more_s, 0.0), never)


def _raised(option: StageOption, more_s: FloatArray, never: BoolArray) -> StageOption:
    in_load, after = (more_s, 0.0) if option.ends_in_load else (0.0, more_s)
    return replace(
        option,
        own_s=np.where(never, np.inf, option.own_s + more_s),
        load_s=np.where(never, np.inf, option.load_s + in_load),
        end_s=option.end_s + after,
    )


def _further_s(
    figures: ClassFigures, pair: TiedPair, vector: IntArray, support: Support
) -> float | None:
    """Return how much longer the reduction takes than it counts; None without devices for it.

    Of a class with two devices left two take part in the search for the best links: a device has
    no wider links in the real reduction, however many of its class are in it.
    """
    classes, numbers = figures.classes, figures.chain.problem.cluster.numbers
    left = classes.sizes - vector
    if any(left[k] == 0 for k in support):
        return None
    others = np.array([min(2, left[k]) if k in support else 0 for k in range(len(left))])
    own = classes.devices(vector)
    members = [numbers[name] for name in (*own, *classes.devices(others, vector))]
    bytes_ = np.array(float(pair.bytes))
    whole = max(
        float(figures.all_reduce_s(len(own) + len(support), bytes_, *step))
        for step in figures.links.reduction(sorted(members))
    )
    return max(0.0, whole - float(figures.tied_reduce_s([numbers[name] for name in own], bytes_)))
