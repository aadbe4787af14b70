"""A sweep's folder: plans and their index, written as they are found."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.sweep_index import INDEX_NAME, MOST_KEPT_POINTS, Point, SweepIndex, SweptPoint
from planner.verification import save_valid


class SweepFolder:
    """The results so far, and where more are written; a context that excludes other sweeps.

    Args:
        path: of the folder; made if there is none.
        asked: an index of what is swept now, without points.
        points: that are asked for.

    Raises:
        PipeplanError: if it cannot be made, holds other files, points of another sweep or too many
            points, or another process sweeps in it.
    """

    def __init__(self, path: str | Path, asked: SweepIndex, points: Sequence[Point]) -> None:
        self.path = Path(path)
        require_folder(self.path)
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise PipeplanError(
                f"{self.path}: the folder cannot be made: {error.strerror}"
            ) from None
        self._index_path = self.path / INDEX_NAME
        self._lock = _locked(self.path)
        try:
            self._index = _joined(self._index_path, asked)
            self._found = {row.point: row for row in self._index.points}
            if len(self._found.keys() | points) > MOST_KEPT_POINTS:
                raise PipeplanError(
                    f"{self._index_path}: has {len(self._found):,} points, and more than "
                    f"{MOST_KEPT_POINTS:,} are not supported; sweep into another folder"
                )
            self._write()
        except PipeplanError:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def get(self, point: Point) -> SweptPoint | None:
        """Return the result of a point; None if there is none, or its plan's file is missing."""
        found = self._found.get(point)
        if found is None or (found.plan and not (self.path / found.plan).is_file()):
            return None
        return found

    def add(self, found: SweptPoint, plan: Plan | None) -> None:
        """Write a plan, then the index that names it."""
        if plan is not None:
            save_valid(plan, self.path / found.point.plan_name)
        self._found[found.point] = found
        self._write()

    def _write(self) -> None:
        """Write the index sorted, whatever the order in which points were solved."""
        rows = tuple(self._found[point] for point in sorted(self._found))
        self._index.model_copy(update={"points": rows}).save(self._index_path)


def require_folder(path: Path) -> None:
    """Refuse a path that cannot be a sweep's folder, before the work that would be lost.

    Raises:
        PipeplanError: if it is a file, holds other files, or there is no folder above it.
    """
    if path.exists() and not path.is_dir():
        raise PipeplanError(f"{path}: is a file; a sweep needs a folder, name another")
    if not path.exists() and not path.parent.is_dir():
        raise PipeplanError(
            f"{path}: the folder cannot be made: there is no folder {path.parent}; create it"
        )
    if path.exists() and not (path / INDEX_NAME).exists() and any(path.iterdir()):
        raise PipeplanError(
            f"{path}: the folder holds other files and no {INDEX_NAME} of a sweep; name a new one"
        )


def _locked(path: Path) -> int:
    """Return a descriptor that locks a folder until it is closed, or this process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    # Some file systems of clusters have no locks.
    with suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise PipeplanError(
                f"{path}: another sweep writes in this folder; wait for its end, or name another "
                "folder"
            ) from None
    return descriptor


def _joined(path: Path, asked: SweepIndex) -> SweepIndex:
    """Return the index of the folder, with what is swept now added.

    Raises:
        PipeplanError: if the points of both cannot be compared.
    """
    old = SweepIndex.load(path) if path.exists() else asked
    if not old.points:
        return asked
    differences = [*old.differences(asked)]
    if differences:
        raise PipeplanError(
            f"{path}: {difference}; points of different sweeps do not compare: name another "
            "folder, or sweep as before"
            for difference in differences
        )
    graphs, clusters = {**old.graphs, **asked.graphs}, {**old.clusters, **asked.clusters}
    return old.model_copy(update={"graphs": graphs, "clusters": clusters})
