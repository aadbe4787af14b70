"""Reading a checkpoint: single tensors by name, each from a shard whose digest was checked."""

from __future__ import annotations

import hashlib
import logging
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor.checkpoint.manifest import (
    DTYPES,
    LATEST,
    MANIFEST,
    NAMES,
    NOTHING,
    STEP_FOLDER,
    Manifest,
    TensorRecord,
)
from planner.errors import PipeplanError, shorten
from planner.records.document import read_json, read_text
from planner.tracing.factory import Form

logger = logging.getLogger(__name__)
Note = Callable[[str], None]
"""Called with a line for the user."""


class Share(Protocol):
    """The part of a tensor that a member of a tensor-parallel group holds."""

    def of(self, whole: Tensor) -> Tensor:
        """Return the part."""

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the whole tensor's shape, given the part's."""


class Checkpoint:
    """A checkpoint that was opened; tensors are read when asked for. Runs no code of the file.

    Attributes:
        folder: where it lies.
        manifest: what it holds.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._checked: set[str] = set()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a step's folder, or the latest checkpoint of a training's folder.

        Raises:
            PipeplanError: if there is none, or its manifest is not one.
        """
        folder = Path(path)
        if folder.name == MANIFEST and folder.is_file():
            folder = folder.parent
        if (folder / MANIFEST).exists():
            manifest = _regular(folder / MANIFEST, folder)
            return cls(folder, Manifest.parse(read_json(manifest), str(manifest)))
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
        cls, folder: Path, note: Note, *, of_this_run: bool = False
    ) -> Iterator[Checkpoint]:
        """Yield the whole checkpoints of a training's folder, the one to resume from first.

        That is the one that ``latest`` names, or a later one that was completed after it.

        Args:
            folder: of all checkpoints; may be missing.
            note: called with a line for each that is not whole, which is skipped.
            of_this_run: leave out those beside which the last run began anew.
        """
        for path in sorted(folder.glob(".step-*.writing")):
            note(f"{path} is skipped: the training that wrote it was killed before it was complete")
        for name in _newest_first(folder, note, of_this_run=of_this_run):
            try:
                yield cls._whole(folder / name)
            except PipeplanError as error:
                note(f"{folder / name} is skipped: {'; '.join(error.problems)}")

    @classmethod
    def _whole(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint whose shards are all there in their size.

        Raises:
            PipeplanError: if one is not, or the folder is a link.
        """
        if folder.resolve().parent != folder.parent.resolve():
            raise PipeplanError("a link that leads out of its folder; name the folder it leads to")
        found = cls.open(folder)
        for shard in found.manifest.shards:
            found._require_size(shard)
        return found

    @property
    def digest(self) -> str:
        """The SHA-256 of its manifest, which has those of its shards."""
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
        return tuple(name for name in self.manifest.tensors if name.startswith(prefix))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors; only the shards that hold them are opened, and their digests checked.

        Raises:
            PipeplanError: listing the names that are missing, or naming the shard that is missing,
                damaged, or leads out of the folder.
        """
        wanted = list(names)
        self._require_present(wanted)
        found = dict(self._tensors(wanted))
        return {name: found[name] for name in wanted}

    def read_into(
        self, targets: Mapping[str, Tensor], shares: Mapping[str, Share] | None = None
    ) -> None:
        """Read tensors into ones that are there already, of the same shape and dtype.

        Nothing is changed unless all names are there in these forms and every shard is whole.

        Args:
            targets: by name.
            shares: of targets that hold a part of the tensor, by name.

        Raises:
            PipeplanError: as :meth:`read`, and for every tensor of another shape or dtype.
        """
        shares = shares or {}
        self._require_present(targets)
        problems = [
            f"{self.folder}: {name} is {self.manifest.tensors[name].form}, the model's is "
            f"{Form.of(target)}; resume with the model, the precision and the model_arguments "
            "it was trained with"
            for name, target in targets.items()
            if not _fits(self.manifest.tensors[name], target, shares.get(name))
        ]
        if problems:
            raise PipeplanError(problems)
        for shard in {self.manifest.tensors[name].shard for name in targets}:
            self._check(shard)
        with torch.no_grad():
            for name, tensor in self._tensors(targets):
                targets[name].copy_(shares[name].of(tensor) if name in shares else tensor)

    def _require_present(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self.manifest.tensors]
        if missing:
            listed = ", ".join(missing[:20]) + (", …" if len(missing) > 20 else "")
            raise PipeplanError(
                f"{self.folder}: {len(missing)} of the tensors asked for are not in the "
                f"checkpoint: {listed}; resume with the model and the optimizer it was trained with"
            )

    def _tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors one by one, each shard opened once."""
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.manifest.tensors[name].shard, []).append(name)
        for shard, held in by_shard.items():
            path = self._check(shard)
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in held:
                        tensor = file.get_tensor(name)
                        self._require_form(path, name, tensor)
                        yield name, tensor
            except SafetensorError as error:
                raise PipeplanError(f"{path}: {error}; take another checkpoint") from None

    def _require_form(self, path: Path, name: str, tensor: Tensor) -> None:
        record = self.manifest.tensors[name]
        if not _fits(record, tensor):
            found = f"{NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
            raise PipeplanError(
                f"{path}: {shorten(name)} is {found}, the manifest says {record.form}; take "
                "another checkpoint"
            )

    def _check(self, shard: str) -> Path:
        """The path of a shard that is what the manifest says, byte by byte."""
        path = self.folder / shard
        if shard in self._checked:
            return path
        self._require_size(shard)
        expected = self.manifest.shards[shard]
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != expected.sha256:
            raise PipeplanError(
                f"{path}: its SHA-256 is {sha256}, the manifest says {expected.sha256}; the file "
                "was changed: copy it again or take another checkpoint"
            )
        self._checked.add(shard)
        return path

    def _require_size(self, shard: str) -> None:
        path, expected = self.folder / shard, self.manifest.shards[shard].bytes
        size = _regular(path, self.folder).stat().st_size
        if size != expected:
            raise PipeplanError(
                f"{path}: {size} bytes, the manifest says {expected}; the file was cut off "
                "or changed: copy it again or take another checkpoint"
            )


