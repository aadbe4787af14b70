"""Writing a checkpoint: every rank its shard, rank 0 the manifest, all of it under one rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from executor.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    NAMES,
    STEP_FOLDER,
    Manifest,
    folder_name,
    records_of,
    shard_name,
)
from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import step_folders
from planner.errors import PipeplanError, shorten
from planner.records.document import umask


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Replace a file at once: a crash leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    write_durably(temporary, content)
    os.replace(temporary, path)
    sync(path.parent)


def rename_durably(before: Path, after: Path) -> None:
    """Give a folder its name and wait until the name is on disk."""
    os.rename(before, after)
    sync(after.parent)


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; it writes their names itself.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(folder: Path) -> None:
    """Remove a folder that nobody finds under its name while it is half gone."""
    if not folder.name.startswith("."):
        hidden = folder.with_name(f".{folder.name}.removed")
        if hidden.exists():
            shutil.rmtree(hidden)
        os.rename(folder, hidden)
        folder = hidden
    shutil.rmtree(folder)


_LEFTOVER = re.compile(rf"\.{STEP_FOLDER.pattern}\.(?:[0-9a-f]{{16}}\.writing|removed)")


def save_checkpoint(
    folder: str | Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    *,
    ranks: Ranks | None = None,
    keep: int | None = None,
) -> Path:
    """Write the checkpoint of a step; every rank calls this with what it alone writes.

    A crash at any moment leaves the checkpoints before it as they were: shards and manifest are
    written into a hidden folder, which is renamed when it is whole; then the file ``latest`` names
    it, and only then old ones are removed.

    Args:
        folder: of all checkpoints of the training; made if missing. All ranks must see it.
        step: optimizer steps that were done.
        tensors: this rank's, by name; the lowest-ranked holder passes a tensor, others leave it.
        facts: plain JSON that training goes on with; rank 0's are written.
        ranks: who writes together, default this process alone.
        keep: how many checkpoints stay, this one included; default all. Those of early steps go;
            those of later steps, which an abandoned run left, are never removed.

    Returns:
        The checkpoint's folder.

    Raises:
        PipeplanError: on every rank, if any rank cannot write; ``latest`` stays as it was then.
    """
    if keep is not None and keep < 1:
        raise PipeplanError(f"keep: {keep} checkpoints; keep at least 1")
    return _Writer(Path(folder), step, ranks or Ranks.alone()).save(tensors, facts, keep)


@dataclass(frozen=True)
class _Writer:
    folder: Path
    step: int
    ranks: Ranks

    def save(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int | None
    ) -> Path:
        hidden = self.folder / self.ranks.on_first(self._make_hidden_folder)
        try:
            parts = self.ranks.together(lambda: self._write_shard(hidden, tensors))
            name: str = self.ranks.on_first(lambda: self._finish(hidden, parts, facts))
        except PipeplanError:
            # All ranks are here: nobody writes into it any more.
            if self.ranks.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            raise
        self.ranks.on_first(lambda: _tidy(self.folder, self.folder / name, self.step, keep))
        return self.folder / name

    def _make_hidden_folder(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        # No rank can take a folder of another attempt, or one on its own disk, for this one.
        name = f".{folder_name(self.step)}.{secrets.token_hex(8)}.writing"
        (self.folder / name).mkdir()
        return name

    def _write_shard(self, hidden: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        if not hidden.is_dir():
            raise PipeplanError(_not_shared(self.folder, f"the folder {hidden.name}"))
        if not tensors:
            return None
        file = shard_name(self.ranks.rank)
        held = _on_their_own(tensors)
        save_file(held, hidden / file)
        # The library makes it private; whoever may read the manifest may read the shards.
        (hidden / file).chmod(0o666 & ~umask())
        sync(hidden / file)
        with open(hidden / file, "rb") as shard:
            sha256 = hashlib.file_digest(shard, "sha256").hexdigest()
        records = records_of(held, file)
        return {
            "file": file,
            "shard": {"bytes": (hidden / file).stat().st_size, "sha256": sha256},
            "tensors": {name: record.model_dump(mode="json") for name, record in records.items()},
        }

    def _finish(
        self, hidden: Path, parts: Sequence[Mapping[str, Any] | None], facts: Mapping[str, Any]
    ) -> str:
        manifest = self._manifest([part for part in parts if part is not None], facts)
        for file, shard in manifest.shards.items():
            path = hidden / file
            if not path.is_file() or path.stat().st_size != shard.bytes:
                raise PipeplanError(_not_shared(self.folder, f"the shard {file}"))
        write_durably(hidden / MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())
        sync(hidden)
        name = self._free_name()
        rename_durably(hidden, self.folder / name)
        name_latest(self.folder / name)
        return name

    def _manifest(self, parts: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Manifest:
        shards = {part["file"]: part["shard"] for part in parts}
        tensors: dict[str, Any] = {}
        for part in parts:
            for name, record in part["tensors"].items():
                if name in tensors:
                    raise PipeplanError(
                        f"tensor {shorten(name)} is written by two ranks, into "
                        f"{tensors[name]['shard']} and {part['file']}; pass it on one of them"
                    )
                tensors[name] = record
        data = {"format": "pipeplan-checkpoint/1", "step": self.step, "facts": _plain(facts)}
        return Manifest.parse({**data, "shards": shards, "tensors": tensors}, "checkpoint")

    def _free_name(self) -> str:
        again = 0
        while (self.folder / folder_name(self.step, again)).exists():
            again += 1
        return folder_name(self.step, again)


def _on_their_own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous on the CPU, each with memory of its own, as safetensors wants them."""
    held: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise PipeplanError(
                f"tensor {shorten(name)}: a checkpoint holds no {tensor.dtype}; expected one of "
                f"{', '.join(NAMES.values())}"
            )
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in memory or storage.nbytes() != value.nbytes:
            value = value.clone()
        memory.add(value.untyped_storage().data_ptr())
        held[name] = value
    return held


def _plain(facts: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(facts), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise PipeplanError(
            f"facts of the checkpoint: {error}; expected plain JSON values, finite numbers"
        ) from None


def _not_shared(folder: Path, missing: str) -> str:
    return (
        f"{folder}: {missing}, which another rank has written, is not there or not whole; "
        "give a checkpoint folder on a file system that all hosts share"
    )


def _tidy(folder: Path, written: Path, step: int, keep: int | None) -> None:
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            remove_folder(path)
    for path in _old(folder, written, step)[keep - 1 :] if keep is not None else ():
        remove_folder(path)


def _old(folder: Path, written: Path, step: int) -> list[Path]:
    """The other checkpoints up to a step, those to keep longest first."""
    rows = [(row[0] < step, row, folder / name) for name, row in step_folders(folder).items()]
    rows = [row for row in rows if row[1][0] <= step and row[2] != written]
    return [path for *_, path in sorted(rows, reverse=True) if not path.is_symlink()]


def name_latest(checkpoint: Path) -> None:
    """Let ``latest`` name a checkpoint of its folder: a training resumes from it."""
    replace_durably(checkpoint.parent / LATEST, f"{checkpoint.name}\n".encode())
