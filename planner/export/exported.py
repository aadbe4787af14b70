"""What an exporter hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Exported:
    """A plan in the words of another tool.

    Attributes:
        files: contents by name, to be written into one folder.
        use: how to run it there, lines for the user.
        notes: what of the plan the target does not carry or does otherwise, one line each, with
            its cost as far as it can be predicted.
    """

    files: Mapping[str, str]
    use: tuple[str, ...]
    notes: tuple[str, ...]
