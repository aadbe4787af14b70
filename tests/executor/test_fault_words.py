"""Faults on purpose, as people write them."""

from __future__ import annotations

import pytest

from executor.faults import Fault, parse_faults
from planner.errors import PipeplanError


def test_calls_are_read() -> None:
    text = " fail_at(2,5)  stop_in(1,9,3.5) hang_at(0,1,0) return_at(2,10) "
    assert parse_faults(text) == (
        Fault("fail", "at", 2, 5, 0.0),
        Fault("stop", "in", 1, 9, 3.5),
        Fault("hang", "at", 0, 1, 0.0),
        Fault("return", "at", 2, 0, 10.0),
    )
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("fail", "is no fault"),
        ("fail_at", "is no fault"),
        ("fail_at()", "is no fault"),
        ("fail_at(1)", "is no fault"),
        ("fail_at(1,2,3)", "is no fault"),
        ("stop_at(1,2)", "is no fault"),
        ("fail_on(1,2)", "is no fault"),
        ("return_in(1,2)", "is no fault"),
        ("fail_at(1,", "is no fault"),
        ("fail_at(1,x)", "has arguments that are no numbers"),
        ("fail_at(1.5,2)", "has arguments that are no numbers"),
        ("stop_at(1,2,)", "has arguments that are no numbers"),
        ("fail_at(-1,2)", "has arguments out of range"),
        ("fail_at(1,-2)", "has arguments out of range"),
        ("stop_at(1,2,-3)", "has arguments out of range"),
        ("hang_in(1,2,nan)", "has arguments out of range"),
        ("hang_in(1,2,inf)", "has arguments out of range"),
    ],
)
def test_a_word_that_is_none_is_named(word: str, why: str) -> None:
    with pytest.raises(PipeplanError) as caught:
        parse_faults(f"fail_at(0,1) {word}")
    assert str(caught.value).startswith(f"inject: {word!r} {why}")


def test_blanks_within_a_call_are_refused() -> None:
    with pytest.raises(PipeplanError, match="without spaces"):
        parse_faults("fail_at(1, 2)")
