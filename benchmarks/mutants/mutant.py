"""A mutant: a source file with a small fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A source file with one expression or statement changed.

    Attributes:
        room: whose code it is.
        path: of the file.
        line: where the changed code begins, from 1.
        last_line: where it ends.
        before: the code that was changed.
        after: what stands in its place.
        source: the whole file, changed.
    """

    room: str
    path: Path
    line: int
    last_line: int
    before: str
    after: str
    source: str
