"""What a training file may ask for, refused before the processes meet."""

from __future__ import annotations

import os
from pathlib import Path

from executor.config import TrainingConfig
from planner.artifacts.document import require_file_path
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError


def require_fitting(plan: Plan, config: TrainingConfig) -> None:
    """Refuse a training file that does not fit the plan's precision.

    Raises:
        PipeplanError: naming the field and the remedy.
    """
    precision = plan.job.precision
    problems = []
    if config.autocast is not None and precision != "float32":
        problems.append(
            f"autocast: {config.autocast!r}, but the plan's weights are in {precision}; plan with "
            'precision = "float32" to use it, or leave it out'
        )
    if config.loss_scale is not None and precision != "float16":
        problems.append(
            f"loss_scale: the plan trains in {precision}, where gradients need no scaling; "
            'plan with precision = "float16" to use it, or leave it out'
        )
    if problems:
        raise PipeplanError(problems)


def require_writable(config: TrainingConfig) -> None:
    """Make the folder of checkpoints, and refuse paths that cannot be written once all is trained.

    Raises:
        PipeplanError: naming the field and the remedy.
    """
    if config.timeline is not None:
        require_file_path(config.timeline)
    if config.checkpoint is not None:
        folder = Path(config.checkpoint.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PipeplanError(
                f"checkpoint.folder: {folder} cannot be made: {error.strerror}; name a folder "
                "that can be written"
            ) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PipeplanError(
                f"checkpoint.folder: no permission to write in {folder}; name another folder"
            )
