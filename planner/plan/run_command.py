"""The command line that runs a plan, as text for people."""

from __future__ import annotations

import shlex
from pathlib import Path

from planner.job import LOSSES, text_problem_of_inputs
from planner.plan.plan import Plan

_ZOO = "models."


def run_command(plan: Plan, path: Path, text_problem: str | None = None) -> str | None:
    """Return the command that runs a plan on one host; None for a plan without a model.

    It includes the option that allows importing the code that the plan names.

    Args:
        plan: the plan, whose devices are all on this host.
        path: path of its file.
        text_problem: why text cannot train the model, by its trace; the plan shows this only if its
            job lists the inputs. The command then asks for random batches.
    """
    needs_random = text_problem or text_problem_of_inputs(plan.job)
    return _command(plan, path, ["--data", "random"] if needs_random else [])


def _command(plan: Plan, path: Path, data: list[str]) -> str | None:
    if plan.model.factory is None:
        return None
    words = ["torchrun", "--nproc-per-node", str(len(plan.ranks)), "-m", "executor", str(path)]
    return shlex.join([*words, *leave_words(plan), *data])


def data_line(text_problem: str | None) -> str:
    """Return a sentence about the data that the command of a traced model trains on."""
    drawn = "--data random draws a new example batch for every microbatch"
    if text_problem is None:
        return f"it trains on text; {drawn}, --config names your data"
    return f"{drawn}, --config names your data; {text_problem}"


def resume_command(plan: Plan, path: Path) -> str | None:
    """Return the command that resumes from a checkpoint, whose folder is left to fill in.

    The data is left to fill in as well if it cannot have been text, since training has to continue
    with the same data.
    """
    needs_data = text_problem_of_inputs(plan.job)
    command = _command(plan, path, ["--data", "DATA"] if needs_data else [])
    return None if command is None else f"{command} --resume CHECKPOINTS"


def leave_words(plan: Plan) -> list[str]:
    """Return the option that allows importing the plan's code; a placeholder without a model."""
    factory, loss = plan.model.factory, plan.job.loss
    words = []
    if factory is None or not factory.startswith(_ZOO):
        words += ["--model", factory or "MODULE:FACTORY"]
    if loss not in LOSSES:
        words += ["--loss", loss]
    return words
