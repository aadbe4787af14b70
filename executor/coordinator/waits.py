"""What one rank waited for, as lines of JSON: whom, why, and for how long."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEAST_S = 0.25
"""A shorter wait is not noted."""


class WaitLog:
    """Notes the long waits of one rank, whose threads may wait at the same time.

    A line has ``at_s``, when the wait began on the monotonic clock, which the processes of a
    machine share; ``seconds``; ``pipeline`` and ``place`` of the rank; ``why``; ``whom``, numbers
    of pipelines; and ``outcome``, the name of the error that ended it, or ``answered``.

    Args:
        path: of a file that several ranks may add to; None: nothing is noted.
        pipeline, place: of the rank.
    """

    def __init__(self, path: Path | None = None, pipeline: int = 0, place: int = 0) -> None:
        self._path = path
        self._rank = {"pipeline": pipeline, "place": place}

    @contextmanager
    def waiting(self, why: str, *whom: int) -> Iterator[list[int]]:
        """Within this context the thread waits.

        Args:
            why: in a word, such as ``push``.
            whom: pipelines that are waited for, as far as that is known before.

        Yields:
            ``whom`` as a list, to add those to who turn out to have been waited for.
        """
        begin_s, found, outcome = time.monotonic(), list(whom), "answered"
        try:
            yield found
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            seconds = time.monotonic() - begin_s
            if self._path is not None and seconds >= LEAST_S:
                told = {"why": why, "whom": found, "outcome": outcome}
                self._add(self._path, {"at_s": begin_s, "seconds": seconds, **self._rank, **told})

    def _add(self, path: Path, row: dict[str, object]) -> None:
        # In one write, so that lines of several processes stay apart.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, json.dumps(row).encode() + b"\n")
        finally:
            os.close(file)
