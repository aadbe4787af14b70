"""Reading a checkpoint: single tensors by name, each from files whose digests were checked."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor.checkpoint.manifest import MANIFEST, Box, Manifest, step_folders
from planner.errors import PipeplanError, shorten
from planner.tracing.factory import Form

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stored:
    """A part of a tensor in a file: the file's name, its own name there, and its place."""

    file: str
    key: str
    box: Box
    slices: tuple[slice, ...]


class Checkpoint:
    """A checkpoint that was opened; tensors are read when asked for. Runs no code of the files.

    Attributes:
        folder: where it lies.
        manifest: what it says besides its tensors.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._checked: set[str] = set()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a step's folder, or the newest whole checkpoint of a training's folder.

        Raises:
            PipeplanError: if there is none, or its manifest is not one.
        """
        folder = Path(path)
        if folder.name == MANIFEST:
            folder = folder.parent
        if (folder / MANIFEST).exists():
            return cls(folder, Manifest.load(_regular(folder / MANIFEST)))
        if not folder.is_dir():
            raise PipeplanError(f"{folder}: no such folder; give one that holds checkpoints")
        skipped: list[str] = []
        found = next(cls.newest_first(folder, skipped.append), None)
        if found is None:
            why = "; ".join(skipped) or "there is no folder step-…"
            raise PipeplanError(f"{folder}: no checkpoint: {why}; give one that training wrote")
        for line in skipped:
            logger.warning("%s", line)
        return found

    @classmethod
    def newest_first(
        cls, folder: Path, note: Callable[[str], None], *, after_s: float = 0.0
    ) -> Iterator[Checkpoint]:
        """Yield the whole checkpoints of a training's folder, the one completed last first.

        Args:
            folder: of all checkpoints; may be missing.
            note: called with a line for each that is not whole, which is skipped.
            after_s: leave out those completed earlier, in seconds since 1970.
        """
        for path in sorted(folder.glob(".step-*.writing")):
            note(f"{path} is skipped: the training that wrote it was killed before it was complete")
        found = []
        for name in step_folders(folder):
            try:
                if (folder / name).is_symlink():
                    raise PipeplanError("a link; name the folder that it leads to")
                found.append(cls.open(folder / name))
                for file in found[-1].manifest.files:
                    found[-1]._sized(file)
            except PipeplanError as error:
                note(f"{folder / name} is skipped: {'; '.join(error.problems)}")
                found = [row for row in found if row.folder.name != name]
        found.sort(key=lambda checkpoint: checkpoint.manifest.saved_s, reverse=True)
        yield from (row for row in found if row.manifest.saved_s > after_s)

    @property
    def digest(self) -> str:
        """The SHA-256 of its manifest, which has those of its files."""
        return hashlib.sha256((self.folder / MANIFEST).read_bytes()).hexdigest()

    @property
    def step(self) -> int:
        """Optimizer steps that were done when it was written."""
        return self.manifest.step

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts that training resumes with: seed, samples seen, digests; plain JSON."""
        return self.manifest.facts

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """The names of the tensors that begin with ``prefix``."""
        return tuple(name for name in self._parts if name.startswith(prefix))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read whole tensors.

        Raises:
            PipeplanError: listing the names that are missing, or naming the file that is missing,
                damaged, or a link.
        """
        wanted = list(names)
        missing = [name for name in wanted if name not in self._parts]
        if missing:
            listed = ", ".join(missing[:20]) + (", …" if len(missing) > 20 else "")
            raise PipeplanError(
                f"{self.folder}: {len(missing)} of the tensors asked for are not in the "
                f"checkpoint: {listed}; resume with the model and the optimizer it was trained with"
            )
        return {name: self._whole(name) for name in wanted}

    def read_into(
        self,
        targets: Mapping[str, Tensor],
        own: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
    ) -> None:
        """Read tensors, one at a time, into ones that are there already.

        Args:
            targets: by name.
            own: returns the part of a whole tensor that the target of this name is.

        Raises:
            PipeplanError: as :meth:`read`, and for a tensor of another shape or dtype.
        """
        for name, target in targets.items():
            value = own(name, self.read([name])[name])
            if Form.of(value) != Form.of(target):
                raise PipeplanError(
                    f"{self.folder}: {name} is {Form.of(value)}, the model's is {Form.of(target)}; "
                    "resume with the model, the precision and the model_arguments it was trained "
                    "with"
                )
            with torch.no_grad():
                target.copy_(value)

    def _whole(self, name: str) -> Tensor:
        """Put a tensor together."""
        values = []
        for part in self._parts[name]:
            self._require_digest(part.file)
            values.append((part.slices, self._opened[part.file].get_tensor(part.key)))
        if len(values) == 1:
            return values[0][1]  # type: ignore[no-any-return]
        whole: Tensor = values[0][1].new_zeros(self._parts[name][0].box.shape)
        for slices, value in values:
            whole[slices] = value
        return whole

    @cached_property
    def _opened(self) -> dict[str, Any]:
        """The files, of which no tensor is read yet."""
        found = {}
        for file in self.manifest.files:
            path = self._sized(file)
            try:
                found[file] = safe_open(path, "pt", device="cpu")
            except SafetensorError as error:
                raise PipeplanError(f"{path}: {error}; take another checkpoint") from None
        return found

    @cached_property
    def _parts(self) -> dict[str, list[_Stored]]:
        """The parts of each tensor."""
        found: dict[str, list[_Stored]] = {}
        elements: Counter[str] = Counter()
        for file, opened in self._opened.items():
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                size = opened.get_slice(key).get_shape()
                name, box = Box.of_key(key, size)
                slices = box.slices(size)
                row = found.setdefault(name, [])
                if slices is None or (row and row[0].box.shape != box.shape):
                    raise PipeplanError(
                        f"{self.folder / file}: {shorten(key)} of shape {size} is no part of a "
                        "tensor; take another checkpoint"
                    )
                row.append(_Stored(file, key, box, slices))
                elements[name] += math.prod(size)
        for name, row in found.items():
            whole = math.prod(row[0].box.shape)
            if elements[name] != whole:
                files = ", ".join(part.file for part in row)
                raise PipeplanError(
                    f"{self.folder}: {shorten(name)} has {whole} elements, {elements[name]} of "
                    f"them are in {files}; each has to be there once: take another checkpoint"
                )
        return found

    def _require_digest(self, file: str) -> None:
        if file in self._checked:
            return
        with open(self.folder / file, "rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        if sha256 != self.manifest.files[file].sha256:
            raise PipeplanError(
                f"{self.folder / file}: its SHA-256 is {sha256}, the manifest says "
                f"{self.manifest.files[file].sha256}; the file was changed: copy it again or take "
                "another checkpoint"
            )
        self._checked.add(file)

    def _sized(self, file: str) -> Path:
        path, expected = _regular(self.folder / file), self.manifest.files[file].bytes
        if path.stat().st_size != expected:
            raise PipeplanError(
                f"{path}: {path.stat().st_size} bytes, the manifest says {expected}; the file was "
                "cut off or changed: copy it again or take another checkpoint"
            )
        return path


def _regular(path: Path) -> Path:
    """Return the path of a file that is neither a link nor a pipe."""
    if path.is_symlink() or not path.is_file():
        raise PipeplanError(
            f"{path}: not a file of the checkpoint itself; copy all of its folder, without links"
        )
    return path
