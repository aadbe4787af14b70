"""Parameters that two stages hold, by the devices of the later one.

Such a parameter is reduced over the devices of both stages. A stage alone does not tell which the
others are, so all plans are looked at once for each set of classes that the later stage may lie on,
and for ranges of the number of its devices: the later stage then lies on no others, and the earlier
one takes part in a reduction over its own devices, at least one of each of these classes and at
least as many as the range begins with. Plans in which one stage holds both layers are among those
of every set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from planner.verification.proof.layers import BoolArray, FloatArray, IntArray, ProvedTiedPair
from planner.verification.proof.links import FAR
from planner.verification.proof.stages import ProvedStages

MOST_CASES = 7
"""With more sets of classes nothing is known of the other devices."""


@dataclass(frozen=True)
class StageCase:
    """What stages of some plans may be, and how long they reduce parameters together with others.

    Attributes:
        fits: whether a stage may be on devices, by option, begin and end.
        joint_reduction_s: all-reduces together with other stages, after the stage's own.
    """

    fits: BoolArray
    joint_reduction_s: FloatArray


def all_plans(stages: ProvedStages) -> StageCase:
    """Return what holds for the stages of any plan."""
    shared = stages.intervals.shared_gradient_bytes
    return StageCase(stages.fits, stages.joint_reduction_s(shared))


class _LaterStage(NamedTuple):
    """The devices of the later stage: the classes on all of which it lies, and their number."""

    classes: BoolArray
    least: int
    most: int


def cases_by_classes(stages: ProvedStages) -> Iterator[StageCase]:
    """Yield cases of which every plan is in some one; none if there are not any."""
    pair, classes = stages.intervals.tied_pair, range(len(stages.kinds))
    sets = [row for number in classes for row in combinations(classes, number + 1)]
    if pair is None or len(sets) > MOST_CASES:
        return
    ranges = stages.links.counts_by_width() if stages.layers.space.replication else [(1, 1)]
    if len(sets) * len(ranges) > MOST_CASES:
        ranges = [(1, int(stages.links.sizes.sum()))]
    if len(sets) * len(ranges) > 1:
        others = stages.intervals.shared_gradient_bytes - pair.shared_bytes
        others_s, known = stages.joint_reduction_s(others), all_plans(stages)
        for row, some in product(sets, ranges):
            later = _LaterStage(np.isin(classes, row), *some)
            yield _case(stages, pair, known, others_s, later)


def _case(
    stages: ProvedStages,
    pair: ProvedTiedPair,
    known: StageCase,
    others_s: FloatArray,
    later: _LaterStage,
) -> StageCase:
    """Return a case.

    Args:
        stages: of the problem.
        pair: the layers that share parameters.
        known: what holds for any plan.
        others_s: reductions of other parameters of several stages.
        later: the devices of the later stage.
    """
    held = stages.vectors.rows[stages.vectors.options]
    number = held.sum(axis=1)
    lies = ((held > 0) == later.classes).all(axis=1)
    lies &= (later.least <= number) & (number <= later.most)
    both = np.array([_both_s(stages, row, later, pair.bytes) for row in held])[:, None, None]
    fits = known.fits & (lies[:, None, None] | ~pair.last_alone)
    fits &= (both < FAR) | ~pair.first_alone
    return StageCase(fits, np.where(pair.first_alone, others_s + both, known.joint_reduction_s))


def _both_s(stages: ProvedStages, held: IntArray, later: _LaterStage, bytes_: float) -> float:
    """Return the least all-reduce over a stage's devices and those of the later stage at least.

    Of a class with two devices left both count as possible partners of each other.
    """
    left = stages.links.sizes - held
    least = max(int(later.classes.sum()), later.least)
    if (left[later.classes] == 0).any() or left[later.classes].sum() < least:
        return FAR
    spread = held + np.where(later.classes, np.minimum(left, max(least, 2)), 0)
    count = int(held.sum()) + least
    return float(stages.links.spread_reduce_s(spread, count, np.array([bytes_]))[0])
