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
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from planner.verification.proof.figures import FAR, BoolArray, FloatArray, IntArray
from planner.verification.proof.stages import StageFigures

MOST_CASES = 7
"""With more sets of classes nothing is known of the other devices."""


class StageCase(NamedTuple):
    """What stages of some plans may be, and how long they reduce parameters together with others.

    Attributes:
        fits: whether a stage may be on devices, by option, begin and end.
        joint_reduction_s: all-reduces together with other stages, after the stage's own.
    """

    fits: BoolArray
    joint_reduction_s: FloatArray


def all_plans(stages: StageFigures) -> StageCase:
    """Return what holds for the stages of any plan."""
    shared = stages.figures.parameters.shared_bytes
    return StageCase(stages.fits, stages.joint_reduction_s(shared))


def cases_by_classes(stages: StageFigures) -> Iterator[StageCase]:
    """Yield cases of which every plan is in some one; none if there are not any."""
    pair, links, classes = stages.figures.tied_pair, stages.links, range(len(stages.kinds))
    sets = [row for number in classes for row in combinations(classes, number + 1)]
    if pair is None or len(sets) > MOST_CASES:
        return
    ranges = links.counts_by_width() if stages.figures.space.replication else [(1, 1)]
    if len(sets) * len(ranges) > MOST_CASES:
        ranges = [(1, int(links.sizes.sum()))]
    if len(sets) * len(ranges) == 1:
        return
    known, number = all_plans(stages), stages.held.sum(axis=1)
    either = np.where(pair.first_alone | pair.last_alone, pair.bytes, 0.0)
    others_s = stages.joint_reduction_s(stages.figures.parameters.shared_bytes - either)
    for row, (least, most) in product(sets, ranges):
        later = np.isin(classes, row)
        lies = ((stages.held > 0) == later).all(axis=1) & (least <= number) & (number <= most)
        both_s = [_both_s(stages, held, later, least, pair.bytes) for held in stages.held]
        both = np.array(both_s)[:, None, None]
        fits = known.fits & (lies[:, None, None] | ~pair.last_alone)
        fits &= (both < FAR) | ~pair.first_alone
        joint_s = np.where(pair.first_alone, others_s + both, known.joint_reduction_s)
        yield StageCase(fits, joint_s)


def _both_s(
    stages: StageFigures, held: IntArray, later: BoolArray, least: int, bytes_: float
) -> float:
    """Return the least all-reduce over a stage's devices and those of the later stage at least.

    Args:
        stages: of the problem.
        held: the stage's devices, by class.
        later: classes on all of which the later stage lies.
        least: devices that it has, at least.
        bytes_: that are reduced.
    """
    left, least = stages.links.sizes - held, max(int(later.sum()), least)
    if (left[later] == 0).any() or left[later].sum() < least:
        return FAR
    # Of a class with two devices left both count as possible partners of each other.
    spread = held + np.where(later, np.minimum(left, max(least, 2)), 0)
    count = int(held.sum()) + least
    return float(stages.links.reduced_s(spread > 0, count, np.array(bytes_), spread))
