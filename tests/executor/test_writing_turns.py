"""Whose turn it is to write a checkpoint, when pipelines see each other at different moments."""

from torch.distributed import HashStore

from executor.checkpoint import Ranks
from executor.elastic.checkpoints import Writing

BEFORE, AFTER = {0: 1, 1: 1}, {1: 1, 0: 2}
"""Pipeline 0 was lost and is back."""


def turns(store: HashStore) -> tuple[Writing, Writing]:
    return Writing(store, Ranks.alone(), 0), Writing(store, Ranks.alone(), 1)


def test_nobody_writes_while_somebody_else_does() -> None:
    first, second = turns(HashStore())
    with second.turn(40, {1: 1}) as writes:
        assert writes
        with first.turn(45, AFTER) as both:
            assert not both
    with first.turn(45, AFTER) as writes:
        assert writes


def test_a_step_is_written_once_and_none_before_it_after_it() -> None:
    first, second = turns(HashStore())
    with second.turn(40, {1: 1}) as writes:
        assert writes
    for step, expected in ((40, False), (35, False), (41, True), (41, False)):
        with first.turn(step, AFTER) as writes:
            assert writes == expected


def test_who_was_lost_while_it_wrote_is_not_waited_for() -> None:
    first, second = turns(HashStore())
    lost = first.turn(40, BEFORE)  # And never left.
    assert lost.__enter__()
    with second.turn(40, BEFORE) as writes:
        assert not writes
    with second.turn(40, {1: 1}) as writes:
        assert writes


def test_a_write_that_failed_leaves_the_step_to_others() -> None:
    first, second = turns(HashStore())
    try:
        with first.turn(40, BEFORE):
            raise OSError("disk full")
    except OSError:
        pass
    with second.turn(40, {1: 1}) as writes:
        assert writes
