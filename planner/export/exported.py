"""What an exporter hands out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = "FOLDER"
"""Stands in lines of use for the folder that the files are written into."""


@dataclass(frozen=True)
class Exported:
    """A plan in the words of another tool.

    Attributes:
        files: contents by name, to be written into one folder.
        use: how to run it there, lines for the user; ``FOLDER`` stands for the files' folder, also
            as the Python literal ``"FOLDER"``.
        notes: what of the plan the target does not carry or does otherwise, one line each, with
            its cost as far as it can be predicted.
    """

    files: Mapping[str, str]
    use: tuple[str, ...]
    notes: tuple[str, ...]

    def use_in(self, folder: Path) -> tuple[str, ...]:
        """The lines of use for files in a folder, right from wherever they are run.

        Args:
            folder: that holds the files; its absolute path is told.
        """
        path = str(folder.absolute())
        forms = {FOLDER: shlex.quote(path), f'"{FOLDER}"': json.dumps(path, ensure_ascii=False)}
        return tuple(
            re.sub(f'"{FOLDER}"|{FOLDER}', lambda found: forms[found[0]], row) for row in self.use
        )
