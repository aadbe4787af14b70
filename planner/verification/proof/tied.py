"""Parameters that two stages hold, by the classes of devices of the later one.

Such a parameter is reduced over the devices of both stages. A stage alone does not tell which the
others are, so all plans are looked at once for each set of classes that the later stage may lie on:
the later stage then lies on no others, and the earlier one takes part in a reduction over its own
devices and at least one of each of these classes. Plans in which one stage holds both layers are
among those of every set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

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
    return StageCase(stages.fits, stages.joint_reduction_s)


def case_count(stages: ProvedStages) -> int:
    """Return how many cases by classes there are; 0 if they would tell no more or are too many."""
    count = 2 ** len(stages.kinds) - 1
    return 0 if stages.intervals.tied_pair is None or count > MOST_CASES else count


def cases_by_classes(stages: ProvedStages) -> Iterator[StageCase]:
    """Yield cases of which every plan is in some one; none if there are not any."""
    pair, classes = stages.intervals.tied_pair, range(len(stages.kinds))
    if pair is None or not case_count(stages):
        return
    others = stages.joint_reduce_s(stages.intervals.shared_gradient_bytes - pair.shared_bytes)
    for number in classes:
        for chosen in combinations(classes, number + 1):
            support = np.isin(classes, chosen)
            yield _case(stages, pair, others, support)


def _case(
    stages: ProvedStages, pair: ProvedTiedPair, others: FloatArray, support: BoolArray
) -> StageCase:
    held = stages.vectors.rows[stages.vectors.options]
    lies = ((held > 0) == support).all(axis=1)
    fits = stages.fits & (lies[:, None, None] | ~pair.last_alone)
    both = np.array([_both_s(stages, row, support, pair.bytes) for row in held])
    fits &= (both < FAR)[:, None, None] | ~pair.first_alone
    with_last = others + both[:, None, None]
    return StageCase(fits, np.where(pair.first_alone, with_last, stages.joint_reduction_s))


def _both_s(stages: ProvedStages, held: IntArray, support: BoolArray, bytes_: float) -> float:
    """Return the least all-reduce over a stage's devices and one at least of some classes each.

    Of a class with two devices left both count as possible partners of each other.
    """
    left = stages.links.sizes - held
    if (left[support] == 0).any():
        return FAR
    count = int(held.sum() + support.sum())
    spread = held + np.where(support, np.minimum(left, 2), 0)
    return float(stages.links.spread_reduce_s(spread, count, np.array([bytes_]))[0])
