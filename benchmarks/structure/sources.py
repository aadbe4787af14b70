"""Python files of packages, parsed, and the size of folders."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """A parsed Python file.

    Attributes:
        name: dotted, that of the package for an ``__init__.py``.
        package: what relative imports start from.
        path: of the file.
        tree: its syntax tree.
    """

    name: str
    package: str
    path: Path
    tree: ast.Module


@dataclass(frozen=True)
class Size:
    """How large a folder is.

    Attributes:
        lines: of its Python files.
        files: in it and below, of any kind.
        loose: Python files directly in it.
    """

    lines: int
    files: int
    loose: int


def read_modules(root: Path, package: str) -> list[Module]:
    """Return the modules of a package that lies in a folder."""
    return [_read(root, path) for path in sorted((root / package).rglob("*.py"))]


def _read(root: Path, path: Path) -> Module:
    parts = path.relative_to(root).with_suffix("").parts
    package = ".".join(parts[:-1])
    name = package if parts[-1] == "__init__" else ".".join(parts)
    return Module(name, package, path, ast.parse(path.read_text("utf-8"), str(path)))


def folder_size(folder: Path) -> Size:
    """Return the size of a folder, without what Python caches in it."""
    files = [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in files if path.suffix == ".py")
    return Size(lines, len(files), sum(1 for _ in folder.glob("*.py")))
