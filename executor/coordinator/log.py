"""The coordinator's log: every message that changed something, in order, to go on from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from executor.coordinator.messages import Message, read_message, write_message
from planner.errors import PipeplanError


class MessageLog:
    """Follows a file of messages with their times, and then goes on with it.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_bytes = 0
        self._read_lines = 0
        self._file: BinaryIO | None = None

    def new_messages(self) -> Iterator[tuple[Message, float]]:
        """Messages that were not read before, with their times; not a line that is unfinished.

        Raises:
            PipeplanError: naming the first line that is none.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)
                self._read_lines += 1
                yield self._parsed(line)

    def _parsed(self, line: bytes) -> tuple[Message, float]:
        try:
            at_s, text = json.loads(line)
            return read_message(text.encode()), float(at_s)
        except (ValueError, TypeError, AttributeError, RecursionError, PipeplanError):
            raise PipeplanError(
                f"{self.path}: line {self._read_lines} is no message; name another --log file"
            ) from None

    def open(self) -> None:
        """Begin to write, after what was read: whoever wrote a last line was killed at it."""
        self._file = self.path.open("ab")
        self._file.truncate(self._read_bytes)

    def append(self, message: Message, at_s: float) -> None:
        """Note a message before anything is answered to it."""
        assert self._file is not None
        line = json.dumps([at_s, write_message(message).decode()])
        self._file.write(line.encode() + b"\n")
        self._file.flush()


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Lines for people.

    Args:
        report: the coordinator's.
    """
    yield (
        f"{report['committed']} of {report['total']} work units trained, {report['repeated']} of "
        "them again after a loss"
    )
    for number, incarnation in enumerate(report["incarnations"]):
        done = report["workers"].get(str(number), {})
        failed = report["failed"][number]
        without = f", {failed} exchanges failed" if failed else ""
        came_back = f", came back {incarnation - 1} times" if incarnation > 1 else ""
        away = "" if str(number) in (report["last"] or {}) else ", not there at the end"
        yield (
            f"pipeline {number}: {done.get('committed', 0)} work units, {done.get('lost', 0)} lost"
            f"{without}{came_back}{away}"
        )
