"""Faults on purpose: a pipeline that dies, stops or hangs at a step, to see that others go on.

They are written as calls, several with spaces between: ``fail_at(2,5) stop_in(1,9,3)``. The first
argument is the pipeline, the second its step. ``_at`` happens as the step begins, ``_in`` while
its averages are under way:

- ``fail_at``, ``fail_in``: the process is killed (SIGKILL).
- ``stop_at``, ``stop_in``: it is stopped (SIGSTOP) for so many seconds, the third argument.
- ``hang_at``, ``hang_in``: it does nothing for so many seconds, and still gives signs of life.
- ``return_at(PIPELINE,SECONDS)``: when it is started again, it waits for so long first.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.errors import PipeplanError

_CALL = re.compile(r"([a-z_]+)\(([^()]*)\)")
_ARGUMENTS = {
    "fail_at": 2,
    "fail_in": 2,
    "stop_at": 3,
    "stop_in": 3,
    "hang_at": 3,
    "hang_in": 3,
    "return_at": 2,
}


@dataclass(frozen=True)
class Fault:
    """One of them.

    Attributes:
        kind: ``fail``, ``stop``, ``hang`` or ``return``.
        moment: ``at`` or ``in``.
        pipeline: that it happens to.
        step: when; 0 of a return.
        seconds: how long, where that has a meaning.
    """

    kind: str
    moment: Literal["at", "in"]
    pipeline: int
    step: int
    seconds: float


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read faults.

    Raises:
        PipeplanError: naming the word that is none.
    """
    found = []
    for word in text.split():
        call = _CALL.fullmatch(word)
        name = call.group(1) if call else ""
        numbers = call.group(2).split(",") if call else []
        if name not in _ARGUMENTS or len(numbers) != _ARGUMENTS[name]:
            known = ", ".join(f"{n} with {count}" for n, count in _ARGUMENTS.items())
            raise PipeplanError(
                f"inject: {word!r} is no fault; expected a call without spaces, of {known} numbers"
            )
        found.append(_fault(word, name, numbers))
    return tuple(found)


def _fault(word: str, name: str, numbers: Sequence[str]) -> Fault:
    kind, _, moment = name.partition("_")
    try:
        pipeline = int(numbers[0])
        step = 0 if kind == "return" else int(numbers[1])
        seconds = 0.0 if kind == "fail" else float(numbers[-1])
    except ValueError:
        raise PipeplanError(f"inject: {word!r} has arguments that are no numbers") from None
    if pipeline < 0 or step < 0 or not 0 <= seconds < 1e6:
        raise PipeplanError(f"inject: {word!r} has arguments out of range")
    return Fault(kind, "in" if moment == "in" else "at", pipeline, step, seconds)


class Faults:
    """The faults of one pipeline, to be told where it is.

    Args:
        faults: of all pipelines.
        pipeline: this one.
    """

    def __init__(self, faults: Sequence[Fault] = (), pipeline: int = 0) -> None:
        self._faults = [fault for fault in faults if fault.pipeline == pipeline]
        self._step = 0

    def before_hello(self, is_back: bool) -> None:
        """The pipeline is about to take part, perhaps again."""
        for fault in self._faults:
            if fault.kind == "return" and is_back:
                time.sleep(fault.seconds)

    def at(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self._happen("at")

    def inside(self) -> None:
        """The averages of the step are under way."""
        self._happen("in")

    def _happen(self, moment: str) -> None:
        for fault in self._faults:
            if fault.moment == moment and fault.step == self._step and fault.kind != "return":
                _happen(fault)


def _happen(fault: Fault) -> None:
    if fault.kind == "fail":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "hang":
        time.sleep(fault.seconds)
    else:
        # A stopped process cannot wake itself.
        wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
