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
    factory, loss = plan.model.factory, plan.job.loss
    if factory is None:
        return None
    words = ["torchrun", "--nproc-per-node", str(len(plan.ranks)), "-m", "executor", str(path)]
    if not factory.startswith(_ZOO):
        words += ["--model", factory]
    if loss not in LOSSES:
        words += ["--loss", loss]
    return shlex.join(words)
