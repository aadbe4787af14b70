"""Who is given up: who is silent for too long while others, or the clock, are not."""

from __future__ import annotations

from torch.distributed import HashStore

from executor.coordinator.messages import Lost
from executor.coordinator.serve import Silence
from executor.coordinator.store import BEAT_S, beats_of

LIVES = ((0, "a", frozenset({0, 1})), (1, "b", frozenset({0, 1})))
SILENT_S = 1.0


class World:
    """Four ranks, and the looks of a coordinator at them."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.silence = Silence(self.store, SILENT_S)
        self.now_s = 100.0

    def look(self, *silent: tuple[int, int], after_s: float = BEAT_S) -> list[Lost]:
        self.now_s += after_s
        for pipeline, incarnation_id, places in LIVES:
            for place in places:
                if (pipeline, place) not in silent:
                    self.store.add(beats_of(pipeline, place, incarnation_id), 1)
        return self.silence.found(LIVES, self.now_s)


def test_nobody_is_given_up_who_gives_signs_of_life() -> None:
    world = World()
    assert not any(world.look() for _ in range(100))


def test_a_pipeline_is_given_up_once_when_one_of_its_places_is_silent_for_too_long() -> None:
    world = World()
    world.look()
    began_s = world.now_s
    while not (lost := world.look((1, 0))):
        assert world.now_s < began_s + 2 * SILENT_S
    assert lost == [Lost(pipeline=1, incarnation_id="b")]
    assert SILENT_S < world.now_s - began_s < SILENT_S + 2 * BEAT_S
    assert world.look((1, 0), (1, 1), (0, 1)) == [Lost(pipeline=1, incarnation_id="b")]


def test_one_sign_of_life_is_enough_to_begin_anew() -> None:
    world = World()
    for _ in range(10):
        assert not any(world.look((0, 0)) for _ in range(9))
        assert not world.look()


def test_time_in_which_nobody_looked_is_nobodys_silence() -> None:
    world = World()
    everybody = [(pipeline, place) for pipeline in (0, 1) for place in (0, 1)]
    world.look()
    assert world.look(*everybody, after_s=60.0) == []
    assert world.look() == []
    for _ in range(3):
        assert world.look(*everybody, after_s=5.0) == []
