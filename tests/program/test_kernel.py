"""The compiled replay of programs that are written by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import ROOT
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import DeadlockError
from planner.program.compiled import entry
from planner.program.events import twelve_digits
from planner.program.program import (
    COMPUTE,
    DEVICES,
    FLOW,
    LINK_GB_PER_S,
    LINK_NUMBERS,
    ORDER,
    SUCCESSORS,
    TASKS,
    WAY_LINES,
    WAY_LINKS,
    WAY_ONCE,
    WAYS,
    Program,
)
from planner.program.replay import replay
from planner.program.work import Work


def two_pairs(order: tuple[int, int] = (0, 1)) -> Program:
    """A forward of 1 s on each of a and b; then both send for 2 s over one link to c, which runs
    what it got for 1 s each. Tasks: forwards 0, 1; messages 2, 3; 4 and 5 on c."""
    rows = {TASKS: 6, SUCCESSORS: 4, DEVICES: 3, ORDER: 4, WAYS: 2}
    rows |= dict.fromkeys((WAY_LINKS, WAY_ONCE, WAY_LINES), 2) | {LINK_GB_PER_S: 1, LINK_NUMBERS: 1}
    program = Program(rows, ("a", "b", "c"))
    tasks = program[TASKS]
    for field in ("effect", "at_start", "group", "makes"):
        tasks[field] = -1
    tasks["role"] = [COMPUTE, COMPUTE, FLOW, FLOW, COMPUTE, COMPUTE]
    tasks["resource"] = [0, 1, 0, 1, 2, 2]
    tasks["seconds"] = [1, 1, 2, 2, 1, 1]
    tasks["waits"] = [0, 0, 1, 1, 1, 1]
    tasks["successor"][:4] = np.arange(4)
    tasks["successor_end"][:4] = np.arange(4) + 1
    tasks["kind"], tasks["stage"], tasks["microbatch"] = 1, [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1]
    program[SUCCESSORS][:] = [2, 3, 4, 5]
    program[DEVICES]["order"], program[DEVICES]["order_end"] = [0, 1, 2], [1, 2, 4]
    program[DEVICES]["host"] = program[DEVICES]["step"] = -1
    program[ORDER][:] = [0, 1, *(4 + n for n in order)]
    program[WAYS]["gb_per_s"] = 1.0
    for part in ("link", "once", "line"):
        program[WAYS][part], program[WAYS][f"{part}_end"] = [0, 1], [1, 2]
    program[WAY_LINES][:] = [0, 1]
    program[LINK_GB_PER_S][:] = 1.0
    program[LINK_NUMBERS][:] = 7
    numbers = {"devices": 3, "tasks": 6, "first_late": 6, "ways": 2, "links": 1, "lines": 2}
    for name, value in {**numbers, "line_nodes": 2, "link_nodes": 2, "link_uses": 2}.items():
        program.numbers[name] = value
    return program


def test_messages_share_a_link_and_causes_are_what_was_waited_for_last() -> None:
    times = replay(two_pairs())
    assert times.start_s.tolist() == [0, 0, 1, 1, 5, 6]
    assert times.end_s.tolist() == [1, 1, 5, 5, 6, 7]
    assert times.slowed_by.tolist() == [-1, -1, 7, 7, -1, -1]
    assert times.cause.tolist() == [-1, -1, 0, 1, 2, 4]
    assert times.time_s == 7


def test_memory_for_replays_grows_and_is_used_again() -> None:
    work = Work(two_pairs(), events=1)
    assert replay(two_pairs(), work).time_s == replay(two_pairs(), Work(two_pairs())).time_s == 7


def test_every_device_that_waits_for_ever_is_named() -> None:
    program = two_pairs((1, 0))
    program[TASKS]["waits"][5] = 2
    with pytest.raises(DeadlockError, match="c waits at 1F1"):
        replay(program)


def test_memory_that_is_too_small_is_refused() -> None:
    program, small = two_pairs(), two_pairs()
    small.numbers["tasks"] = 5
    with pytest.raises(ValueError, match="smaller program"):
        replay(program, Work(small))


@entry
def rounded(x: float) -> float:
    return twelve_digits(x)


def test_parts_say_that_python_cannot_call_them() -> None:
    rounded(1.0)
    with pytest.raises(KeyError, match="twelve_digits is called by compiled functions alone"):
        twelve_digits(1.0)


@given(st.floats(1e-9, 1e9) | st.integers(0, 10**6).map(lambda n: (2 * n + 1) / 2**20))
def test_moments_are_rounded_as_text_of_twelve_digits_is(x: float) -> None:
    assert rounded(x) == float(f"{x:.12g}")


PROGRAM = """
import sys; sys.path += [{root!r}, {root!r} + "/tests", {root!r} + "/tests/program"]
import logging; logging.basicConfig()
from test_kernel import two_pairs
from planner.program.replay import replay
print(replay(two_pairs()))
"""


def test_it_is_compiled_once_a_version_and_runs_as_plain_python(tmp_path: Path) -> None:
    def run(**more: str) -> tuple[str, str]:
        words = [sys.executable, "-c", PROGRAM.format(root=str(ROOT))]
        env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | more
        done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    first, told = run()
    assert told.count("Compiling the planner's core") == 1
    assert run() == (first, "")
    assert run(NUMBA_DISABLE_JIT="1") == (first, "")
