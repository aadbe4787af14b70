"""The coordinator's log: every message that changed something, in order, to go on from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from executor.coordinator.messages import Message, read_message, write_message
from planner.errors import PipeplanError


class Log:
    """Appends messages with their times to a file.

    Args:
        path: of the file; what it holds already is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cut_unfinished_line()
        self._file = path.open("ab")

    def _cut_unfinished_line(self) -> None:
        """Whoever wrote it may have been killed at it."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if data and not data.endswith(b"\n"):
            with self.path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)

    def append(self, message: Message, at_s: float) -> None:
        """Note a message before anything is answered to it."""
        line = json.dumps([at_s, write_message(message).decode()])
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def messages(self) -> Iterator[tuple[Message, float]]:
        """All messages in the file, with their times.

        Raises:
            PipeplanError: naming the first line that is none.
        """
        with self.path.open() as file:
            for number, line in enumerate(file, 1):
                try:
                    at_s, text = json.loads(line)
                    yield read_message(text.encode()), float(at_s)
                except (ValueError, TypeError, AttributeError, PipeplanError):
                    raise PipeplanError(
                        f"{self.path}: line {number} is no message; name another --log file"
                    ) from None
