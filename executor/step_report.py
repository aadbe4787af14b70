"""What the first rank tells of every step: a line for people, and one of JSON if asked for."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from executor.metrics import StepMetrics
from planner.artifacts.document import read_text, require_file_path, write_atomically
from planner.errors import PipeplanError

logger = logging.getLogger(__name__)


class StepReport:
    """Logs every step, and writes it to a file if there is one.

    The file is begun anew with the first step; a training that goes on from a checkpoint keeps
    the lines of the steps before it.

    Args:
        path: of the file, or None.
        resumes: whether steps before the first one that is reported may be in the file.

    Raises:
        PipeplanError: if the file cannot be written, or holds something else that would be lost.
    """

    def __init__(self, path: Path | None, *, resumes: bool) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = []
        self._has_begun = False
        self._has_warned = False
        if path is not None:
            require_file_path(path)
            if resumes and path.exists():
                self._lines = _lines_of(path)

    def __call__(self, metrics: StepMetrics) -> None:
        """Tell of one step."""
        logger.info("%s", metrics.line())
        if not math.isfinite(metrics.loss) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the loss of step %d is %s; training goes on", metrics.step, metrics.loss
            )
        if self._path is not None:
            self._write(self._path, metrics)

    def _write(self, path: Path, metrics: StepMetrics) -> None:
        if not self._has_begun:
            self._has_begun = True
            kept = [line for line in self._lines if line["step"] < metrics.step]
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        with path.open("a") as file:
            file.write(json.dumps(_plain(metrics), allow_nan=False) + "\n")


def _plain(metrics: StepMetrics) -> dict[str, Any]:
    """JSON has no word for what is not finite: it becomes null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(metrics).items()
    }


def _lines_of(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(text) for text in read_text(path).splitlines()]
        if not all(isinstance(line["step"], int) for line in lines):
            raise ValueError("a step that is no number")
    except (ValueError, TypeError, KeyError) as error:
        raise PipeplanError(
            f"{path}: not the metrics of a training ({error}), and resuming would add to it; give "
            "another --metrics file"
        ) from None
    return lines
