"""The command that runs a plan."""

from __future__ import annotations

import shlex
from pathlib import Path

from planner.artifacts.job import LOSSES
from planner.artifacts.plan import Plan

_ZOO = "models."


def run_command(plan: Plan, path: Path) -> str | None:
    """What to type on one host, with the leave to import what the plan names; None without a model.

    Args:
        plan: whose devices are all here.
        path: of its file.
    """
    if plan.model.factory is None:
        return None
    words = ["torchrun", "--nproc-per-node", str(len(plan.ranks)), "-m", "executor", str(path)]
    return shlex.join([*words, *leave_words(plan)])


def resume_command(plan: Plan, path: Path) -> str | None:
    """The same, to go on from a checkpoint whose folder is left to fill in."""
    command = run_command(plan, path)
    return None if command is None else f"{command} --resume CHECKPOINTS"


def leave_words(plan: Plan) -> list[str]:
    """The leave to import what a plan names; a word to fill in where it names no model."""
    factory, loss = plan.model.factory, plan.job.loss
    words = []
    if factory is None or not factory.startswith(_ZOO):
        words += ["--model", factory or "MODULE:FACTORY"]
    if loss not in LOSSES:
        words += ["--loss", loss]
    return words
