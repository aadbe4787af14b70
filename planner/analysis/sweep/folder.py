"""A sweep's folder: plans and their index, written as they are found."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import Self

from planner.analysis.sweep.work import PointOutcome
from planner.errors import PipeplanError
from planner.plan.sweep_index import (
    INDEX_NAME,
    MOST_KEPT_POINTS,
    Point,
    SweepIndex,
    SweptPoint,
)
from planner.verification import save_valid

logger = logging.getLogger(__name__)


class SweepFolder:
    """The results so far, and where more is written; a context that keeps other sweeps out.

    Args:
        path: of the folder; made if there is none.
        asked: an index of what is swept now, without points.

    Raises:
        PipeplanError: if it cannot be made, holds other files, points of another sweep, or another
            process sweeps in it.
    """

    def __init__(self, path: str | Path, asked: SweepIndex) -> None:
        self.path = Path(path)
        require_folder(self.path)
        self._index_path = self.path / INDEX_NAME
        _make(self.path)
        self._lock = _locked(self.path)
        try:
            self._index = _joint(self._index_path, asked)
        except PipeplanError:
            os.close(self._lock)
            raise
        self._found = {row.point: row for row in self._index.points}
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def get(self, point: Point) -> SweptPoint | None:
        """Return what was found at a point; None if nothing was, or its plan's file is gone."""
        found = self._found.get(point)
        if found is None or (found.plan and not (self.path / found.plan).is_file()):
            return None
        return found

    @property
    def points(self) -> int:
        """Number of those found."""
        return len(self._found)

    def add(self, outcome: PointOutcome) -> None:
        """Write a plan, then the index that names it.

        Raises:
            PipeplanError: if the folder has as many points as can be read again.
        """
        if outcome.found.point not in self._found and self.points >= MOST_KEPT_POINTS:
            raise PipeplanError(
                f"{self._index_path}: has {self.points:,} points, and no more are read; sweep into "
                "another folder"
            )
        if outcome.plan is not None:
            save_valid(outcome.plan, self.path / outcome.found.point.plan_name)
        self._found[outcome.found.point] = outcome.found
        self._write()

    def _write(self) -> None:
        """Write the index sorted, whatever the order in which points were solved."""
        rows = tuple(self._found[point] for point in sorted(self._found))
        self._index = self._index.model_copy(update={"points": rows})
        self._index.save(self._index_path)


def require_folder(path: Path) -> None:
    """Refuse what can be no folder of a sweep, before the work that would be lost.

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


def _make(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise PipeplanError(f"{path}: the folder cannot be made: {error.strerror}") from None


def _locked(path: Path) -> int:
    """Return a descriptor that locks a folder until it is closed, or this process ends.

    File systems without locks do without.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise PipeplanError(
            f"{path}: another sweep writes in this folder; wait for its end, or name another folder"
        ) from None
    except OSError as error:
        logger.info("%s cannot be locked: %s", path, error.strerror)
    return descriptor


def _joint(path: Path, asked: SweepIndex) -> SweepIndex:
    """Return the index that is there, with what is swept now added.

    Raises:
        PipeplanError: if the points of both cannot be compared.
    """
    if not path.exists():
        return asked
    old = SweepIndex.load(path)
    differences = sorted(old.differences(asked))
    if differences and old.points:
        raise PipeplanError(
            f"{path}: {difference}; points of different sweeps do not compare: name another "
            "folder, or sweep as before"
            for difference in differences
        )
    if differences:
        return asked
    return old.model_copy(
        update={
            "graphs": {**old.graphs, **asked.graphs},
            "clusters": {**old.clusters, **asked.clusters},
        }
    )
