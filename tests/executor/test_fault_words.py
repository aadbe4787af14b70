"""Faults on purpose, as people write them."""

from __future__ import annotations

import pytest

from executor.elastic.faults import Faults, InjectedFault, parse_faults
from planner.errors import PipeplanError


def test_calls_are_read() -> None:
    text = " fail_at(2,5)  stop_in(1,9,3.5) hang_at(0,1,0) return_at(2,10) "
    assert parse_faults(text) == (
        InjectedFault("fail", "at", 2, 5, 0.0),
        InjectedFault("stop", "in", 1, 9, 3.5),
        InjectedFault("hang", "at", 0, 1, 0.0),
        InjectedFault("return", "at", 2, 0, 10.0),
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
        ("fail_at(1,x)", "STEP is 'x', not a whole number; write fail_at(PIPELINE,STEP), such as"),
        ("fail_at(1,2.5)", "STEP is '2.5', not a whole number"),
        ("fail_at(1.5,2)", "PIPELINE is '1.5', not a whole number"),
        ("stop_at(1,2,)", "SECONDS is '', not a number; write stop_at(PIPELINE,STEP,SECONDS)"),
        ("fail_at(-1,2)", "PIPELINE is -1, expected 0 or more; write fail_at(PIPELINE,STEP)"),
        ("fail_at(1,-2)", "STEP is -2, expected 1 or more"),
        ("fail_at(1,0)", "STEP is 0, expected 1 or more"),
        ("stop_at(1,2,-3)", "SECONDS is -3, expected 0 or more and less than 1e+06"),
        ("hang_in(1,2,nan)", "SECONDS is nan, expected 0 or more"),
        ("hang_in(1,2,inf)", "SECONDS is inf, expected 0 or more"),
        ("fail_at(4,1)", "there is no pipeline 4; the plan has pipelines 0 to 3"),
    ],
)
def test_a_word_that_is_none_is_named(word: str, why: str) -> None:
    with pytest.raises(PipeplanError) as caught:
        parse_faults(f"fail_at(0,1) {word}", pipelines=4)
    assert str(caught.value).replace(":", "").startswith(f"inject {word!r} {why}")


def test_blanks_within_a_call_are_refused() -> None:
    with pytest.raises(PipeplanError, match="without spaces"):
        parse_faults("fail_at(1, 2)")


def test_who_writes_too_few_arguments_is_told_which_there_are() -> None:
    with pytest.raises(PipeplanError) as caught:
        parse_faults("fail_at(1)")
    assert str(caught.value).endswith("write fail_at(PIPELINE,STEP), such as fail_at(2,5)")


def test_a_fault_is_told_as_it_was_written() -> None:
    text = "fail_at(2,5) stop_in(1,9,3.5) hang_at(0,1,0) return_at(2,10)"
    assert " ".join(fault.word for fault in parse_faults(text)) == text


def test_a_fault_is_told_before_it_happens() -> None:
    told: list[str] = []
    parsed = parse_faults("hang_at(0,2,0) hang_at(1,2,0) hang_at(0,3,0) return_at(0,0)")
    faults = Faults(parsed, 0, lambda fault: told.append(fault.word))
    faults.before_hello(is_back=False)
    faults.at(1)
    faults.at(2)
    faults.before_hello(is_back=True)
    assert told == ["hang_at(0,2,0)", "return_at(0,0)"]
