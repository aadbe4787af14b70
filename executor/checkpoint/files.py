"""File operations that survive a crash: what has been done stays done, in the order it was done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
