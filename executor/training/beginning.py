"""Where a training begins: at its first step, or after a checkpoint that all its ranks see."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from executor.checkpoint.manifest import MANIFEST, STEP_FOLDER, step_folders
from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from planner.errors import PipeplanError
from planner.records.document import read_text, write_atomically

logger = logging.getLogger(__name__)
_BEGUN = ".begun"
"""File beside checkpoints: when their last training was started, in seconds since 1970."""
_MOST = 8
"""Checkpoints among which the ranks look for one that all of them see."""


def restarts() -> int:
    """Return how often torchrun has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Beginning:
    """Where a training begins.

    Ranks that torchrun starts again resume from the newest checkpoint of the training file's
    folder. Those that are started for the first time resume from ``--resume``, if there is a
    checkpoint.

    Args:
        config: names the folder that checkpoints are written to.
        run: names the folder or checkpoint to resume from.
        rank: of this process; the first one writes the log.

    Raises:
        PipeplanError: if ``--resume`` names one checkpoint that is not there or not whole.
    """

    def __init__(self, config: TrainingConfig, run: RunSettings, rank: int) -> None:
        table = config.checkpoint
        self._own = None if table is None else Path(table.folder)
        self._resume = None if run.resume is None else Path(run.resume)
        self._is_first = rank == 0
        self._restarts = restarts()
        self._found = self._seen()

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that this rank would resume from; None: it begins at step 1."""
        return self._found[0] if self._found else None

    def agreed(self, ranks: Ranks, require_fits: Callable[[Checkpoint], int]) -> Checkpoint | None:
        """Return the newest checkpoint that all ranks see; all of them call it.

        Args:
            ranks: of the training.
            require_fits: refuses a checkpoint of another training.

        Raises:
            PipeplanError: on every rank, if only some see one, or the folder that is to be written
                to has checkpoints of another training.
        """
        restarts_ = max(ranks.together(lambda: self._restarts))
        if restarts_ != self._restarts:
            # The ranks of another host alone were started again.
            self._restarts = restarts_
            self._found = self._seen()
        if self._begins_beside_others():
            self._require_of_this_training(require_fits)
        seen = ranks.together(lambda: [[c.folder.name, c.digest] for c in self._found])
        common = [row for row in seen[0] if all(row in other for other in seen)]
        if not common and any(seen):
            raise PipeplanError(_differ(seen))
        chosen = [c for c in self._found if common and [c.folder.name, c.digest] == common[0]]
        if chosen and chosen[0] is not self._found[0]:
            logger.warning(
                "%s is skipped: other ranks do not see it; give a folder that all hosts share",
                self._found[0].folder,
            )
        self._found = chosen
        return self.checkpoint

    def tell(self, steps: int) -> None:
        """Log where the training begins, and note when, so that restarts know what it has written.

        Args:
            steps: of the whole training.
        """
        if not self._is_first:
            return
        found, why = self.checkpoint, f"restart {self._restarts}: " if self._restarts else ""
        if found is not None and found.step >= steps:
            logger.info(
                "nothing to do: %s is of step %d and --steps is %d; to go on, give more --steps, "
                "which count from the very first",
                *(found.folder, found.step, steps),
            )
        elif found is not None:
            logger.info("%sresumes from %s, after step %d", why, found.folder, found.step)
        elif self._restarts or self._resume is not None:
            where = self._own if self._restarts and self._own is not None else self._resume
            what = "no [checkpoint] folder" if where is None else f"no checkpoint in {where}"
            logger.info("%s%s: training begins at step 1", why, what)
        if self._own is None or self._restarts or not step_folders(self._own):
            return
        write_atomically(self._own / _BEGUN, f"{time.time()}\n")
        if self._begins_beside_others():
            logger.warning(
                "%s has checkpoints already, up to %s; they stay, and training does not resume "
                "from them: add --resume %s to do so",
                *(self._own, max(step_folders(self._own)), self._own),
            )

    def _seen(self) -> list[Checkpoint]:
        """Return the checkpoints that this rank could resume from, the newest first."""
        if self._restarts and self._own is not None:
            # Not what an earlier training had left in the folder.
            found = Checkpoint.newest_first(self._own, self._note, after_s=_begun_s(self._own))
            if newest := list(islice(found, _MOST)):
                return newest
        path = self._resume
        if path is None:
            return []
        is_one = (path / MANIFEST).exists() or STEP_FOLDER.fullmatch(path.name) or path.is_file()
        if is_one:
            return [Checkpoint.open(path)]
        return list(islice(Checkpoint.newest_first(path, self._note), _MOST))

    def _note(self, line: str) -> None:
        if self._is_first:
            logger.warning("%s", line)

    def _begins_beside_others(self) -> bool:
        """Return whether the training begins anew in a folder that has checkpoints already."""
        if self._own is None or self._restarts or not step_folders(self._own):
            return False
        resume = () if self._resume is None else (self._resume, *self._resume.parents)
        return not self._found or self._own.resolve() not in [path.resolve() for path in resume]

    def _require_of_this_training(self, require_fits: Callable[[Checkpoint], int]) -> None:
        assert self._own is not None
        other = next(Checkpoint.newest_first(self._own, self._note), None)
        try:
            if other is not None:
                require_fits(other)
        except PipeplanError as error:
            raise PipeplanError(
                [
                    f"checkpoint.folder: {problem}, or name another folder"
                    for problem in error.problems
                ]
            ) from None


def _begun_s(folder: Path) -> float:
    """Return when the last training that writes here was started; 0 if it found no checkpoints."""
    path = folder / _BEGUN
    try:
        return float(read_text(path)) if path.exists() else 0.0
    except ValueError:
        raise PipeplanError(f"{path}: not a time in seconds; delete the file") from None


def _differ(seen: Sequence[Sequence[Sequence[str]]]) -> str:
    newest = [f"rank {rank} {row[0][0] if row else 'none'}" for rank, row in enumerate(seen)]
    return (
        f"the ranks see different checkpoints, the newest of {', '.join(newest[:8])}; give a "
        "checkpoint folder on a file system that all hosts share"
    )
