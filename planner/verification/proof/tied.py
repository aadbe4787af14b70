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
from itertools import combinations
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
    return StageCase(stages.fits, stages.joint_reduction_s)


class _LaterStage(NamedTuple):
    """The devices of the later stage.

    Attributes:
        classes: on all of which it lies.
        least, most: devices.
    """

    classes: BoolArray
    least: int
    most: int


def _later_stages(stages: ProvedStages) -> list[_LaterStage]:
    """Return what the later stage may lie on, by sets of classes and numbers of devices."""
    classes = range(len(stages.kinds))
    sets = 2 ** len(classes) - 1
    if stages.intervals.tied_pair is None or sets > MOST_CASES:
        return []
    chosen = (chosen for number in classes for chosen in combinations(classes, number + 1))
    replicas = stages.links.counts_by_width() if stages.layers.space.replication else [(1, 1)]
    if sets * len(replicas) > MOST_CASES:
        replicas = [(1, int(stages.links.sizes.sum()))]
    found = [_LaterStage(np.isin(classes, row), *some) for row in chosen for some in replicas]
    return found if len(found) > 1 else []


def cases_by_classes(stages: ProvedStages) -> Iterator[StageCase]:
    """Yield cases of which every plan is in some one; none if there are not any."""
    pair, later = stages.intervals.tied_pair, _later_stages(stages)
    if pair is None or not later:
        return
    others = stages.joint_reduce_s(stages.intervals.shared_gradient_bytes - pair.shared_bytes)
    for devices in later:
        yield _case(stages, pair, others, devices)


def _case(
    stages: ProvedStages, pair: ProvedTiedPair, others: FloatArray, later: _LaterStage
) -> StageCase:
    held = stages.vectors.rows[stages.vectors.options]
    number = held.sum(axis=1)
    lies = ((held > 0) == later.classes).all(axis=1)
    lies &= (later.least <= number) & (number <= later.most)
    fits = stages.fits & (lies[:, None, None] | ~pair.last_alone)
    both = np.array([_both_s(stages, row, later, pair.bytes) for row in held])
    fits &= (both < FAR)[:, None, None] | ~pair.first_alone
    with_last = others + both[:, None, None]
    return StageCase(fits, np.where(pair.first_alone, with_last, stages.joint_reduction_s))


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
