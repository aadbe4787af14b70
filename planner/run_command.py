"""The command that runs a plan."""

from __future__ import annotations

import shlex
from pathlib import Path

from planner.artifacts.job import LOSSES
from planner.artifacts.plan import Plan
from planner.text_data import text_problem_of_inputs

_ZOO = "models."


def run_command(plan: Plan, path: Path, text_problem: str | None = None) -> str | None:
    """What to type on one host, with the leave to import what the plan names; None without a model.

    Args:
        plan: whose devices are all here.
        path: of its file.
        text_problem: why text cannot train the model, by its trace; a plan alone knows it only
            where its job lists the inputs. Random batches are asked for then.
    """
    needs_random = text_problem or text_problem_of_inputs(plan.job)
    return _command(plan, path, ["--data", "random"] if needs_random else [])


def _command(plan: Plan, path: Path, data: list[str]) -> str | None:
    if plan.model.factory is None:
        return None
    words = ["torchrun", "--nproc-per-node", str(len(plan.ranks)), "-m", "executor", str(path)]
    return shlex.join([*words, *leave_words(plan), *data])


def data_line(text_problem: str | None) -> str:
    """On what data the command of a traced model trains."""
    drawn = "--data random draws the example batch anew for every microbatch"
    if text_problem is None:
        return f"it trains on text; {drawn}, --config names your data"
    return f"{drawn}, --config names your data; {text_problem}"


def resume_command(plan: Plan, path: Path) -> str | None:
    """The same, to go on from a checkpoint whose folder is left to fill in.

    So is the data where text cannot have been it: what was trained on it goes on with.
    """
    needs_data = text_problem_of_inputs(plan.job)
    command = _command(plan, path, ["--data", "DATA"] if needs_data else [])
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
