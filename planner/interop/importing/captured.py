"""The output of other tools as people capture it: styled, in JSON lines, with any line ends."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path

from planner.errors import PipeplanError
from planner.records.document import read_text

_STYLES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
_MESSAGES = ("log", "message", "msg", "textPayload")
"""Fields of the lines of Docker, Google Cloud and others."""
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How files begin that PowerShell's ``>`` writes."""


def plain_text(data: bytes) -> str:
    """Return the beginning of a file as text without styles of a terminal."""
    encoding = "utf-16" if data.startswith(_UTF_16) else "utf-8-sig"
    return _plain(data.decode(encoding, errors="replace"))


def captured_lines(path: Path) -> list[str]:
    """Read the lines of a file without styles of a terminal.

    Raises:
        PipeplanError: if it cannot be read, or is not text.
    """
    try:
        with path.open("rb") as file:
            is_utf_16 = file.read(2) in _UTF_16
        text = path.read_text(encoding="utf-16") if is_utf_16 else read_text(path)
    except (OSError, UnicodeError) as error:
        raise PipeplanError(f"{path}: cannot be read: {error}") from None
    return _plain(text.removeprefix("\ufeff")).splitlines()


def _plain(text: str) -> str:
    if text.lstrip().startswith("{"):
        text = "\n".join(map(_message, text.splitlines()))
    # Web pages have spaces that do not break.
    return _STYLES.sub("", text).replace("\xa0", " ")


def _message(line: str) -> str:
    """Return what was printed, of a line that a container's log driver keeps as JSON."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return line
    found = (data.get(name) for name in _MESSAGES) if isinstance(data, dict) else ()
    return next((text.rstrip("\n") for text in found if isinstance(text, str)), line)
