"""The files that one iteration of training passes through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


class EnteredFiles:
    """Notes which files of a folder the iterations of a training pass through.

    An iteration lasts from the end of one optimizer step to the end of the next. Its files are
    those whose functions are called meanwhile, in any thread, and those on the call stack at its
    end. What comes before the end of the first step, preparations among it, does not count, nor
    does what follows the last.

    Args:
        folder: absolute.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self._steps = 0
        self._called: set[str] = set()
        self._found: set[str] = set()

    @property
    def files(self) -> list[str]:
        """The files of all iterations so far, relative to the folder."""
        return sorted(path.removeprefix(self._folder) for path in self._found)

    def watch(self, work: Callable[[], Any]) -> Any:
        """Return the result of a function, watching the calls that it makes."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            return work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def end_step(self) -> None:
        """Note the end of an optimizer step; to be called inside of it."""
        if self._steps:
            self._found |= self._called | self._on_the_stack()
        self._steps += 1
        self._called.clear()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(self._folder):
            self._called.add(path)

    def _on_the_stack(self) -> set[str]:
        paths = set()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            paths.add(frame.f_code.co_filename)
            frame = frame.f_back
        return {path for path in paths if path.startswith(self._folder)}