def _fits(record: TensorRecord, tensor: Tensor, share: Share | None = None) -> bool:
    shape = tuple(tensor.shape) if share is None else share.whole_shape(tensor.shape)
    return record.shape == shape and DTYPES[record.dtype] == tensor.dtype


def _regular(path: Path, folder: Path) -> Path:
    """The path, if it is a file and lies in the folder itself."""
    if path.resolve().parent != folder.resolve():
        raise PipeplanError(
            f"{path}: a link that leads out of the checkpoint, to {path.resolve()}; put the file "
            "itself there"
        )
    if not path.exists():
        raise PipeplanError(
            f"{path}: no such file; the checkpoint is not whole: copy all of its folder"
        )
    if not stat.S_ISREG(path.stat().st_mode):
        raise PipeplanError(f"{path}: not a regular file; take another checkpoint")
    return path


def step_folders(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the names of a folder's checkpoints, each with its step and how often it was saved."""
    paths = folder.iterdir() if folder.is_dir() else ()
    rows = ((path, STEP_FOLDER.fullmatch(path.name)) for path in paths)
    return {p.name: (int(m[1]), int(m[2] or 0)) for p, m in rows if m and (p / MANIFEST).exists()}


def _newest_first(folder: Path, note: Note, *, of_this_run: bool) -> list[str]:
    """Return the names of a folder's checkpoints, those that were completed last first."""
    steps, latest = step_folders(folder), folder / LATEST
    named, written_ns = "", 0
    if latest.is_file():
        named, written_ns = read_text(latest).strip(), latest.stat().st_mtime_ns
    # Who is killed after completing a checkpoint has not named it yet.
    unnamed = {n for n in steps if (folder / n / MANIFEST).stat().st_mtime_ns > written_ns}
    if named == NOTHING:
        return sorted(unnamed if of_this_run else steps, key=steps.__getitem__, reverse=True)
    if named and named not in steps:
        note(f"{latest} names {shorten(named)}, which is no checkpoint of {folder}")

    def key(name: str) -> tuple[bool, bool, tuple[int, int]]:
        is_later = named in steps and steps[name] > steps[named] and name in unnamed
        return is_later, name == named, steps[name]

    return sorted(steps, key=key, reverse=True)
