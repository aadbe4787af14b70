"""The files of a checkpoint: a ``manifest.json``, and tensors or pieces of them in safetensors.

torch.distributed.checkpoint is not used: its own format unpickles metadata on load, and its
safetensors writer keeps only the last of several pieces of a tensor that one rank writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue
from torch import Tensor

from planner.records.document import Count, Record
from planner.records.formats import JsonFile

MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"step-(\d{8,12})(?:\.(\d{1,6}))?")
"""A checkpoint's folder; a number after a dot where the same step was saved once more."""
_PIECE = re.compile(r"(.*)@([\d,]{0,400})/([\d,]{0,400})", re.DOTALL)


class FileRecord(Record):
    """A file of tensors."""

    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(JsonFile):
    """What a checkpoint says besides its tensors.

    Attributes:
        step: optimizer steps that were done.
        saved_s: when it was completed, in seconds since 1970.
        facts: what else training goes on with, plain JSON: seed, samples seen, digests.
        files: by name, one for each rank that wrote tensors.
    """

    format: Literal["pipeplan-checkpoint/2"] = "pipeplan-checkpoint/2"
    step: Count
    saved_s: Annotated[float, Field(ge=0)]
    facts: dict[str, JsonValue]
    files: dict[Annotated[str, Field(pattern=r"^rank-\d{5}\.safetensors$")], FileRecord]


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is written by itself.

    Attributes:
        offset: its first element, a number for each dimension of the tensor.
        shape: of the whole tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def key(self, name: str) -> str:
        """Return the name that this part of a tensor has in its file."""
        offset, shape = (",".join(map(str, row)) for row in (self.offset, self.shape))
        return f"{name}@{offset}/{shape}"

    @staticmethod
    def of_key(key: str, shape: Sequence[int]) -> tuple[str, Box]:
        """Return the tensor's name, and the place in it of what has this name and shape."""
        match = _PIECE.fullmatch(key)
        if match is None:
            return key, Box((0,) * len(shape), tuple(shape))
        offset, whole = (tuple(int(n) for n in row.split(",") if n) for row in match.groups()[1:])
        return match[1], Box(offset, whole)

    def slices(self, size: Sequence[int]) -> tuple[slice, ...] | None:
        """Return the place of a part of this size, or None if it is not inside of the tensor."""
        if not len(size) == len(self.offset) == len(self.shape):
            return None
        rows = [*zip(self.offset, size, self.shape, strict=True)]
        is_inside = all(begin + own <= whole for begin, own, whole in rows)
        return tuple(slice(begin, begin + own) for begin, own, _ in rows) if is_inside else None


Piece = tuple[Box, Tensor]
"""A part of a tensor, and where it lies."""


def step_folders(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the names of a folder's checkpoints, each with its step and how often it was saved."""
    paths = folder.iterdir() if folder.is_dir() else ()
    rows = ((path, STEP_FOLDER.fullmatch(path.name)) for path in paths)
    return {p.name: (int(m[1]), int(m[2] or 0)) for p, m in rows if m and (p / MANIFEST).exists()}
