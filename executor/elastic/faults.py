"""Faults on purpose: a pipeline that dies, stops or hangs at a step, to see that others go on.

They are written as calls, several with spaces between: ``fail_at(2,5) stop_in(1,9,3)``. The first
argument is the pipeline, from 0, the second its step, from 1. ``_at`` happens as the step begins,
``_in`` while its averages are under way:

- ``fail_at``, ``fail_in``: the process is killed (SIGKILL).
- ``stop_at``, ``stop_in``: it is stopped (SIGSTOP) for so many seconds, the third argument.
- ``hang_at``, ``hang_in``: it does nothing for so many seconds, and still gives signs of life.
- ``return_at(PIPELINE,SECONDS)``: when it is started again, it waits for so long first.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.errors import PipeplanError

_CALL = re.compile(r"([a-z]+)_(at|in)\(([^()]*)\)")
_STOPS = "(PIPELINE,STEP,SECONDS)", "(2,5,3)"
_FAILS = "(PIPELINE,STEP)", "(2,5)"
_FORMS = {
    **{"fail_at": _FAILS, "fail_in": _FAILS, "stop_at": _STOPS, "stop_in": _STOPS},
    **{"hang_at": _STOPS, "hang_in": _STOPS, "return_at": ("(PIPELINE,SECONDS)", "(2,3)")},
}
"""The arguments of each kind of fault, and an example."""
_MOST_S = 1e6


@dataclass(frozen=True)
class InjectedFault:
    """One of them.

    Attributes:
        kind: ``fail``, ``stop``, ``hang`` or ``return``.
        moment: ``at`` or ``in``.
        pipeline: that it happens to.
        step: when; 0 of a return.
        seconds: how long, where that has a meaning.
        word: the fault as it was written.
    """

    kind: str
    moment: str
    pipeline: int
    step: int = 0
    seconds: float = 0.0
    word: str = field(default="", compare=False)


def parse_faults(text: str, pipelines: int | None = None) -> tuple[InjectedFault, ...]:
    """Read faults.

    Args:
        text: calls with spaces between.
        pipelines: how many there are; None: it is not known.

    Raises:
        PipeplanError: naming the word that is none, or happens to a pipeline that there is not.
    """
    faults = tuple(map(_fault, text.split()))
    for fault in faults:
        if pipelines is not None and fault.pipeline >= pipelines:
            raise PipeplanError(
                f"inject: {fault.word!r}: there is no pipeline {fault.pipeline}; the plan has "
                f"pipelines 0 to {pipelines - 1}"
            )
    return faults


def _fault(word: str) -> InjectedFault:
    call = _CALL.fullmatch(word)
    name = f"{call[1]}_{call[2]}" if call else ""
    if call is None or name not in _FORMS:
        forms = ", ".join(f"{name}{form}" for name, (form, _) in _FORMS.items())
        raise PipeplanError(
            f"inject: {word!r} is no fault; write a call without spaces, such as fail_at(2,5), "
            f"one of {forms}"
        )
    form, example = _FORMS[name]
    remedy = f"write {name}{form}, such as {name}{example}"
    names, texts = form.strip("()").split(","), call[3].split(",")
    if len(texts) != len(names):
        raise PipeplanError(f"inject: {word!r} is no fault; {remedy}")
    values = {
        argument: _number(word, argument, text, remedy)
        for argument, text in zip(names, texts, strict=True)
    }
    step, seconds = int(values.get("STEP", 0)), float(values.get("SECONDS", 0))
    return InjectedFault(call[1], call[2], int(values["PIPELINE"]), step, seconds, word)


def _number(word: str, name: str, text: str, remedy: str) -> float:
    is_whole, least = name != "SECONDS", 1 if name == "STEP" else 0
    try:
        value = int(text) if is_whole else float(text)
    except ValueError:
        wanted = "a whole number" if is_whole else "a number"
        raise PipeplanError(
            f"inject: {word!r}: {name} is {text!r}, not {wanted}; {remedy}"
        ) from None
    if not least <= value < (math.inf if is_whole else _MOST_S):
        wanted = f"{least} or more" + ("" if is_whole else f" and less than {_MOST_S:g}")
        raise PipeplanError(f"inject: {word!r}: {name} is {text}, expected {wanted}; {remedy}")
    return value


class Faults:
    """Lets the faults of one pipeline happen at their steps.

    Args:
        faults: of all pipelines.
        pipeline: this one.
        note: called with every fault that is about to happen.
    """

    def __init__(
        self,
        faults: Sequence[InjectedFault],
        pipeline: int,
        note: Callable[[InjectedFault], object],
    ) -> None:
        self._faults = [fault for fault in faults if fault.pipeline == pipeline]
        self._note = note
        self._step = 0

    def before_hello(self, is_back: bool) -> None:
        """The pipeline is about to take part, perhaps again."""
        for fault in self._faults:
            if fault.kind == "return" and is_back:
                self._note(fault)
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
                self._note(fault)
                _happen(fault)


def _happen(fault: InjectedFault) -> None:
    if fault.kind == "fail":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "hang":
        time.sleep(fault.seconds)
    else:
        # A stopped process cannot wake itself.
        wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
