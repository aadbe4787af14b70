"""What a training file may ask for, refused before the processes meet."""

from __future__ import annotations

import os
from pathlib import Path

from executor.config import TrainingConfig
from executor.run import Run
from planner.artifacts.document import require_file_path
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.sync.strategies import OPTIONS, TOGETHER


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


def require_effect(plan: Plan, run: Run) -> None:
    """Refuse options of pipelines side by side where all ranks run in step.

    Raises:
        PipeplanError: naming each field, its value and the remedy.
    """
    name = plan.sync.strategy
    if name not in TOGETHER:
        return
    between = ", ".join(other for other in OPTIONS if other not in TOGETHER)
    problems = []
    if run.pipeline is not None or run.coordinator is not None:
        given = [f"--pipeline {run.pipeline}"] if run.pipeline is not None else []
        given += [f"--coordinator {run.coordinator}"] if run.coordinator is not None else []
        count = len(plan.ranks)
        problems.append(
            f"{' '.join(given)}: {name} runs all pipelines in step, as one job that needs no "
            f"coordinator; leave it out and start torchrun --nproc-per-node {count} -m executor "
            f"PLAN, or use --sync with one of {between}"
        )
    others = {"inject": run.inject or None, "group-timeout": run.group_timeout_s}
    for option, value in others.items():
        if value is not None:
            problems.append(
                f"--{option} {value}: it has no effect with {name}, whose ranks run in step; leave "
                f"it out, or use --sync with one of {between}"
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
