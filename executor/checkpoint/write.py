"""Writing a checkpoint: every rank its file, rank 0 the manifest, all of it under one rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from executor.checkpoint.manifest import MANIFEST, STEP_FOLDER, Manifest, Piece, step_folders
from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from planner.errors import PipeplanError
from planner.records.document import umask

_LEFTOVER = re.compile(rf"\.{STEP_FOLDER.pattern}\.(?:[0-9a-f]{{16}}\.writing|removed)")


def save_checkpoint(
    folder: str | Path,
    step: int,
    tensors: Mapping[str, Tensor | Sequence[Piece]],
    facts: Mapping[str, Any],
    *,
    ranks: Ranks | None = None,
    keep: int | None = None,
) -> Path:
    """Write the checkpoint of a step; every rank calls this with what it alone writes.

    A crash at any moment leaves the checkpoints before it as they were: all files are written into
    a hidden folder, which is renamed when it is whole, and only then old ones are removed.

    Args:
        folder: of all checkpoints of the training; made if missing. All ranks must see it.
        step: optimizer steps that were done.
        tensors: this rank's, by name: whole ones or pieces. Those of all ranks make up each tensor,
            without overlaps.
        facts: plain JSON that training goes on with; rank 0's are written.
        ranks: who writes together, default this process alone.
        keep: how many checkpoints stay, this one included; default all. Those of early steps go;
            those of later steps, which an abandoned run left, are never removed.

    Returns:
        The checkpoint's folder.

    Raises:
        PipeplanError: on every rank, if any rank cannot write; nothing is left of the attempt then.
    """
    if keep is not None and keep < 1:
        raise PipeplanError(f"keep: {keep} checkpoints; keep at least 1")
    root, ranks = Path(folder), ranks or Ranks.alone()
    hidden = root / ranks.on_first(lambda: _make_hidden_folder(root, step))
    try:
        files = ranks.together(lambda: _write_tensors(hidden, ranks.rank, tensors))
        name: str = ranks.on_first(lambda: _finish(hidden, step, dict(filter(None, files)), facts))
    except PipeplanError:
        # All ranks are here: nobody writes into it any more.
        if ranks.rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)
        raise
    ranks.on_first(lambda: _tidy(root, name, step, keep))
    return root / name


def _make_hidden_folder(root: Path, step: int) -> str:
    root.mkdir(parents=True, exist_ok=True)
    # No rank can take a folder of another attempt, or one on its own disk, for this one.
    name = f".step-{step:08d}.{secrets.token_hex(8)}.writing"
    (root / name).mkdir()
    return name


def _write_tensors(
    hidden: Path, rank: int, tensors: Mapping[str, Tensor | Sequence[Piece]]
) -> tuple[str, Mapping[str, Any]] | None:
    """Write a rank's file; return its name and its entry in the manifest, None without tensors."""
    if not hidden.is_dir():
        raise _not_shared(hidden, "folder")
    own = _with_memory_of_their_own(tensors)
    if not own:
        return None
    path = hidden / f"rank-{rank:05d}.safetensors"
    try:
        save_file(own, path)
    except KeyError as error:
        raise PipeplanError(f"a checkpoint holds no tensors of type {error.args[0]}") from None
    # The library makes it private; whoever may read the manifest may read the tensors.
    path.chmod(0o666 & ~umask())
    _sync(path)
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return path.name, {"bytes": path.stat().st_size, "sha256": sha256}


def _with_memory_of_their_own(
    tensors: Mapping[str, Tensor | Sequence[Piece]],
) -> dict[str, Tensor]:
    """Return tensors by their names in a file, contiguous on the CPU, as the library wants them."""
    flat: dict[str, Tensor] = {}
    for name, given in tensors.items():
        if isinstance(given, Tensor):
            flat[name] = given
        else:
            flat.update((box.key(name), value) for box, value in given)
    memory: set[int] = set()
    for key, tensor in flat.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in memory or storage.nbytes() != value.nbytes:
            value = value.clone()
        memory.add(value.untyped_storage().data_ptr())
        flat[key] = value
    return flat


def _finish(hidden: Path, step: int, files: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Write the manifest and give the folder its name, which is returned."""
    for file in files:
        if not (hidden / file).is_file():
            raise _not_shared(hidden, f"file {file}")
    try:
        plain = json.loads(json.dumps(dict(facts), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise PipeplanError(
            f"facts of the checkpoint: {error}; expected plain JSON values, finite numbers"
        ) from None
    manifest = Manifest.parse(
        {
            "format": "pipeplan-checkpoint/2",
            "step": step,
            "saved_s": time.time(),
            "facts": plain,
            "files": files,
        }
    )
    Checkpoint(hidden, manifest).names()  # Refuses tensors of which parts are missing or doubled.
    (hidden / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
    _sync(hidden / MANIFEST)
    _sync(hidden)
    name, again = f"step-{step:08d}", 0
    while (hidden.parent / name).exists():
        again += 1
        name = f"step-{step:08d}.{again}"
    os.rename(hidden, hidden.parent / name)
    _sync(hidden.parent)
    return name


def _sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; it writes their names itself.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _not_shared(hidden: Path, missing: str) -> PipeplanError:
    return PipeplanError(
        f"{hidden.parent}: the {missing}, which another rank has written, is not there; give a "
        "checkpoint folder on a file system that all hosts share"
    )


def _tidy(root: Path, written: str, step: int, keep: int | None) -> None:
    """Remove what killed trainings left, and old checkpoints but the latest ``keep``."""
    for path in root.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    rows = step_folders(root)
    others = [name for name in rows if rows[name][0] <= step and name != written]
    # Another one of the same step goes first: this one has taken its place.
    others.sort(key=lambda name: (rows[name][0] < step, rows[name]), reverse=True)
    for name in others[keep - 1 :] if keep is not None else ():
        # Nobody finds it under its name while it is half gone.
        hidden = root / f".{name}.removed"
        os.rename(root / name, hidden)
        shutil.rmtree(hidden)
