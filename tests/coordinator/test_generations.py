"""Generations of process groups, against ranks that really keep and drop what they used."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.coordinator import groups as generations
from executor.coordinator.groups import Generations
from executor.coordinator.pipelines import Incarnations

KEPT = 3


class Rank:
    """Keeps the process groups of the last sets of members it was in: a list, newest last."""

    def __init__(self) -> None:
        self.used: list[Incarnations] = []
        self.made: dict[Incarnations, tuple[int, int]] = {}

    def use(self, members: Incarnations) -> None:
        self.used = [other for other in self.used if other != members] + [members]
        while len(self.used) > KEPT:
            self.made.pop(self.used.pop(0), None)


def meet(told: Generations, ranks: list[Rank], members: Incarnations, number: int) -> None:
    """All members have the same process group, or all make a new one together."""
    generation = told.of(0, members)
    mine = [ranks[number] for number, _ in members]
    for rank in mine:
        rank.use(members)
    kept = {rank.made.get(members, (None, -1)) for rank in mine}
    has_dropped = any(members not in rank.made for rank in mine)
    still = {made for made in kept if made[0] == generation}
    if has_dropped:
        assert not still, "somebody would wait in a group that another has dropped"
    else:
        assert kept == still, "all have it, and it would be made again"
        assert len(kept) == 1
        return
    for rank in mine:
        rank.made[members] = generation, number


@given(seed=st.integers(0, 10**6))
def test_members_always_agree_on_keeping_or_making(seed: int) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generations, "KEPT", KEPT)
        told, ranks = Generations(), [Rank() for _ in range(5)]
        for number in range(80):
            chosen = sorted(rng.sample(range(5), rng.randint(2, 4)))
            members = tuple((n, 1) for n in chosen)
            meet(told, ranks, members, number)
            if rng.random() < 0.2:
                failed = rng.sample(chosen, rng.randint(1, len(chosen)))
                for n in failed:
                    ranks[n].made.pop(members, None)
                    told.raise_(0, members)


def test_a_group_of_one_needs_none() -> None:
    told = Generations()
    assert told.of(0, ((1, 1),)) == 0
    told.raise_(0, ((0, 1), (1, 1)))
    assert told.of(0, ((1, 1),)) == 0


def test_places_and_lives_have_groups_of_their_own() -> None:
    told = Generations()
    pair: Incarnations = ((0, 1), (1, 1))
    told.raise_(0, pair)
    assert told.of(0, pair) == 1
    assert told.of(1, pair) == 0
    assert told.of(0, ((0, 1), (1, 2))) == 0


def test_what_was_used_last_is_kept() -> None:
    kept: OrderedDict[Incarnations, None] = OrderedDict()
    sets: list[Incarnations] = [((0, 1), (n, 1)) for n in range(1, generations.KEPT + 2)]
    for members in sets[:-1]:
        assert generations.keep(kept, members) == []
    assert generations.keep(kept, sets[0]) == []
    assert generations.keep(kept, sets[-1]) == [sets[1]]
